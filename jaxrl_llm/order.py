"""Which prompt stands where in a run: a function of the seed and the position alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np


def epoch_steps(num_prompts: int, prompts_per_step: int, epochs: int = 1) -> int:
    """Steps after which every prompt was drawn `epochs` times (an epoch may end within a step).

    >>> epoch_steps(100, 8)
    13
    """
    return -(-num_prompts * epochs // prompts_per_step)


class _Epochs:
    """Endless: the indices first … first + size - 1, over and over, each time in another order."""

    def __init__(self, first: int, size: int, *, seed: int, shuffle: bool) -> None:
        self._first, self._size, self._shuffle = first, size, shuffle
        self._permutation = functools.lru_cache(maxsize=2)(lambda epoch: _permutation(size, seed, first, epoch))

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> int:
        epoch, place = divmod(index, self._size)
        return self._first + (int(self._permutation(epoch)[place]) if self._shuffle else place)


def _permutation(size: int, *seeds: int) -> np.ndarray:
    # grain's own shuffle takes milliseconds an element for small sources. Raw bits of Philox are the same in every
    # version of numpy, which its permutations need not be.
    generator = np.random.Philox(np.random.SeedSequence([seed % 2**64 for seed in seeds]))
    return np.argsort(generator.random_raw(size))


def draw_order(counts: list[int], weights: Sequence[float], *, seed: int, shuffle: bool) -> Any:
    """position -> index of a prompt, for ever."""
    if not weights:
        return _Epochs(0, sum(counts), seed=seed, shuffle=shuffle)
    starts = np.cumsum([0, *counts]).tolist()
    parts = [_Epochs(start, count, seed=seed, shuffle=shuffle) for start, count in zip(starts, counts, strict=False)]
    return grain.MapDataset.mix([grain.MapDataset.source(part) for part in parts], weights=weights)

"""Padding is not computed: a prompt's responses one right after the other in one line of slots.

What models say of a batch is computed in lines [G, P + S] of a prompt and S slots, and comes back in the response frame
[B, R]. Only S must be known to the compiler: it is one of a few widths, all of whose programs are compiled before the
first step, and the narrowest that holds every line is used. Where the tokens lie follows from `response_length`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.types import Array, Batch


def packed_widths(fractions: Sequence[float], n: int, response_width: int) -> tuple[int, ...]:
    """The slots S of a line of n responses for each fraction of n · R, narrow ones first.

    >>> packed_widths((0.5, 0.25), 4, 8)
    (8, 16)
    """
    return tuple(sorted({math.ceil(fraction * n * response_width) for fraction in fractions}))


def needed_width(response_length: np.ndarray, n: int) -> int:
    """The slots that the longest line takes, if every n rows of [B] make one.

    >>> needed_width(np.array([3, 0, 2, 2]), 2)
    4
    """
    return int(response_length.reshape(-1, n).sum(1).max())


class Packing(NamedTuple):
    """Where a batch's responses lie in lines of S slots."""

    start: Array  # int32 [G, n], the first slot of each response
    response: Array  # int32 [G, S], whose slot it is; n where it is nobody's
    token: Array  # int32 [G, S], which of that response's tokens

    @classmethod
    def of(cls, batch: Batch, width: int) -> Packing:
        """The packing of each prompt's responses; `width` slots must hold them all."""
        length = batch.response_length.reshape(batch.num_prompts, batch.n)
        end = jnp.cumsum(length, 1, dtype=jnp.int32)
        start, slot = end - length, jnp.arange(width, dtype=jnp.int32)[None, :]
        response = (end[:, None, :] <= slot[:, :, None]).sum(2, dtype=jnp.int32)
        first = jnp.take_along_axis(start, jnp.minimum(response, batch.n - 1), 1)
        return cls(start, response, slot - first)

    @property
    def used(self) -> Array:
        """bool [G, S], the slots in which a token lies."""
        return self.response < self.start.shape[1]

    def into_lines(self, rows: Array) -> Array:
        """[B, R] -> [G, S], 0 where no token lies."""
        groups, n = self.start.shape
        width = rows.shape[1]
        place = jnp.where(self.used, self.response * width + self.token, 0)
        return jnp.where(self.used, jnp.take_along_axis(rows.reshape(groups, n * width), place, 1), 0)

    def into_rows(self, lines: Array, width: int) -> Array:
        """[G, S] -> [B, width]: each response's own, and behind them anything."""
        groups, n = self.start.shape
        place = self.start[:, :, None] + jnp.arange(width, dtype=jnp.int32)[None, None, :]
        place = jnp.minimum(place, lines.shape[1] - 1).reshape(groups, n * width)
        return jnp.take_along_axis(lines, place, 1).reshape(groups * n, width)

"""How long the rows of a batch are, on the host: what is counted of a step's work (accounting.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens; 0 of a filler prompt and its rows."""

    prompt: np.ndarray  # int64 [G]
    response: np.ndarray  # int64 [B], what tools said included
    sampled: np.ndarray  # int64 [B], without it

    @classmethod
    def of(cls, batch: Any) -> Self:
        """
        Args:
          batch: a `Batch` with the evidence of `gen`, on the host.
        """
        valid = np.asarray(batch.prompt_valid)
        prompt = np.asarray(batch.prompt_mask).sum(1, dtype=np.int64)
        rows = np.repeat(valid, len(np.asarray(batch.response_length)) // len(prompt))
        response = np.asarray(batch.response_length, np.int64)
        sampled = np.asarray(batch.response_mask).sum(1, dtype=np.int64)
        return cls(prompt * valid, response * rows, sampled * rows)

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Those of several batches, one behind the other."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls._names()))

    @property
    def n(self) -> int:
        return len(self.response) // len(self.prompt)

    def take(self, prompts: Sequence[int]) -> Lengths:
        """The prompts at these places, with all of their rows."""
        rows = np.asarray(prompts)[:, None] * self.n + np.arange(self.n)
        return Lengths(self.prompt[np.asarray(prompts)], self.response[rows.ravel()], self.sampled[rows.ravel()])

    @classmethod
    def _names(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

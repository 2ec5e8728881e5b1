"""Which prompts to draw, by how often the policy has got them right. Pure: a curriculum that has learned is a new one.

Easy and impossible prompts teach group estimators nothing, since all their responses score alike. Kimi k1.5 (2025,
https://arxiv.org/abs/2501.12599) draws prompts by 1 - success; success x (1 - success), the variance of a right or
wrong answer, prefers those that are right half of the time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """The success of every prompt so far. Draws are a function of it, the seed and the cursor alone."""

    success: np.ndarray  # float64 [N], in [0, 1]; NaN: not drawn yet
    sampler: Literal["hard", "frontier"]
    smoothing: float  # share of the newest step in a prompt's success
    floor: float  # weight that every prompt keeps
    seed: int

    @classmethod
    def new(cls, size: int, **settings: Any) -> Curriculum:
        return cls(np.full(size, np.nan), **settings)

    @property
    def weights(self) -> np.ndarray:
        """float64 [N], from `floor` to 1.

        >>> c = Curriculum.new(3, sampler="frontier", smoothing=1.0, floor=0.1, seed=0).learn([0, 1], [0.5, 1.0])
        >>> c.weights.tolist(), dataclasses.replace(c, sampler="hard").weights.tolist()
        ([1.0, 0.1, 1.0], [0.5, 0.1, 1.0])
        """
        s = self.success
        weight = 1 - s if self.sampler == "hard" else 4 * s * (1 - s)
        return np.where(np.isnan(s), 1.0, np.maximum(weight, self.floor))

    def draw(self, cursor: int, count: int) -> list[int]:
        """`count` different prompts, by their weights without replacement (Efraimidis & Spirakis 2006).

        Args:
          cursor: of the run's data; each draws by itself.
          count: at most N.
        """
        if count > len(self.success):
            raise ValueError(f"{count} different prompts of {len(self.success)}")
        # Raw bits, which are the same in every version of numpy.
        bits = np.random.Philox(np.random.SeedSequence([self.seed, cursor])).random_raw(len(self.success))
        uniform = (bits.astype(np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54
        return np.argsort(np.log(uniform) / self.weights, kind="stable")[::-1][:count].tolist()

    def learn(self, prompts: Sequence[int], success: Sequence[float]) -> Curriculum:
        """With the newest success of some prompts; NaN, where nothing was learned of one, leaves it as it was."""
        updated = self.success.copy()
        for prompt, new in zip(prompts, success, strict=True):
            if not np.isnan(new):
                old = updated[prompt]
                updated[prompt] = new if np.isnan(old) else old + self.smoothing * (new - old)
        return dataclasses.replace(self, success=updated)

    def to_json(self) -> list[float | None]:
        """What a checkpoint keeps: the success of each prompt, exactly."""
        return [None if np.isnan(s) else s for s in self.success.tolist()]

    def with_json(self, kept: Sequence[float | None]) -> Curriculum:
        """The inverse of `to_json`.

        Raises:
          ValueError: it is of another number of prompts.
        """
        if len(kept) != len(self.success):
            raise ValueError(f"a curriculum of {len(kept)} prompts, and there are {len(self.success)}")
        return dataclasses.replace(self, success=np.array([np.nan if s is None else s for s in kept], np.float64))

"""Sampling one step ahead of the updates (`trainer.one_step_off_policy`): while a step's phases run on the devices, the
host rewards of the next step's responses are worked out.

Step t samples the responses of step t + 1 first, with the parameters that it is about to update, and only then asks for
the rewards of its own, which step t - 1 has sampled. So responses are of the parameters one step before; only the first
step samples its own. A checkpoint holds what is sampled ahead, since the parameters that sampled it are gone by then: a
run goes on as it would have, wherever it was ended.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_llm.collect import Collected, Collector, Underway
from jaxrl_llm.curriculum import Curriculum
from jaxrl_llm.data import PromptData
from jaxrl_llm.lengths import Lengths
from jaxrl_llm.resume import SampledAhead
from jaxrl_llm.sharding import fetch
from jaxrl_llm.types import WRITTEN_BY, Batch, Params


class AheadCollector:
    """In place of a `Collector`, whose calls it takes; holds what is under way for the next step."""

    def __init__(self, collector: Collector, data: PromptData, *, until: int | None = None) -> None:
        """
        Args:
          until: the step, counted from 0, before which sampling ends; None: never, since the run may be made longer.
        """
        self._collector, self._data, self._until = collector, data, until
        self._next: Underway | None = None

    def __call__(self, view: Params, step: int, cursor: int, curriculum: Curriculum | None) -> Collected:
        """The batch of this step, and the next one's responses under way.

        `given.cursor` of what is returned is behind the prompts of both; the curriculum knows of this step's alone.

        Raises:
          UserError: see `Collector`.
        """
        now, age, generated = self._next, 1, []
        if now is None:
            now, age = self._collector.begin(view, step, cursor, curriculum), 0
            generated.append(_lengths(now))
            cursor = now.given.cursor
        following = None
        if self._until is None or step + 1 < self._until:
            following = self._collector.begin(view, step + 1, cursor, curriculum)
            generated.append(_lengths(following))
            cursor = following.given.cursor
        new = self._collector.finish(now)
        told = self._collector.told(new, self._collector.learn(curriculum, new), tuple(generated))
        self._next = following
        return dataclasses.replace(
            told,
            given=dataclasses.replace(told.given, cursor=cursor),
            metrics=told.metrics | {"training/off_policy_steps": float(age)},
        )

    def kept(self) -> SampledAhead | None:
        """What a checkpoint must hold of what is under way; its scores are worked out again."""
        if (underway := self._next) is None:
            return None
        written = {"gen": _written(underway.sampled.batch)}
        if underway.greedy is not None:
            written["gen_max"] = _written(underway.greedy.batch)
        given = underway.given
        return SampledAhead(given.cursor - len(given.indices), given.indices, written)

    def resume(self, ahead: SampledAhead) -> None:
        """Goes on with what a checkpoint held."""
        given = self._data.take(ahead.indices, ahead.cursor)
        self._next = self._collector.again(given, ahead.written)


def _lengths(underway: Underway) -> Lengths:
    return Lengths.of(fetch(underway.sampled.batch))


def _written(batch: Batch) -> dict[str, Any]:
    """The evidence of `gen`."""
    return {name: getattr(batch, name) for name, phase in WRITTEN_BY.items() if phase == "gen"}

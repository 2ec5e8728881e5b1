"""Clocks of a step's phases, and its metrics as numbers of the host."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_llm.metrics import variance_proxy
from jaxrl_llm.profiling import annotated
from jaxrl_llm.steps.step import prefixed
from jaxrl_llm.steps.update import summarize
from jaxrl_llm.watchdog import Watchdog

Metrics = dict[str, float]


class Timers:
    """Seconds by phase. `with timer("gen") as wait:` measures until what `wait` was given is really there; a phase
    that takes too long is the watchdog's. In a trace it stands under its name."""

    def __init__(self, watchdog: Watchdog | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.step = 0  # that is being done, from 1
        self.phase = ""  # that is running, or that an exception ended
        self.entered: Callable[[str], None] | None = None  # told of each phase that begins or is come back to
        self._watchdog = watchdog or Watchdog()

    def reset(self, step: int) -> None:
        """
        Args:
          step: that begins, from 1.
        """
        self.seconds, self.step = {}, step

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[Any]:
        outer, start = self.phase, time.perf_counter()
        self._enter(phase)
        with self._watchdog.phase(phase), annotated(phase, self.step):
            yield jax.block_until_ready
        self._enter(outer)  # within the phase's time: whoever is told may write a file
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def _enter(self, phase: str) -> None:
        self.phase = phase
        if self.entered:
            self.entered(phase)


def host_metrics(metrics: Any, updated: dict[str, list[Any]], prefix: Mapping[str, str] | None = None) -> Metrics:
    """Everything a step measured on its devices, fetched at once, as numbers.

    Args:
      metrics: scalars by name.
      updated: for each role the metrics of its updates.
      prefix: role -> what its metrics' names begin with, where that is not the role.
    """
    metrics, updated = jax.device_get((metrics, updated))
    for role, updates in updated.items():
        stacked: Any = {name: np.stack([update[name] for update in updates]) for name in updates[0]}
        metrics |= prefixed((prefix or {}).get(role, role), summarize(stacked, np))
    metrics |= variance_proxy(metrics, np)
    return {name: float(value) for name, value in metrics.items()}

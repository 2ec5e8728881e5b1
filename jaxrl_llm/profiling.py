"""`--profile`: a trace of a few steps, with each phase under its name, for xprof, TensorBoard or Perfetto."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax

from jaxrl_llm.errors import StorageError, UserError

FOLDER = "profile"  # in the run's
SKIPPED, LENGTH = 2, 3  # steps at a start, the first of which are slow, and steps of a trace


@dataclasses.dataclass(frozen=True)
class Steps:
    """Which steps are traced, the first and the last of them; None: the third to the fifth after a start."""

    first: int | None = None
    last: int | None = None

    @classmethod
    def parse(cls, text: str) -> Steps:
        """
        Raises:
          UserError: neither "4" nor "4:6", or a run has no such steps.

        >>> Steps.parse("4:6"), Steps.parse("4")
        (Steps(first=4, last=6), Steps(first=4, last=4))
        """
        first, colon, last = text.partition(":")
        if not (first.isdecimal() and (last.isdecimal() if colon else True)) or int(first) < 1:
            raise UserError(
                f"--profile_steps={text}: expected a step, as 4, or the first and the last of several, as 4:6"
            )
        steps = cls(int(first), int(last or first))
        if int(last or first) < int(first):
            raise UserError(f"--profile_steps={text}: the last step comes before the first")
        return steps

    def of_run(self, step: int, total: int) -> tuple[int, int]:
        """The first and the last step of a run that has done `step` of `total` steps.

        Raises:
          UserError: it has none of them before it.

        >>> Steps().of_run(10, 100), Steps().of_run(0, 4), Steps(4, 6).of_run(0, 100)
        ((13, 15), (3, 4), (4, 6))
        """
        first = self.first or min(step + SKIPPED + 1, total)
        last = min(self.last or first + LENGTH - 1, total)
        if not step < first <= last:
            raise UserError(f"--profile_steps={self.first}:{self.last}: this start does steps {step + 1} to {total}")
        return first, last


class Profile:
    """The trace of one run."""

    def __init__(self, steps: Steps, workdir: Path, *, step: int, total: int, note: Callable[[str], None]) -> None:
        """
        Args:
          step, total: those that the run has done, and that it will have done.
          note: told where the trace is.

        Raises:
          UserError: the run has no such steps.
          StorageError: nothing can be written to the folder.
        """
        self._first, self._last = steps.of_run(step, total)
        self._folder, self._note, self._running = workdir / FOLDER, note, False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as error:
            raise StorageError(f"--profile: {self._folder} cannot be written: {error}") from error

    def before(self, step: int) -> None:
        """To be called before a step, by its number from 1."""
        if step == self._first:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every call of Python's would hide the phases
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
            self._running = True

    def after(self, step: int) -> None:
        """To be called after it."""
        if step == self._last:
            self.close()

    def close(self) -> None:
        """Writes what has been traced, if anything is being. A disk that fails does not end the run."""
        if not self._running:
            return
        self._running = False
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            self._note(f"the profile is not written: {type(error).__name__}: {error}")
            return
        traces = sorted(self._folder.glob("plugins/profile/*/perfetto_trace.json.gz"), key=lambda x: x.stat().st_mtime)
        for trace in traces[-1:]:
            self._note(
                f"profile of steps {self._first} to {self._last}: open {trace} at https://ui.perfetto.dev, or "
                f"`xprof {self._folder}` (pip install xprof)"
            )


@contextlib.contextmanager
def annotated(phase: str, step: int):
    """A phase, or a whole step, under its name in a trace that may be running."""
    made = jax.profiler.StepTraceAnnotation("step", step_num=step) if phase == "step" else None
    with made or jax.profiler.TraceAnnotation(phase):
        yield

"""What a person sees while a run goes on: a live display in a terminal (live.py), plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

from jaxrl_llm.live import RichDisplay
from jaxrl_llm.meters import TimeLeft, evaluated_line, evaluated_scores, headline, preview, sample_numbers, visible


class Display(Protocol):
    """Where progress is shown."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def note(self, text: str) -> None: ...
    def busy(self, text: str) -> None: ...
    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...
    def close(self, summary: Sequence[str] = ()) -> None: ...


def make_display(kind: str, *, name: str, total_steps: int, log_interval: int) -> Display:
    """The display for `logging.progress`: auto is rich in a terminal, else plain; rich needs one that knows Unicode."""
    stdout: Any = sys.stdout  # None where the process began without one
    unicode = (getattr(stdout, "encoding", None) or "").lower().startswith("utf")
    match kind:
        case _ if kind == "none" or stdout is None:
            return NoDisplay()
        case "rich" | "auto" if unicode and (kind == "rich" or sys.stdout.isatty()):
            return RichDisplay(name, total_steps)
        case _:
            return PlainDisplay(name, total_steps, log_interval)


class NoDisplay:
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def busy(self, text: str) -> None:
        pass

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def close(self, summary: Sequence[str] = ()) -> None:
        pass


class PlainDisplay:
    """One line every `log_interval` steps, for files and pipes."""

    def __init__(self, name: str, total_steps: int, log_interval: int, stream: TextIO | None = None):
        self._total_steps, self._log_interval = total_steps, log_interval
        self._stream = stream or sys.stdout
        self._time_left = TimeLeft(total_steps)
        self._print(f"run {name}: {total_steps} steps")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        left, numbers = self._time_left.after(step, metrics), headline(metrics)
        evaluated = evaluated_scores(metrics)
        if step % self._log_interval == 0 or step == self._total_steps or evaluated:
            parts = [f"{label} {text}" for label, text in numbers]
            parts += [evaluated_line(evaluated)] if evaluated else []
            parts += [f"left {left}"] if left else []
            self._print(f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}  " + "  ".join(parts))

    def note(self, text: str) -> None:
        self._print(text)

    def busy(self, text: str) -> None:
        self._print(text)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            numbers = "  ".join(f"{label} {text}" for label, text in sample_numbers(row))
            self._print(f"  sample of step {step}  {numbers}")
            for name in ("prompt", "response"):
                self._print(f"    {name:<8} {preview(row, name)!r}")

    def close(self, summary: Sequence[str] = ()) -> None:
        for line in summary:
            self._print(line)

    def _print(self, line: str) -> None:
        print(visible(line, getattr(self._stream, "encoding", None)), file=self._stream, flush=True)

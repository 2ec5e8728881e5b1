"""What a person sees while a run goes on: a live display in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

RECENT = 20  # steps whose mean duration predicts the time left
PREVIEW = 400  # characters of a prompt or a response that a table shows, from its end and from its start


class Display(Protocol):
    """Where progress is shown."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def note(self, text: str) -> None: ...
    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...
    def close(self) -> None: ...


def make_display(kind: str, *, name: str, total_steps: int, log_interval: int) -> Display:
    """The display for `logging.progress`: auto is rich in a terminal, else plain."""
    match kind:
        case "none":
            return NoDisplay()
        case "rich":
            return RichDisplay(name, total_steps)
        case "auto" if sys.stdout.isatty():
            return RichDisplay(name, total_steps)
        case _:
            return PlainDisplay(name, total_steps, log_interval)


def headline(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """The few numbers worth a glance at every step, as (label, text); evaluations last.

    >>> headline({"critic/score/mean": 0.25, "response_length/mean": 12.0, "val-core/sums/reward/mean@1": 0.5})
    [('reward', '0.250'), ('length', '12.0'), ('val-core/sums/reward/mean@1', '0.500')]
    """
    shown = [
        ("reward", "critic/score/mean", "{:.3f}"),
        ("length", "response_length/mean", "{:.1f}"),
        ("kl", "actor/ppo_kl", "{:.4f}"),
        ("s/step", "perf/time_per_step", "{:.2f}"),
    ]
    line = [(label, form.format(metrics[key])) for label, key, form in shown if _finite(metrics.get(key))]
    seconds, tokens = metrics.get("perf/time_per_step"), metrics.get("perf/total_num_tokens")
    if seconds and tokens:
        line.append(("tokens/s", f"{tokens / seconds:,.0f}"))
    core = [(key, value) for key, value in metrics.items() if key.startswith("val-core/") and _finite(value)]
    evaluated = [(key, f"{value:.3f}") for key, value in core]
    return line + evaluated


def duration(seconds: float) -> str:
    """
    >>> duration(7), duration(187), duration(4000)
    ('7s', '3m07s', '1h06m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class TimeLeft:
    """Predicts the time left from the recent steps; the first one, which compiles, is left out."""

    def __init__(self, total_steps: int):
        self._total_steps, self._seconds, self._seen = total_steps, deque[float](maxlen=RECENT), 0

    def after(self, step: int, seconds: float) -> str:
        """The time left after `step`, which took `seconds`; empty before there is anything to judge by."""
        self._seen += 1
        if self._seen > 1:
            self._seconds.append(seconds)
        left = self._total_steps - step
        if left <= 0 or not self._seconds:
            return ""
        return duration(left * sum(self._seconds) / len(self._seconds))


class NoDisplay:
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def close(self) -> None:
        pass


class PlainDisplay:
    """One line every `log_interval` steps, for files and pipes."""

    def __init__(self, name: str, total_steps: int, log_interval: int, stream: TextIO | None = None):
        self._total_steps, self._log_interval = total_steps, log_interval
        self._stream = stream or sys.stdout
        self._time_left = TimeLeft(total_steps)
        self._print(f"run {name}: {total_steps} steps")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        left = self._time_left.after(step, metrics["perf/time_per_step"]) if "perf/time_per_step" in metrics else ""
        numbers = headline(metrics)
        evaluated = any(label.startswith("val") for label, _ in numbers)
        if step % self._log_interval == 0 or step == self._total_steps or evaluated:
            parts = [f"{label} {text}" for label, text in numbers] + ([f"left {left}"] if left else [])
            self._print(f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}  " + "  ".join(parts))

    def note(self, text: str) -> None:
        self._print(text)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            numbers = "  ".join(f"{label} {text}" for label, text in _sample_numbers(row))
            self._print(f"  sample of step {step}  {numbers}")
            for name in ("prompt", "response"):
                self._print(f"    {name:<8} {_preview(row, name)!r}")

    def close(self) -> None:
        pass

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class RichDisplay:
    """A live bar with the numbers below it; notes and tables scroll away above."""

    def __init__(self, name: str, total_steps: int):
        from rich import progress
        from rich.live import Live

        self._time_left = TimeLeft(total_steps)
        self._progress = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("[bold]{task.description}[/]"),
            progress.BarColumn(bar_width=30),
            progress.MofNCompleteColumn(),
            progress.TextColumn("[dim]{task.fields[left]}[/]"),
        )
        self._task = self._progress.add_task(name, total=total_steps, left="")
        self._live = Live(self._progress, refresh_per_second=5)
        self._live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        from rich.console import Group
        from rich.text import Text

        left = self._time_left.after(step, metrics["perf/time_per_step"]) if "perf/time_per_step" in metrics else ""
        self._progress.update(self._task, completed=step, left=f"{left} left" if left else "")
        numbers = headline(metrics)
        line = Text("  ")
        for label, text in numbers:
            line.append(f"{label} ", "dim").append(f"{text}  ")
        self._live.update(Group(self._progress, line))
        if evaluated := [f"{label} {text}" for label, text in numbers if label.startswith("val")]:
            self.note(f"step {step}  " + "  ".join(evaluated))

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"samples of step {step}", title_justify="left", show_lines=True, expand=True)
        table.add_column("prompt", ratio=2, style="dim")
        table.add_column("response", ratio=3)
        labels = list(dict.fromkeys(label for row in rows for label, _ in _sample_numbers(row)))
        for label in labels:
            table.add_column(label, justify="right")
        for row in rows:
            numbers = dict(_sample_numbers(row))
            texts = [Text(_preview(row, name)) for name in ("prompt", "response")]
            table.add_row(*texts, *(numbers.get(label, "") for label in labels))
        self._live.console.print(table)

    def close(self) -> None:
        self._live.stop()


def _sample_numbers(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    forms = {"score": "{:.2f}", "advantage": "{:+.2f}", "length": "{:d}"}
    return [(name, form.format(row[name])) for name, form in forms.items() if row.get(name) is not None]


def _preview(row: Mapping[str, Any], name: str) -> str:
    """The end of a prompt, where the question stands; the start and the end of a response."""
    text = str(row.get(name, ""))
    if name == "prompt":
        return text if len(text) <= PREVIEW else "… " + text[-PREVIEW:]
    return text if len(text) <= 2 * PREVIEW else f"{text[:PREVIEW]} … {text[-PREVIEW:]}"


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)

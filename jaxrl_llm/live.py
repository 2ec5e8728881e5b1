"""A run as a terminal shows it while it goes on: a live display (rich)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl_llm.meters import (
    BARS,
    METERS,
    RECENT,
    TimeLeft,
    evaluated_line,
    evaluated_scores,
    preview,
    sample_numbers,
    sparkline,
    tokens_per_second,
    visible,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

PHASE_COLOURS = ("blue", "dark_orange", "green", "magenta", "red", "cyan", "yellow", "bright_black")


class RichDisplay:
    """The course of a run at the bottom of a terminal; notes and tables of samples scroll away above."""

    def __init__(self, name: str, total_steps: int):
        from rich.live import Live

        self._board = Board(name, total_steps)
        self._live = Live(self._board, refresh_per_second=5)
        self._live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._board.step(step, metrics)
        if evaluated := evaluated_scores(metrics):
            self.note(f"step {step}  {evaluated_line(evaluated)}")

    def busy(self, text: str) -> None:
        self._board.busy(text)

    def note(self, text: str) -> None:
        self._board.busy("")
        console = self._live.console
        console.print(visible(text, console.encoding), markup=False, highlight=False)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._live.console.print(samples_table(step, rows, self._live.console))

    def close(self, summary: Sequence[str] = ()) -> None:
        self._live.stop()
        for line in summary:
            self._live.console.print(
                visible(line, self._live.console.encoding), markup=False, highlight=False, soft_wrap=True
            )


class Board:
    """The live part: a bar, meters with their course over the steps, evaluated scores, the phases' share of a step."""

    def __init__(self, name: str, total_steps: int):
        from rich import progress

        self._time_left = TimeLeft(total_steps)
        self._progress = progress.Progress(
            progress.SpinnerColumn(),
            progress.TextColumn("[bold]{task.description}[/]", markup=True),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TextColumn("[dim]{task.fields[left]}[/]"),
            expand=True,
        )
        self._task = self._progress.add_task(name.replace("[", r"\["), total=total_steps, left="")
        self._courses: dict[str, list[float]] = {}
        self._speed = 0.0
        self._scores: dict[str, list[tuple[int, str, float]]] = {}  # source -> step, text with its interval, mean
        self._phases: deque[dict[str, float]] = deque(maxlen=RECENT)
        self._drawn: tuple[int, list[RenderableType]] | None = None  # for a width
        self._busy, self._since = "", 0.0

    def busy(self, text: str) -> None:
        """What lasts, shown with its seconds; "" ends it."""
        self._busy, self._since = text, time.monotonic()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        left = self._time_left.after(step, metrics)
        self._progress.update(self._task, completed=step, left=f"{left} left" if left else "")
        for meter in METERS:
            if (value := meter.value(metrics)) is not None:
                self._courses.setdefault(meter.label, []).append(value)
        self._speed = tokens_per_second(metrics) or self._speed
        for score in evaluated_scores(metrics):
            self._scores.setdefault(score.source, []).append((step, score.text, score.mean))
        phases = {name.removeprefix("timing_s/"): x for name, x in metrics.items() if name.startswith("timing_s/")}
        if phases.pop("step", None):
            self._phases.append(phases)
        self._drawn = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        yield self._progress
        if self._busy:
            yield Text(f"  {visible(self._busy)}, {time.monotonic() - self._since:.0f} s", style="dim", no_wrap=True)
        width = options.max_width
        if self._drawn is None or self._drawn[0] != width:  # once a step, while the bar moves on
            meters = [self._meters(width)] if self._courses else []
            self._drawn = (width, [*meters, *self._evaluated(width), *self._phase_lines(width)])
        yield from self._drawn[1]

    def _meters(self, width: int) -> RenderableType:
        from rich.table import Table
        from rich.text import Text

        columns = max(1, min(4, width // 39))
        room = max(1, (width - 1) // columns - 22)
        grid = Table.grid(padding=(0, 1, 0, 0))
        cells = []
        for meter in METERS:
            if course := self._courses.get(meter.label):
                value = Text(meter.text(course[-1]), justify="right", style="bold")
                label = Text(f"  {meter.label:<9}", style="dim")
                cells.append([label, value, Text(sparkline(course, room), style="cyan")])
        if self._speed:
            cells.append(
                [Text("  tokens/s ", style="dim"), Text(f"{self._speed:,.0f}", justify="right", style="bold"), Text("")]
            )
        for _ in range(columns):
            grid.add_column(min_width=11, no_wrap=True)
            grid.add_column(min_width=7, justify="right", no_wrap=True)
            grid.add_column(width=room, no_wrap=True)
        for i in range(0, len(cells), columns):
            grid.add_row(*(part for cell in cells[i : i + columns] for part in cell))
        return grid

    def _evaluated(self, width: int) -> Iterator[RenderableType]:
        from rich.text import Text

        for source, scores in list(self._scores.items())[:4]:
            (first_step, first, _), (last_step, last, _) = scores[0], scores[-1]
            line = Text(no_wrap=True, overflow="ellipsis").append("  eval      ", "dim").append(f"{visible(source)} ")
            if last_step != first_step:
                line.append(f"{first} → ")
            line.append(last, "bold green").append(f" at step {last_step} ")
            if len(scores) > 2 and (room := width - line.cell_len - 1) >= 4:
                line.append(sparkline([mean for *_, mean in scores], min(room, 40)), "cyan")
            yield line

    def _phase_lines(self, width: int) -> Iterator[RenderableType]:
        from rich.text import Text

        seconds: dict[str, float] = {}
        for step in self._phases:
            for name, value in step.items():
                seconds[name] = seconds.get(name, 0.0) + value
        whole = sum(seconds.values())
        if not whole:
            return
        ranked = sorted(seconds, key=lambda name: -seconds[name])
        colour = {name: PHASE_COLOURS[min(i, len(PHASE_COLOURS) - 1)] for i, name in enumerate(ranked)}
        room, bar, done = max(1, width - 14), Text(no_wrap=True).append("  time      ", "dim"), 0.0
        for name in seconds:  # in the order of a step
            start, done = done, done + seconds[name]
            bar.append(BARS[-1] * (round(room * done / whole) - round(room * start / whole)), colour[name])
        yield bar
        legend = Text("            ", no_wrap=True, overflow="ellipsis")
        for name in ranked:
            text = f" {name} {seconds[name] / whole:.0%}  "
            if legend.cell_len + len(text) + 1 > width or seconds[name] < 0.005 * whole:
                break
            legend.append("■", colour[name]).append(text)
        yield legend


def samples_table(step: int, rows: Sequence[Mapping[str, Any]], console: Console) -> RenderableType:
    """Responses from best to worst, each with its score and whether it did better than the policy expected."""
    from rich.table import Table
    from rich.text import Text

    wide = console.width >= 130
    table = Table(title=f"samples of step {step}", title_justify="left", show_lines=True, expand=True)
    labels = list(dict.fromkeys(label for row in rows for label, _ in sample_numbers(row)))
    if wide:
        for label in labels:
            table.add_column(label, justify="right", no_wrap=True)
        table.add_column("prompt", ratio=2)
        table.add_column("response", ratio=3)
    else:
        table.add_column("", no_wrap=True)
        table.add_column("prompt, response", ratio=1)
    for row in rows:
        numbers, sign = dict(sample_numbers(row)), row.get("advantage") or 0.0
        style = "green" if sign > 0 else "red" if sign < 0 else ""
        prompt, response = (Text(visible(preview(row, name), console.encoding)) for name in ("prompt", "response"))
        prompt.stylize("dim")
        if wide:
            table.add_row(*(Text(numbers.get(label, ""), style=style) for label in labels), prompt, response)
        else:
            column = "\n".join(f"{label:<9} {text:>6}" for label, text in numbers.items())
            table.add_row(Text(column, style=style), prompt + Text("\n") + response)
    return table

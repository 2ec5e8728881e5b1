"""What a person sees while a run goes on: a live display in a terminal, plain lines elsewhere.

Texts of a model or a dataset are shown as they are, but for what a terminal would obey: control characters become
visible.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

RECENT = 20  # steps whose mean duration predicts the time left, and whose phases are shown
PREVIEW = 300  # characters of a prompt or a response that a table shows, from its end and from its start
BARS = "▁▂▃▄▅▆▇█"
PHASE_COLOURS = ("blue", "dark_orange", "green", "magenta", "red", "cyan", "yellow", "bright_black")


class Display(Protocol):
    """Where progress is shown."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def note(self, text: str) -> None: ...
    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...
    def close(self, summary: Sequence[str] = ()) -> None: ...


def make_display(kind: str, *, name: str, total_steps: int, log_interval: int) -> Display:
    """The display for `logging.progress`: auto is rich in a terminal, else plain; rich needs one that knows Unicode."""
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    match kind:
        case "none":
            return NoDisplay()
        case "rich" | "auto" if unicode and (kind == "rich" or sys.stdout.isatty()):
            return RichDisplay(name, total_steps)
        case _:
            return PlainDisplay(name, total_steps, log_interval)


class Meter(NamedTuple):
    """A number worth a glance at every step: the first of the metrics that there is."""

    label: str
    names: tuple[str, ...]
    form: str
    if_not_zero: bool = False  # a 0 means that there is nothing to measure

    def value(self, metrics: Mapping[str, float]) -> float | None:
        value = next((metrics[name] for name in self.names if _finite(metrics.get(name))), None)
        return None if value == 0 and self.if_not_zero else value

    def text(self, value: float) -> str:
        """`value` in the meter's form, or in powers of ten where that would only leave zeros."""
        text = self.form.format(value)
        return f"{value:.0e}" if value and not re.search("[1-9]", text) else text


METERS = (
    Meter("reward", ("critic/score/mean",), "{:.3f}"),
    Meter("loss", ("train/loss",), "{:.4f}"),
    Meter("kl(ref)", ("actor/kl_loss", "actor/reward_kl_penalty"), "{:.4f}"),
    Meter("kl", ("actor/ppo_kl",), "{:.4f}", if_not_zero=True),  # with one update a batch the policy is the old one
    Meter("entropy", ("actor/entropy",), "{:.3f}"),
    Meter("length", ("response_length/mean",), "{:.1f}"),
    Meter("truncated", ("response/truncated_ratio",), "{:.1%}"),
    Meter("grad norm", ("actor/grad_norm", "train/grad_norm"), "{:.3g}"),
    Meter("explained", ("critic/vf_explained_var",), "{:.2f}"),
    Meter("s/step", ("perf/time_per_step",), "{:.2f}"),
)
ONLY_LIVE = ("grad norm", "explained")  # left out of plain lines


def headline(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """The few numbers worth a glance at every step, as (label, text).

    >>> headline({"critic/score/mean": 0.25, "response_length/mean": 12.0})
    [('reward', '0.250'), ('length', '12.0')]
    """
    line = []
    for meter in METERS:
        value = meter.value(metrics)
        if value is not None and meter.label not in ONLY_LIVE:
            line.append((meter.label, meter.text(value)))
    if failed := metrics.get("reward/failed_ratio"):
        line.append(("rewards failed", f"{failed:.0%}"))
    if speed := tokens_per_second(metrics):
        line.append(("tokens/s", f"{speed:,.0f}"))
    return line


class HeldOut(NamedTuple):
    """A held-out score: of which source, and its 95% interval and the share of failed rewards in words."""

    source: str
    mean: float
    text: str


def held_out_scores(metrics: Mapping[str, float]) -> list[HeldOut]:
    """What a step's evaluation found, by source.

    >>> held_out_scores({"val-core/sums/reward/mean@1": 0.5, "val-aux/sums/failed_ratio": 0.25})[0].text
    '0.500 (the reward failed on 25%, which count as 0)'
    """
    found = []
    for name, mean in metrics.items():
        if not (match := re.fullmatch(r"val-core/(.+)/reward/mean@\d+", name)) or not _finite(mean):
            continue
        low, high = (metrics.get(f"val-aux/{match[1]}/reward/{side}95") for side in ("low", "high"))
        text = f"{mean:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else "")
        if failed := metrics.get(f"val-aux/{match[1]}/failed_ratio"):
            text += f" (the reward failed on {failed:.0%}, which count as 0)"
        found.append(HeldOut(match[1], mean, text))
    return found


def _held_out_line(scores: Sequence[HeldOut]) -> str:
    return "held out " + ", ".join(f"{score.source} {score.text}" for score in scores)


def tokens_per_second(metrics: Mapping[str, float]) -> float:
    """Of all devices; 0 where it is not known."""
    seconds, tokens = metrics.get("perf/time_per_step"), metrics.get("perf/total_num_tokens")
    return tokens / seconds if seconds and tokens else 0.0


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in at most `width` characters, each the mean of its share of them.

    >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8), sparkline([0, 0, 7, 7], 2), sparkline([3, 3], 8)
    ('▁▂▃▄▅▆▇█', '▁█', '▁▁')
    """
    count = min(width, len(values))
    if count < 1:
        return ""
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


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

    def after(self, step: int, metrics: Mapping[str, float]) -> str:
        """The time left after `step`, of these metrics; empty before there is anything to judge by."""
        seconds = metrics.get("timing_s/step", metrics.get("perf/time_per_step"))
        if seconds is None:
            return ""
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
        evaluated = held_out_scores(metrics)
        if step % self._log_interval == 0 or step == self._total_steps or evaluated:
            parts = [f"{label} {text}" for label, text in numbers]
            parts += [_held_out_line(evaluated)] if evaluated else []
            parts += [f"left {left}"] if left else []
            self._print(f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}  " + "  ".join(parts))

    def note(self, text: str) -> None:
        self._print(text)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            numbers = "  ".join(f"{label} {text}" for label, text in _sample_numbers(row))
            self._print(f"  sample of step {step}  {numbers}")
            for name in ("prompt", "response"):
                self._print(f"    {name:<8} {_preview(row, name)!r}")

    def close(self, summary: Sequence[str] = ()) -> None:
        for line in summary:
            self._print(line)

    def _print(self, line: str) -> None:
        print(_visible(line, getattr(self._stream, "encoding", None)), file=self._stream, flush=True)


class RichDisplay:
    """The course of a run at the bottom of a terminal; notes and tables of samples scroll away above."""

    def __init__(self, name: str, total_steps: int):
        from rich.live import Live

        self._board = Board(name, total_steps)
        self._live = Live(self._board, refresh_per_second=5)
        self._live.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._board.step(step, metrics)
        if evaluated := held_out_scores(metrics):
            self.note(f"step {step}  {_held_out_line(evaluated)}")

    def note(self, text: str) -> None:
        console = self._live.console
        console.print(_visible(text, console.encoding), markup=False, highlight=False)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._live.console.print(samples_table(step, rows, self._live.console))

    def close(self, summary: Sequence[str] = ()) -> None:
        self._live.stop()
        for line in summary:
            self._live.console.print(
                _visible(line, self._live.console.encoding), markup=False, highlight=False, soft_wrap=True
            )


class Board:
    """The live part: a bar, meters with their course over the steps, held-out scores, the phases' share of a step."""

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

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        left = self._time_left.after(step, metrics)
        self._progress.update(self._task, completed=step, left=f"{left} left" if left else "")
        for meter in METERS:
            if (value := meter.value(metrics)) is not None:
                self._courses.setdefault(meter.label, []).append(value)
        self._speed = tokens_per_second(metrics) or self._speed
        for score in held_out_scores(metrics):
            self._scores.setdefault(score.source, []).append((step, score.text, score.mean))
        phases = {name.removeprefix("timing_s/"): x for name, x in metrics.items() if name.startswith("timing_s/")}
        if phases.pop("step", None):
            self._phases.append(phases)
        self._drawn = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield self._progress
        width = options.max_width
        if self._drawn is None or self._drawn[0] != width:  # once a step, while the bar moves on
            meters = [self._meters(width)] if self._courses else []
            self._drawn = (width, [*meters, *self._held_out(width), *self._phase_lines(width)])
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

    def _held_out(self, width: int) -> Iterator[RenderableType]:
        from rich.text import Text

        for source, scores in list(self._scores.items())[:4]:
            (first_step, first, _), (last_step, last, _) = scores[0], scores[-1]
            line = Text(no_wrap=True, overflow="ellipsis").append("  held out  ", "dim").append(f"{_visible(source)} ")
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
    labels = list(dict.fromkeys(label for row in rows for label, _ in _sample_numbers(row)))
    if wide:
        for label in labels:
            table.add_column(label, justify="right", no_wrap=True)
        table.add_column("prompt", ratio=2)
        table.add_column("response", ratio=3)
    else:
        table.add_column("", no_wrap=True)
        table.add_column("prompt, response", ratio=1)
    for row in rows:
        numbers, sign = dict(_sample_numbers(row)), row.get("advantage") or 0.0
        style = "green" if sign > 0 else "red" if sign < 0 else ""
        prompt, response = (Text(_visible(_preview(row, name), console.encoding)) for name in ("prompt", "response"))
        prompt.stylize("dim")
        if wide:
            table.add_row(*(Text(numbers.get(label, ""), style=style) for label in labels), prompt, response)
        else:
            column = "\n".join(f"{label:<9} {text:>6}" for label, text in numbers.items())
            table.add_row(Text(column, style=style), prompt + Text("\n") + response)
    return table


def _sample_numbers(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    forms = {"score": "{:.2f}", "advantage": "{:+.2f}", "length": "{:d}"}
    if row.get("valid") is False:
        row = {**row, "score": None, "advantage": None}
    failed = [("score", "failed")] if row.get("valid") is False else []
    found = failed + [(name, form.format(row[name])) for name, form in forms.items() if row.get(name) is not None]
    return found + ([("end", str(row["finish_reason"]))] if row.get("finish_reason") else [])


def _preview(row: Mapping[str, Any], name: str) -> str:
    """The end of a prompt, where the question stands; the start and the end of a response."""
    text = str(row.get(name, ""))
    if name == "prompt":
        return text if len(text) <= PREVIEW else "… " + text[-PREVIEW:]
    return text if len(text) <= 2 * PREVIEW else f"{text[:PREVIEW]} … {text[-PREVIEW:]}"


def _visible(text: str, encoding: str | None = None) -> str:
    r"""`text` with what a terminal would obey made visible, in what `encoding` can say.

    >>> _visible("a\x1b[31m\u202eb\x00"), _visible("é", "ascii")
    ('a␛[31m\\u202eb␀', '\\xe9')
    """

    def name(match: re.Match[str]) -> str:
        code = ord(match[0])
        return chr(0x2400 + code) if code < 32 else f"\\u{code:04x}"

    shown = re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", name, text)
    return shown.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)

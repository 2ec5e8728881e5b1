"""The numbers of a run that are worth a glance, and texts made fit for a terminal.

Texts of a model or a dataset are shown as they are, but for what a terminal would obey: control characters become
visible.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

RECENT = 20  # steps whose mean duration predicts the time left, and whose phases are shown
PREVIEW = 300  # characters of a prompt or a response that a table shows, from its end and from its start
BARS = "▁▂▃▄▅▆▇█"


class Meter(NamedTuple):
    """A number worth a glance at every step: the first of the metrics that there is."""

    label: str
    names: tuple[str, ...]
    form: str
    if_not_zero: bool = False  # a 0 means that there is nothing to measure

    def value(self, metrics: Mapping[str, float]) -> float | None:
        value = next((metrics[name] for name in self.names if finite(metrics.get(name))), None)
        return None if value == 0 and self.if_not_zero else value

    def text(self, value: float) -> str:
        """`value` in the meter's form, or in powers of ten where that would only leave zeros."""
        text = self.form.format(value)
        return f"{value:.0e}" if value and not re.search("[1-9]", text) else text


METERS = (
    Meter("reward", ("critic/score/mean",), "{:.3f}"),
    Meter("loss", ("train/loss",), "{:.4f}"),
    Meter("in order", ("train/accuracy",), "{:.1%}"),  # pairs, by a reward model that is trained
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


GREEDY = "/greedy"


class Evaluated(NamedTuple):
    """The score of a source of `data.eval`, with its 95% interval and the share of failed rewards in words, and what
    else was measured: the several rewards that it is made of, those that are only watched."""

    source: str
    mean: float
    text: str
    others: dict[str, float]


def evaluated_scores(metrics: Mapping[str, float]) -> list[Evaluated]:
    """What a step's evaluation found, by source.

    >>> evaluated_scores({"val-core/sums/reward/mean@1": 0.5, "val-aux/sums/failed_ratio": 0.25})[0].text
    '0.500 (the reward failed on 25%, which count as 0)'
    """
    found = []
    for name, mean in metrics.items():
        if not (match := re.fullmatch(r"val-core/(.+)/reward/mean@(\d+)", name)) or not finite(mean):
            continue
        aux = beside_mean(metrics, match[1], int(match[2]))
        low, high = (metrics.get(f"{aux}/reward/{side}95") for side in ("low", "high"))
        text = f"{mean:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else "")
        if failed := metrics.get(f"{aux}/failed_ratio"):
            text += f" (the reward failed on {failed:.0%}, which count as 0)"
        greedy = " greedy" if aux.endswith(GREEDY) else ""
        found.append(Evaluated(match[1] + greedy, mean, text, other_scores(metrics, match[1], mean)))
    return found


def beside_mean(names: Container[str], source: str, n: int) -> str:
    """What the names of the interval and the failures that belong to a source's mean@n begin with: where there are
    greedy responses beside sampled ones, theirs are apart.

    >>> beside_mean({"val-aux/sums/failed_ratio", "val-aux/sums/greedy/failed_ratio"}, "sums", 1)
    'val-aux/sums/greedy'
    """
    aux = f"val-aux/{source}"
    return aux + GREEDY if n == 1 and f"{aux}{GREEDY}/failed_ratio" in names else aux


def other_scores(metrics: Mapping[str, float], source: str, mean: float) -> dict[str, float]:
    """What an evaluation found of a source beside its score, but for what is the same number.

    >>> other_scores({"val-aux/sums/exact/mean@1": 0.5, "val-aux/sums/reward_model/mean@1": 2.0}, "sums", 2.0)
    {'exact': 0.5}
    """
    name = re.compile(rf"val-aux/{re.escape(source)}/([^/]+)/mean@\d+")
    found = {match[1]: value for key, value in metrics.items() if (match := name.fullmatch(key)) and finite(value)}
    return {name: value for name, value in found.items() if value != mean}


def evaluated_line(scores: Sequence[Evaluated]) -> str:
    def text(score: Evaluated) -> str:
        others = ", ".join(f"{name} {value:.3f}" for name, value in score.others.items())
        return f"{score.source} {score.text}" + (f" ({others})" if others else "")

    return "eval " + ", ".join(map(text, scores))


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


def sample_numbers(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    forms = {"score": "{:.2f}", "advantage": "{:+.2f}", "length": "{:d}"}
    if row.get("valid") is False:
        row = {**row, "score": None, "advantage": None}
    failed = [("score", "failed")] if row.get("valid") is False else []
    found = failed + [(name, form.format(row[name])) for name, form in forms.items() if row.get(name) is not None]
    return found + ([("end", str(row["finish_reason"]))] if row.get("finish_reason") else [])


def preview(row: Mapping[str, Any], name: str) -> str:
    """The end of a prompt, where the question stands; the start and the end of a response."""
    text = str(row.get(name, ""))
    if name == "prompt":
        return text if len(text) <= PREVIEW else "… " + text[-PREVIEW:]
    return text if len(text) <= 2 * PREVIEW else f"{text[:PREVIEW]} … {text[-PREVIEW:]}"


def visible(text: str, encoding: str | None = None) -> str:
    r"""`text` with what a terminal would obey made visible, in what `encoding` can say.

    >>> visible("a\x1b[31m\u202eb\x00"), visible("é", "ascii")
    ('a␛[31m\\u202eb␀', '\\xe9')
    """

    def name(match: re.Match[str]) -> str:
        code = ord(match[0])
        return chr(0x2400 + code) if code < 32 else f"\\u{code:04x}"

    shown = re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", name, text)
    return shown.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)

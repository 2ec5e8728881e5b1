"""The headline numbers of a run's report, and of its last lines in a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.meters import GREEDY, beside_mean, other_scores

Row = dict[str, Any]


class Score(NamedTuple):
    """A score of an evaluation and its 95% interval, where it is known."""

    step: int
    mean: float
    low: float | None
    high: float | None


def evaluated(metrics: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The first and the last evaluation's score of each source: source, responses per problem, problems, first, last,
    and what else was measured at the last.

    >>> lines = [{"step": 0, "val-core/sums/reward/mean@1": 0.2, "val-aux/sums/problems": 100}]
    >>> evaluated(lines)[0]["first"]
    Score(step=0, mean=0.2, low=None, high=None)
    """
    found: dict[str, Row] = {}
    for line in metrics:
        for name, mean in line.items():
            match = re.fullmatch(r"val-core/(.+)/reward/mean@(\d+)", name)
            if match is None or mean is None:
                continue
            n = int(match[2])
            aux = beside_mean(line, match[1], n)
            score = Score(line["step"], mean, *(line.get(f"{aux}/reward/{side}95") for side in ("low", "high")))
            source = match[1] + (" greedy" if aux.endswith(GREEDY) else "")
            row = found.setdefault(name, {"source": source, "n": n, "first": score})
            row |= {"last": score, "problems": line.get(f"val-aux/{match[1]}/problems")}
            row["failed"] = line.get(f"{aux}/failed_ratio")
            row["others"] = other_scores(line, match[1], mean)
    for row in found.values():
        scores = list(dict.fromkeys((row["first"], row["last"])))
        ends = [x for score in scores for x in score[1:] if x is not None]
        low, high = row["axis"] = min(0.0, *ends), max(1.0, *ends)
        row["marks"] = [
            [None if x is None else round(100 * (x - low) / (high - low), 2) for x in score[1:]] for score in scores
        ]
    return list(found.values())


def tiles(metrics: Sequence[Row], phases: Sequence[Row], last: int, total: int) -> list[Row]:
    """The headline's numbers: label, text, and a remark below."""
    steps = [line for line in metrics if line.get("perf/time_per_step")]
    training = sum(line["perf/time_per_step"] for line in steps)
    seconds = sum(line.get("timing_s/step") or line["perf/time_per_step"] for line in steps)
    tokens = sum(line.get("perf/total_num_tokens") or 0 for line in steps)
    amount = f"{tokens:,.0f}" if tokens < 1e6 else f"{tokens / 1e6:,.1f} M"
    found = [{"label": "steps", "text": f"{last:,} of {total:,}", "remark": f"{amount} tokens"}]
    for label, name in (("reward", "critic/score/mean"), ("loss", "train/loss")):
        values = [line[name] for line in metrics if line.get(name) is not None]
        if values:
            few = max(1, min(20, len(values) // 5))
            before, after = sum(values[:few]) / few, sum(values[-few:]) / few
            remark = f"mean of the first and the last {few} steps" if few > 1 else "first and last step"
            if label == "reward" and (failed := failed_share(metrics)):
                remark += f"; failed on {failed:.1%} of the responses"
            found.append({"label": label, "text": f"{before:.3f} → {after:.3f}", "remark": remark})
    if training:
        most = max(phases, key=lambda phase: phase["seconds"], default=None)
        remark = f"{most['share']:.0%} of it {most['name']}" if most else ""
        found.append({"label": "time in steps", "text": duration(seconds), "remark": remark})
        remark = f"{training / len(steps):.3g} s a step, without evaluation"
        found.append({"label": "throughput", "text": f"{tokens / training:,.0f} tokens/s", "remark": remark})
    return found


def failed_share(metrics: Sequence[Mapping[str, Any]]) -> float:
    """On what share of the responses in training the reward failed."""
    found = [line.get("reward/failed_ratio") or 0.0 for line in metrics if line.get("critic/score/mean") is not None]
    return sum(found) / len(found) if found else 0.0


def duration(seconds: float) -> str:
    """
    >>> duration(7.26), duration(187), duration(4000)
    ('7.3 s', '3 min 07 s', '1 h 06 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return (
        f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"
    )


def seconds_text(seconds: float) -> str:
    """
    >>> seconds_text(0.0504), seconds_text(7.26), seconds_text(187)
    ('50 ms', '7.3 s', '3 min 07 s')
    """
    return f"{1000 * seconds:.0f} ms" if seconds < 0.9995 else duration(seconds)

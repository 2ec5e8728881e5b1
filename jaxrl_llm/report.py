"""report.html: a run on one page, which needs no network, made from what lies in the run's folder.

python -m jaxrl_llm.report runs/addition

Whatever came from a model, a dataset or a config is data to the page: it is escaped, and only the page's own scripts,
named by their hashes, may run in it.
"""

from __future__ import annotations

import argparse
import base64
import functools
import hashlib
import importlib.resources
import json
import math
import re
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.config import unresolve
from jaxrl_llm.errors import StorageError, UserError, exit_code, nearest_path, say
from jaxrl_llm.meters import GREEDY, beside_mean
from jaxrl_llm.report_charts import CHARTS, PHASES
from jaxrl_llm.report_numbers import evaluated, seconds_text, tiles
from jaxrl_llm.run_files import read_jsonl, replace_file, storage

POINTS = 500  # of a curve; a longer run is drawn as means of so many steps each
SAMPLED_STEPS = 12  # whose samples are on the page
SAMPLED_TOKENS = 40_000  # on the page, all together
NOTES = 300  # the last ones, on the page
DRAWN_PHASES = 8  # of a step's phases, those that take most of its time; the others are drawn as one
Row = dict[str, Any]


def write_report(run: str | Path, output: str | Path | None = None) -> Path:
    """Writes the page and returns where: `output`, or report.html in the run's folder.

    Raises:
      UserError: `run` is no run's folder.
      StorageError: a file of the folder is damaged, or the page cannot be written.
    """
    path = Path(output) if output else Path(run) / "report.html"
    page = render(collect(Path(run)))
    with storage(path):
        replace_file(path, page)
    return path


def render(facts: Mapping[str, Any]) -> str:
    """The page of what `collect` found."""
    text = functools.partial(_package_text)
    scripts = [text("uPlot.iife.min.js"), text("page.js")]
    page = _template().render(
        **facts,
        scripts=scripts,
        hashes=[base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts],
        styles=[text("uPlot.min.css"), text("page.css")],
        json=embedded_json(facts["data"]),
    )
    return re.sub("[\ud800-\udfff]", "\ufffd", page)  # which no encoding can hold


def collect(run: Path) -> Row:
    """Everything that the page shows, from the folder alone.

    Raises:
      UserError: there is no run.
      StorageError: a file is damaged.
    """
    if not (run / "config.json").is_file():
        near = nearest_path(run)
        raise UserError(f"{run}: not a run's folder: it has no config.json" + (f"; {near}" if near else ""))
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise StorageError(f"{run / 'config.json'}: not JSON: {error}") from error
    metrics, samples, events = (_lines(run / f"{name}.jsonl") for name in ("metrics", "samples", "events"))
    starts = [event for event in events if event.get("kind") == "start"]
    start = starts[-1] if starts else {}
    since = events[events.index(start) :] if start else []
    end = next((event for event in since if event.get("kind") == "end"), {})
    last = metrics[-1]["step"] if metrics else 0
    total = start.get("total_steps") or config.get("trainer", {}).get("steps") or last
    data, phases = _curves(metrics)
    shown, of = _choose_samples(samples)
    return {
        "name": config.get("logging", {}).get("name") or run.resolve().name,
        "step": last,
        "total": total,
        "outcome": end.get("outcome") or ("done" if last >= total else ""),
        "why": end.get("why", ""),
        "written": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "tiles": tiles(metrics, phases, last, total),
        "evaluated": evaluated(metrics),
        "phases": phases,
        "has_curves": bool(data["charts"]),
        "per_point": data["per_point"],
        "n_metrics": len(data["dense"]) + len(data["sparse"]),
        "sampled": {"shown": len(shown), "of": of},
        "changed": config_changes(config),
        "config": json.dumps(config, indent=2, ensure_ascii=False),
        "machines": _machines(starts),
        "notes": [e for e in events if e.get("kind") in ("note", "end")][-NOTES:],
        "data": data | {"samples": shown},
    }


# Curves


def _curves(metrics: Sequence[Row]) -> tuple[Row, list[Row]]:
    """The curves as the page's script wants them, and the phases with their seconds and shares."""
    names = list(dict.fromkeys(name for line in metrics for name, value in line.items() if _is_number(value)))
    names = [name for name in names if name != "step"]
    sparse = {name: _sparse(metrics, name) for name in names if name.startswith("val-")}
    trained = [line for line in metrics if any(_is_number(line.get(name)) for name in names if name not in sparse)]
    size = math.ceil(len(trained) / POINTS) or 1
    parts = [trained[i : i + size] for i in range(0, len(trained), size)]
    phases = _phases(trained)
    moving = {name for name in names if any(line.get(name) for line in metrics)}  # some value is not 0
    charts = _charts(names, moving)
    drawn = {series["name"] for chart in charts for series in chart["series"]}
    data: Row = {
        "x": [part[-1]["step"] for part in parts],
        "per_point": size,
        "dense": {},
        "sparse": sparse,
        "low": {},
        "high": {},
        "charts": charts,
        "phases": [{"name": phase["name"], "of": phase["of"]} for phase in _drawn_phases(phases)],
    }
    for name in names:
        if name in sparse:
            continue
        # A phase that does not run in every step takes no time in the others; any other metric is just not known there.
        absent = [0.0] if name.startswith("timing_s/") else []
        columns = [[x for line in part for x in (_known(line.get(name)) or absent)] for part in parts]
        data["dense"][name] = [_digits(sum(column) / len(column)) if column else None for column in columns]
        if size > 1 and name in drawn:
            data["low"][name] = [_digits(min(column)) if column else None for column in columns]
            data["high"][name] = [_digits(max(column)) if column else None for column in columns]
    return data, phases


def _sparse(metrics: Sequence[Row], name: str) -> list[list[Any]]:
    points = [(line["step"], _digits(line[name])) for line in metrics if _is_number(line.get(name))]
    if len(points) > POINTS:  # the last of each run of points, so that the last of all is there
        size = math.ceil(len(points) / POINTS)
        points = points[::-1][::size][::-1]
    return [list(column) for column in zip(*points, strict=True)]


def _charts(names: Sequence[str], moving: Collection[str]) -> list[Row]:
    """The charts that there are curves for, with the names of their metrics filled in.

    Args:
      moving: the metrics that are not 0 throughout.
    """
    found = []
    for chart in CHARTS:
        series = []
        for pattern, label in chart.series:
            for name in names:
                if match := re.fullmatch(pattern, name):
                    one: Row = {"name": name, "label": match.expand(label)}
                    if name.startswith("val-core/"):
                        aux = beside_mean(names, match[1], int(match[2]))
                        one["label"] += " greedy" if aux.endswith(GREEDY) else ""
                        ends = {end: f"{aux}/reward/{end}95" for end in ("low", "high")}
                        one |= ends if ends["low"] in names else {}
                    series.append(one)
        seen = not chart.if_not_zero or any(one["name"] in moving for one in series)
        if len(series) >= chart.at_least and seen:
            kept = {"section": chart.section, "title": chart.title, "about": chart.about, "form": chart.form}
            found.append(kept | {"series": series})
    return found


def _phases(trained: Sequence[Row]) -> list[Row]:
    """name, seconds, share of the steps' time; in the order of a step, and what is left over last."""
    seconds: dict[str, float] = {}
    for line in trained:
        for name, value in line.items():
            if name.startswith("timing_s/") and _is_number(value):
                seconds[name] = seconds.get(name, 0.0) + value
    whole = seconds.pop("timing_s/step", None) or sum(seconds.values())
    order = {f"timing_s/{phase}": i for i, phase in enumerate(PHASES)}
    found = [
        {"name": name.removeprefix("timing_s/"), "of": [name], "seconds": seconds[name], "share": seconds[name] / whole}
        for name in sorted(seconds, key=lambda name: order.get(name, len(order)))
        if whole
    ]
    return found


def _drawn_phases(phases: Sequence[Row]) -> list[Row]:
    """The phases that are worth a colour of their own, and the others as one."""
    if len(phases) <= DRAWN_PHASES + 1:
        return list(phases)
    least = sorted(phase["share"] for phase in phases)[-DRAWN_PHASES]
    small = [phase for phase in phases if phase["share"] < least]
    others = [{"name": "other phases", "of": [name for phase in small for name in phase["of"]]}] if small else []
    return [phase for phase in phases if phase["share"] >= least] + others


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _known(value: Any) -> list[float]:
    return [float(value)] if _is_number(value) else []


def _digits(value: float) -> float:
    """
    >>> _digits(0.123456789), _digits(3.0)
    (0.12346, 3.0)
    """
    return float(f"{value:.5g}")


# Samples


def _choose_samples(samples: Sequence[Row]) -> tuple[list[Row], int]:
    """Steps spread over the run, the first and the last among them, with their rows; and how many steps there are."""
    steps: dict[int, list[Row]] = {}
    for row in samples:
        steps.setdefault(row["step"], []).append({name: value for name, value in row.items() if name != "step"})
    numbers = list(steps)
    size = {step: sum(len(row.get("tokens") or ()) for row in rows) for step, rows in steps.items()}
    chosen: list[int] = []
    for count in range(min(SAMPLED_STEPS, len(numbers)), 0, -1):
        places = [round(i * (len(numbers) - 1) / max(count - 1, 1)) for i in range(count)] if count > 1 else [-1]
        chosen = [numbers[place] for place in places]
        if sum(size[step] for step in chosen) <= SAMPLED_TOKENS:
            break
    return [{"step": step, "rows": steps[step]} for step in chosen], len(numbers)


# Config and machine


def config_changes(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(key, value, default) where a run's config.json differs from configs/base.py; a value that only follows another
    key is not told."""
    try:
        from configs import base
    except ImportError:  # installed without the recipes
        return []
    defaults = _flat(json.loads(json.dumps(base.get_config().to_dict())))
    follow = set(unresolve(config))
    return [
        (key, _short(value), _short(defaults[key]) if key in defaults else "")
        for key, value in _flat(config).items()
        if value != defaults.get(key, ...) and key not in follow
    ]


def _flat(plain: Mapping[str, Any], prefix: str = "") -> Row:
    found: Row = {}
    for key, value in plain.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {prefix + key: value}
    return found


def _short(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _machines(starts: Sequence[Row]) -> list[Row]:
    """Each start of the run: when, after which step, and what it ran on."""
    return [
        {"when": start.get("time", ""), "step": start.get("step", 0), "facts": start.get("machine") or {}}
        for start in starts
    ]


# The page


def embedded_json(value: Any) -> str:
    """JSON that may stand inside a script element, whatever texts it holds.

    >>> embedded_json(["</script>&\\u2028"])
    '["\\\\u003c/script\\\\u003e\\\\u0026\\\\u2028"]'
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _lines(path: Path) -> list[Row]:
    return read_jsonl(path) if path.is_file() else []


@functools.cache
def _package_text(name: str) -> str:
    return (importlib.resources.files("jaxrl_llm") / "report_page" / name).read_text(encoding="utf-8")


@functools.cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = lambda x: f"{x:.3f}"
    environment.filters["seconds"] = seconds_text
    return environment.from_string(_package_text("page.html"))


def main(argv: Iterable[str] | None = None) -> int:
    """The exit code, see `errors.exit_code`."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.report", description="Writes report.html of a run, finished or not."
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("--output", metavar="FILE", help="where to write it (default: RUN/report.html)")
    args = parser.parse_args(None if argv is None else list(argv))
    return exit_code(lambda: say(str(write_report(args.run, args.output))))


if __name__ == "__main__":
    sys.exit(main())

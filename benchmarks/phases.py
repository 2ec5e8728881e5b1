"""Draws where a step's time goes: a bar for each line of `benchmarks.step --json`, a piece for each phase.

    python -m benchmarks.step --json --model models/smollm2-135m --prompts 8 --n 8 --prompt-length 40 > steps.jsonl
    python -m benchmarks.phases docs/step_time.png steps.jsonl --names "8 × 8, 40 + 64 tokens"

What lies between a step's phases, on the host, is called "rest".
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.writers import read_jsonl

# In the order in which they happen; scoring passes in one family of colours, updates in another.
COLOURS = {
    "update_weights": "#7f7f7f",
    "gen": "#4c78a8",
    "reward": "#54a24b",
    "old_log_prob": "#f2cf5b",
    "ref": "#eeca3b",
    "values": "#d9b300",
    "adv": "#b279a2",
    "update_critic": "#ff9da6",
    "update_actor": "#e45756",
    "rest": "#e0e0e0",
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("lines", type=Path, help="a file of what benchmarks.step --json has printed")
    parser.add_argument("--names", nargs="+", help="of the bars, one for each line")
    args = parser.parse_args(argv)
    lines = read_jsonl(args.lines)
    names = args.names or [Path(str(line.get("model") or line.get("preset"))).name for line in lines]
    if len(names) != len(lines):
        parser.error(f"--names: expected {len(lines)}, one for each line of {args.lines}, found {len(names)}")
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Rectangle

    figure, axes = pyplot.subplots(figsize=(9, 1.4 + 0.55 * len(lines)), layout="constrained")
    for row, line in enumerate(lines):
        left = 0.0
        for phase, share in shares(line).items():
            axes.barh(row, share, left=left, color=COLOURS[phase], height=0.6)
            if share >= 0.06:
                axes.text(left + share / 2, row, f"{share:.0%}", ha="center", va="center", fontsize=9)
            left += share
    axes.set(yticks=range(len(lines)), yticklabels=names, xlim=(0, 1), xlabel="share of a step's seconds")
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    there = [phase for phase in COLOURS if any(shares(line).get(phase, 0) > 0.002 for line in lines)]
    handles = [Rectangle((0, 0), 1, 1, color=COLOURS[phase], label=phase) for phase in there]
    figure.legend(handles=handles, loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(args.picture, dpi=150)


def shares(line: dict[str, Any]) -> dict[str, float]:
    """Of the step's seconds, by phase.

    >>> shares({"phases": {"step": 4.0, "gen": 1.0, "update_actor": 2.0}})
    {'gen': 0.25, 'update_actor': 0.5, 'rest': 0.25}
    """
    seconds = dict(line["phases"])
    step = seconds.pop("step")
    found: dict[str, float] = {phase: seconds[phase] / step for phase in COLOURS if phase in seconds}
    return found | {"rest": 1 - sum(found.values())}


if __name__ == "__main__":
    main()

"""Draws the learning curves of runs, and says in one line each what they reached.

    python -m benchmarks.curves docs/addition.png runs/addition runs/addition_ppo

Left the sampled reward of every training step (thin: as measured, thick: mean of the last five), right the greedy
accuracy of each evaluation with its 95% interval, dashed for problems that training also draws from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.evaluation import wilson_interval
from jaxrl_llm.writers import read_jsonl

SCORE, CORE = "critic/score/mean", "val-core/{}/reward/mean@1"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    args = parser.parse_args(argv)
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    for index, run in enumerate(args.runs):
        lines, color = read_jsonl(run / "metrics.jsonl"), f"C{index}"
        steps, rewards = _series(lines, SCORE)
        axes[0].plot(steps, rewards, color=color, alpha=0.3, linewidth=1)
        axes[0].plot(steps, _trailing_mean(rewards), color=color, linewidth=2, label=run.name)
        for source in _sources(lines):
            steps, accuracy = _series(lines, CORE.format(source))
            problems = round(_series(lines, f"val-aux/{source}/problems")[1][0])
            trained = f"{source}_held_out" in _sources(lines)  # so the recipes name what training draws from
            bounds = np.array([wilson_interval(a * problems, problems) for a in accuracy])
            axes[1].errorbar(
                np.array(steps) + 0.3 * index,  # so that intervals of several runs stay apart
                accuracy,
                yerr=np.abs(bounds.T - np.array(accuracy)),
                color=color,
                linestyle="--" if trained else "-",
                alpha=0.5 if trained else 1,
                marker="o",
                markersize=4,
                capsize=2,
                label=f"{run.name}: {source}",
            )
        print(json.dumps(reached(lines) | {"run": run.name}))
    axes[0].set(title="sampled reward", xlabel="step", ylim=(0, 1.02))
    axes[1].set(title="greedy accuracy", xlabel="step")
    for ax in axes:
        ax.grid(alpha=0.25)
        ax.legend(loc="lower right")
    figure.savefig(args.picture, dpi=130)


def reached(lines: Sequence[dict]) -> dict[str, Any]:
    """The figures that a run is quoted by."""
    _, rewards = _series(lines, SCORE)
    seconds = [line["timing_s/step"] for line in lines if "timing_s/step" in line]
    return {
        "steps": len(rewards),
        "reward_first_5": round(float(np.mean(rewards[:5])), 3),
        "reward_last_5": round(float(np.mean(rewards[-5:])), 3),
        "median_seconds_per_step": round(float(np.median(seconds)), 2),
    } | {
        f"greedy_{source}": [round(accuracy[0], 3), round(accuracy[-1], 3)]
        for source in _sources(lines)
        if (accuracy := _series(lines, CORE.format(source))[1])
    }


def _series(lines: Sequence[dict], name: str) -> tuple[list[int], list[float]]:
    found = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _sources(lines: Sequence[dict]) -> list[str]:
    head, tail = CORE.split("{}")
    names = dict.fromkeys(name for line in lines for name in line if name.startswith(head) and name.endswith(tail))
    return [name.removeprefix(head).removesuffix(tail) for name in names]


def _trailing_mean(values: Sequence[float], width: int = 5) -> list[float]:
    return [float(np.mean(values[max(0, i + 1 - width) : i + 1])) for i in range(len(values))]


if __name__ == "__main__":
    main()

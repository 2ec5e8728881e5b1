"""The quickstart for several seeds: held-out accuracy before and after, steps and time, one JSON line a run.

    python -m benchmarks.quickstart --seeds 5

Every run is a process of its own, so that its time is what a user waits for: start-up, compilation, evaluation and all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.writers import read_jsonl

RECIPES = ("quickstart", "quickstart_ppo")
ACCURACY = "val-core/column_sums/reward/mean@1"
COLUMNS = ("recipe", "seed", "before", "after", "steps", "steps_to_97", "training_s", "total_s")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as in trainer.steps=20")
    args = parser.parse_args(argv)
    found = []
    for recipe in args.recipes:
        for seed in range(args.seeds):
            found.append(run(recipe, seed, args.overrides))
            print(json.dumps(found[-1]), flush=True)
    print(table(found))


def run(recipe: str, seed: int, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Trains once in a process of its own. Times in seconds: of the steps alone, and from start to end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxrl_llm.train", "--config", f"configs/{recipe}.py", "--workdir", folder]
        changes = [f"--config.{change}" for change in (f"seed={seed}", "logging.progress=none", *overrides)]
        start = time.perf_counter()
        subprocess.run(command + changes, check=True, stdout=subprocess.DEVNULL)
        total = time.perf_counter() - start
        lines = read_jsonl(Path(folder) / "metrics.jsonl")
    evaluated = [(line["step"], line[ACCURACY]) for line in lines if ACCURACY in line]
    return {
        "recipe": recipe,
        "seed": seed,
        "before": evaluated[0][1],
        "after": evaluated[-1][1],
        "steps": lines[-1]["step"],
        "steps_to_97": next((step for step, accuracy in evaluated if accuracy >= 0.97), None),
        "training_s": round(sum(line.get("timing_s/step", 0.0) for line in lines), 1),
        "total_s": round(total, 1),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([row[name] for name in COLUMNS] for row in rows)]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    main()

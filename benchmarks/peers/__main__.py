"""Compares speed with other systems, on two CPU cores, and with what is wanted of it. Prints a table, or JSON lines.

    python -m benchmarks.peers                     # all of it: an hour or so, and 3 GB or more for the environments
    python -m benchmarks.peers --only sample top-p --repeats 3
    python -m benchmarks.peers --only smollm2-iteration --model models/smollm2-135m --json

Each peer runs in a virtual environment of its own, made once under --envs. Of the programs that the chosen rows need
each is run in turn, in a process of its own, never two at once, and again, --repeats times; a figure is the median of
its processes' (in each of which a first call is not counted), a ratio one of two such medians. Peer and we do the same
work: the same model, lengths and precision, and as many tokens; where a peer has no way to do less, it does more, as it
would for its users (on_tunix.py says where). Quote ratios of one run alone: between runs a machine changes.

Exit code 0 if all that is wanted is reached, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import venv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.table import ENVIRONMENTS, ROWS, Figure, Program, Row

CORES = 2
CHECKOUT = Path(__file__).resolve().parents[2]
Lines = list[dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--envs", type=Path, default=CHECKOUT / ".venv-peers", help="where the environments are made")
    parser.add_argument("--model", type=Path, default=CHECKOUT / "models/smollm2-135m", help="SmolLM2-135M's folder")
    parser.add_argument("--repeats", type=int, default=5, help="processes of each program (5)")
    parser.add_argument("--json", action="store_true", help="one line of JSON a row, instead of the table")
    args = parser.parse_args(argv)
    rows = [ROWS[name] for name in args.only]
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: expected at least 1")
    needs_model = any("{model}" in program.options for row in rows for program in row.programs)
    if needs_model and not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model}: is no model's folder; `make model` makes one")
    use_cores(CORES)
    pythons = {"ours": sys.executable}
    for where in sorted({program.where for row in rows for program in row.programs} - {"ours"}):
        pythons[where] = str(environment(args.envs.resolve() / where, ENVIRONMENTS[where]))
    printed: dict[Program, list[Lines]] = defaultdict(list)
    for group in groups(rows):
        for _ in range(args.repeats):
            for program in group:
                printed[program].append(run(program, pythons[program.where], args.model.resolve()))
    found = [result(row, printed) for row in rows]
    print("\n".join(map(json.dumps, found)) if args.json else table(found))
    return 0 if all(one["reached"] for one in found) else 1


def use_cores(count: int) -> None:
    """Keeps this process and those that it starts on so many cores, and threads of libraries to that number."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
    os.environ |= {"OMP_NUM_THREADS": str(count), "JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false"}


def environment(folder: Path, packages: Sequence[str]) -> Path:
    """The interpreter of an environment with these packages, which is made unless it is there."""
    python, marker = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join(packages)
    if not marker.is_file() or marker.read_text() != wanted:
        print(f"installing {' '.join(packages)} into {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True, stdout=sys.stderr)
        marker.write_text(wanted)
    return python


def groups(rows: Sequence[Row]) -> list[list[Program]]:
    """The programs of the rows, each once, those together that a chain of rows compares."""
    found: list[set[Program]] = []
    for row in rows:
        joined = set(row.programs)
        apart = [group for group in found if not group & joined]
        found = [*apart, joined.union(*(group for group in found if group & joined))]
    order = list(dict.fromkeys(program for row in rows for program in row.programs))
    return sorted((sorted(group, key=order.index) for group in found), key=lambda group: order.index(group[0]))


def run(program: Program, python: str, model: Path) -> Lines:
    """The lines that one process prints.

    Raises:
      SystemExit: it failed.
    """
    command = program.command(python, model)
    print(" ".join(command[4:]), file=sys.stderr, flush=True)
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def value(figure: Figure, lines: Lines) -> float:
    """
    >>> program = Program("ours", "benchmarks.step", "")
    >>> value(Figure(program, "phases.gen"), [{"seconds": 3.0, "phases": {"gen": 2.0}}])
    2.0
    """
    (at,) = (line for line in lines if not figure.part or line["part"] == figure.part)
    for key in figure.key.split("."):
        at = at[key]
    return float(at)  # type: ignore[arg-type]


def result(row: Row, printed: dict[Program, list[Lines]]) -> dict[str, Any]:
    """A row's medians, their ratio, and whether it is what is wanted."""
    figures = [figure for figure in (row.top, row.bottom) if figure]
    values = [[value(figure, lines) for lines in printed[figure.program]] for figure in figures]
    medians = [statistics.median(v) for v in values]
    ratio = medians[0] / medians[1] if row.bottom else medians[0]
    return {
        "row": row.name,
        "work": row.work,
        "beside": row.beside,
        "ratio" if row.bottom else "value": round(ratio, 3),
        "wanted": f"{'≤' if row.at_most else '≥'} {row.wanted:g}",
        "reached": row.fine(ratio),
        "medians": medians,
        "values": values,
        "programs": [f"{f.program.module} {f.program.options}" for f in figures],
    }


def table(found: Iterable[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [("work", "beside", "there", "here", "ratio", "wanted", ""), ("---",) * 7]
    for one in found:
        numbers = [f"{x:.4g}" for x in one["medians"]]
        there, here = (*numbers,) if len(numbers) == 2 else ("", *numbers)
        ratio = f"{one['ratio']:.2f}" if "ratio" in one else ""
        reached = "reached" if one["reached"] else "missed"
        lines.append((one["work"], one["beside"], there, here, ratio, one["wanted"], reached))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())

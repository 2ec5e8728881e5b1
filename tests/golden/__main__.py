"""`python -m tests.golden DIR` runs every case of DIR/index.json, in its dtype."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from tests.golden.adapters import ADAPTERS
from tests.golden.cases import Case, Outcome, Verdict, read_cases
from tests.golden.design import judge


def run(case: Case) -> Outcome:
    """One case; a function that nothing here computes is a failure."""
    if case.fn not in ADAPTERS:
        return Outcome(case, Verdict.FAILED, f"no adapter for fn {case.fn!r}")
    return judge(case, ADAPTERS[case.fn])


def main(folder: Path) -> int:
    """Prints each failure, how many differ by design, and the sum. Returns 1 if any failed."""
    counts = Counter[Verdict]()
    for case in read_cases(folder):
        outcome = run(case)
        counts[outcome.verdict] += 1
        if outcome.verdict is Verdict.FAILED:
            print(f"FAILED {case.id}: {outcome.why}", flush=True)
    print(f"{counts[Verdict.BY_DESIGN]} differ by design")
    print(f"{counts[Verdict.PASSED] + counts[Verdict.BY_DESIGN]} passed, {counts[Verdict.FAILED]} failed")
    return 1 if counts[Verdict.FAILED] else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.golden DIR")
    sys.exit(main(Path(sys.argv[1])))

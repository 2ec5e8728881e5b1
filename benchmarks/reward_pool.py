"""Scores 1,000 good and 20 hostile answers in the reward workers and says how long it took and what was left behind.

    python -m benchmarks.reward_pool --json

A good answer is a sum, right or wrong in turn. A hostile one attacks the function that scores its record: a built-in
verifier, or one of three functions that stand below and nowhere else, naive on purpose, one of which runs what the
answer says. What must happen is known of each: a score, or a failure of that row alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl_llm.rewards import make_rewards, pooled
from jaxrl_llm.rewards.processes import marked

GOOD = 1_000
MEGABYTE = 1_000_000


# NOT TO BE USED ELSEWHERE: these are the holes that the pool has to stand.


def naive_pattern(prompt: str, response: str, record: Any) -> float:
    """A pattern that backtracks exponentially."""
    return float(re.fullmatch(r"(\w+\s?)+", response) is not None)


def naive_exec(prompt: str, response: str, record: Any) -> float:
    """Runs a model's text as it is."""
    names: dict[str, Any] = {}
    exec(response, names)
    return float(names.get("answer") == record["answer"])


def naive_int(prompt: str, response: str, record: Any) -> float:
    return float(int(response) == record["answer"])


class Answer(NamedTuple):
    name: str
    scorer: str  # data_source of its record
    text: str
    expected: float | None  # None: the row fails
    gold: str = "7"


HOSTILE = (
    Answer("big integer", "number", "9" * MEGABYTE, 0.0),
    Answer("tower of powers", "boxed", r"\boxed{9^{9^{9^{9}}}}", 0.0),
    Answer("big integer in a box", "boxed", rf"\boxed{{{'9' * 100_000}}}", 0.0),
    Answer("big exponent", "number", "1e999999999", 0.0),
    Answer("deep braces", "boxed", r"\boxed" + "{" * 500_000, 0.0),
    Answer("deep fractions", "boxed", r"\boxed{" + r"\frac{1}{" * 50_000 + "1" + "}" * 50_001, 0.0),
    Answer("control characters", "number", "".join(map(chr, range(32))) * 1_000 + "7", 1.0),
    Answer("lone surrogates", "exact", "\ud800\udfff" * 1_000, 0.0),
    Answer("a megabyte, right at its end", "gsm8k", "#### 1\n" * (MEGABYTE // 7) + "#### 7", 1.0),
    Answer("a megabyte of tags", "format", "<think>" * (MEGABYTE // 7), 0.0),
    Answer("an answer for a pattern", "naive_pattern", "a" * 40 + "!", None),
    Answer("another one", "naive_pattern", "abcd " * 30 + "\x00", None),
    Answer("an integer that is none", "naive_int", "9" * 100_000, None),
    Answer("deep nesting", "naive_exec", "(" * 100_000, None),
    Answer("endless loop", "naive_exec", "while True: pass", None),
    Answer("all memory", "naive_exec", "x = [0] * 10**11", None),
    Answer("a process that stays", "naive_exec", "import subprocess; subprocess.Popen(['sleep', '999'])", 0.0),
    Answer(
        "forks that hide",
        "naive_exec",
        "import os, time\nfor _ in range(8):\n  if not os.fork():\n    os.setsid(); time.sleep(999)\ntime.sleep(999)",
        None,
    ),
    Answer("os.kill", "naive_exec", "import os; os.kill(os.getpid(), 9)", None),
    Answer("noise, then the end", "naive_exec", "import os; os.write(1, b'\\0' * 10_000); os._exit(0)", None),
)
BUILT_IN = ("number", "boxed", "exact", "gsm8k", "format")
NAIVE = ("naive_pattern", "naive_exec", "naive_int")


def measure(num_workers: int = -1, timeout: float = 1.0, memory_limit: float = 2.0) -> dict[str, Any]:
    """Of one run: seconds, from the first row to the last score, and what came of it."""
    names = (*BUILT_IN, *NAIVE)
    functions = [*BUILT_IN, *(f"benchmarks.reward_pool:{name}" for name in NAIVE), "benchmarks.reward_pool:heavy"]
    sums = [(i % 97, i % 89) for i in range(GOOD)]
    answers = [Answer("good", "number", f"{a} + {b} = {a + b + i % 2}", 1.0 - i % 2, str(a + b)) for i, (a, b) in
               enumerate(sums)]  # fmt: skip
    for i, hostile in enumerate(HOSTILE):  # all through the batch
        answers.insert((i + 1) * GOOD // len(HOSTILE) + i, hostile)
    records = [{"answer": answer.gold, "data_source": answer.scorer} for answer in answers]
    rewards = make_rewards(functions, data_sources=[*names, "heavy"])
    with pooled(rewards, num_workers=num_workers, timeout=timeout, memory_limit=memory_limit) as pool:
        assert pool.pool is not None
        began = time.monotonic()
        pool.try_out("", {"data_source": "exact", "answer": "7"})
        ready = time.monotonic() - began
        began = time.monotonic()
        found = pool.score([""] * len(answers), [answer.text for answer in answers], records)
        seconds = time.monotonic() - began
        asked = 8 * pool.pool.num_workers
        jax = pool.score([""] * asked, [""] * asked, [{"data_source": "heavy"}] * asked).scores[:, -1].max()
        count = pool.pool.num_workers
    wrong, unexpected = [], []
    for row, answer in enumerate(answers):
        score = found.scores[row, names.index(answer.scorer)] if found.valid[row] else None
        if score != answer.expected:
            (wrong if answer.name == "good" else unexpected).append(f"{answer.name}: {score}")
    return {
        "seconds": round(seconds, 2),
        "seconds_until_ready": round(ready, 2),
        "workers": count,
        "cores": os.cpu_count(),
        "seconds_a_row": timeout,
        "good": GOOD,
        "good_right_and_in_order": GOOD - len(wrong),
        "hostile": len(HOSTILE),
        "hostile_as_expected": len(HOSTILE) - len(unexpected),
        "failed_rows": found.num_failed,
        "unexpected": wrong[:3] + unexpected,
        "processes_left": len(list(marked(f"{os.getpid()}-"))),
        "workers_with_jax": int(jax),
        "jax_here": "jax" in sys.modules,
    }


def heavy(prompt: str, response: str, record: Any) -> float:
    """Whether jax has been imported in this process."""
    return float("jax" in sys.modules)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--workers", type=int, default=-1, help="as reward.num_workers")
    parser.add_argument("--timeout", type=float, default=1.0, help="seconds a row may take")
    args = parser.parse_args(argv)
    found = measure(args.workers, args.timeout)
    lines = [json.dumps(found)] if args.json else [f"{key:<24} {value}" for key, value in found.items()]
    print("\n".join(lines))
    fine = not found["unexpected"] and not found["processes_left"] and not found["workers_with_jax"]
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())

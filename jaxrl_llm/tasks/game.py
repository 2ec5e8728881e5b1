"""Countdown: numbers, and a target to reach with them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.tasks.generated import Draw, Generated, check_largest, levels, selection

TARGETS = range(10, 1000)
TRIES = 30  # expressions drawn until the value of one is such a target; then the numbers' sum is taken


def countdown(
    n: int | Sequence[int] = 4,
    largest: int = 99,
    split: str = "all",
    held_out: float = 0.1,
    seed: int = 0,
    count: int = 0,
    data_source: str = "",
) -> Generated:
    """Numbers `nums` and a `target` that some expression with each of them once reaches; `answer` is one. The level is
    n.

    The target is the value of an expression that was drawn, all of whose intermediate values are whole and above 0.
    Content is which numbers there are, whatever the target.

    Args:
      n: 2 to 8 numbers, or several such to mix.
      largest: of the numbers; the smallest is 1.
      split, held_out, seed, count, data_source: see `Generated`.

    >>> record = countdown(n=3)[0]
    >>> record["nums"], record["target"], record["answer"]
    ([23, 77, 34], 134, '(77+34)+23')
    """
    check_largest("countdown", largest, 2)
    spaces = [_Games(size, largest) for size in levels("countdown", "n", n, 2, 8)]
    about: dict[str, Any] = {"split": split, "held_out": held_out, "seed": seed, "count": count}
    return Generated("countdown", spaces, **about, data_source=data_source)


@dataclasses.dataclass(frozen=True)
class _Games:
    """Multisets of `level` numbers from 1 to `largest`."""

    level: int
    largest: int

    @property
    def size(self) -> int:
        return math.comb(self.largest + self.level - 1, self.level)

    def _numbers(self, number: int) -> list[int]:
        return [item + 1 for item in selection(number, self.largest, self.level)]

    def content(self, number: int) -> str:
        return " ".join(map(str, self._numbers(number)))

    def record(self, number: int, draw: Draw) -> dict[str, Any]:
        numbers = draw.shuffled(self._numbers(number))
        for _ in range(TRIES):
            target, solution = _expression(numbers, draw)
            if target in TARGETS and target not in numbers:
                break
        else:
            target, solution = sum(numbers), "+".join(map(str, numbers))
        shown = ", ".join(map(str, numbers))
        prompt = (
            f"Using each of the numbers {shown} exactly once, with +, -, *, / and brackets, write an expression that "
            f"equals {target}. Answer with the expression alone."
        )
        return {"prompt": prompt, "response": solution, "answer": solution, "nums": numbers, "target": target}


def _expression(numbers: list[int], draw: Draw) -> tuple[int, str]:
    """The value of an expression with each number once, and its text: two of what is left are joined, until one is."""
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        a, text_a = parts.pop(draw.below(len(parts)))
        b, text_b = parts.pop(draw.below(len(parts)))
        (a, text_a), (b, text_b) = sorted([(a, text_a), (b, text_b)], reverse=True)
        can = ["+", "*"] + ["-"] * (a > b) + ["/"] * (b > 1 and a % b == 0)
        sign = draw.choice(can)
        value = {"+": a + b, "*": a * b, "-": a - b, "/": a // b}[sign]
        text = f"{text_a}{sign}{text_b}"
        parts.append((value, f"({text})" if parts else text))
    return parts[0]

"""Lists to be put in order, and the largest or smallest of a list."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.generated import Draw, Generated, check_largest, combination, levels, one_of

MOST_ITEMS = 50
_WORDS = """
acorn anchor apple arrow autumn badge banjo barrel basket beacon berry blanket bottle branch bridge bucket
butter button cabin camel candle canyon carpet castle cedar cherry circle clover coffee copper cotton cradle
crystal dagger dancer desert dolphin donkey dragon drawer eagle ember engine evening fabric falcon feather
fiddle flower forest fossil fountain garden garlic ginger glacier goblet granite guitar hammer harbor harvest
helmet hollow honey island ivory jacket jasmine jewel jungle kettle kitchen ladder lantern lemon library lizard
magnet maple marble market meadow melon mirror mountain nectar needle nickel oasis ocean olive onion orange
orchard otter paddle palace paper parrot pebble pepper piano pillow planet pocket puzzle quarry quartz rabbit
raven ribbon river rocket saddle sailor salmon shadow shelter silver spider spring stable statue summer sunset
temple thunder ticket timber tunnel turtle valley velvet village violin walnut window winter wizard yellow zebra
"""
WORDS = _WORDS.split()  # in the alphabet's order
ORDERS = {"ascending": (False,), "descending": (True,), "both": (False, True)}
ENDS = {"largest": (True,), "smallest": (False,), "both": (True, False)}


def sorting(
    n: int | Sequence[int] = 5,
    items: str = "numbers",
    order: str = "ascending",
    largest: int = 99,
    split: str = "all",
    held_out: float = 0.1,
    seed: int = 0,
    count: int = 0,
    data_source: str = "",
) -> Generated:
    """Lists of n different numbers or words to sort; the answer is the list, joined by ", ". The level is n.

    Content is which items a list holds, in any order.

    Args:
      n: 2 to 50 items, or several numbers of them to mix.
      items: "numbers" from 0 to `largest`, or "words".
      order: "ascending", "descending", or "both" (drawn).
      split, held_out, seed, count, data_source: see `Generated`.

    >>> sorting(n=3)[0]["prompt"]
    'Sort these numbers from smallest to largest: 98, 22, 78. Answer with the numbers alone, separated by commas.'
    >>> sorting(n=3, items="words", order="descending")[0]["answer"]
    'nectar, harvest, beacon'
    """
    one_of("sorting", "items", items, {"numbers": 0, "words": 0})
    orders = one_of("sorting", "order", order, ORDERS)
    spaces = [
        _Lists("sort", size, items, orders, _pool("sorting", items, size, largest)) for size in _sizes("sorting", n)
    ]
    about: dict[str, Any] = {"split": split, "held_out": held_out, "seed": seed, "count": count}
    return Generated("sorting", spaces, **about, data_source=data_source)


def max_of_n(
    n: int | Sequence[int] = 5,
    which: str = "largest",
    largest: int = 999,
    split: str = "all",
    held_out: float = 0.1,
    seed: int = 0,
    count: int = 0,
    data_source: str = "",
) -> Generated:
    """The largest (or smallest) of n different numbers from 0 to `largest`. The level is n.

    Content is which numbers a list holds, in any order.

    Args:
      n: 2 to 50 numbers, or several such to mix.
      which: "largest", "smallest", or "both" (drawn).
      split, held_out, seed, count, data_source: see `Generated`.

    >>> max_of_n(n=3)[0]["prompt"], max_of_n(n=3)[0]["answer"]
    ('Which of these numbers is the largest: 50, 467, 639?', '639')
    """
    ends = one_of("max_of_n", "which", which, ENDS)
    spaces = [
        _Lists("end", size, "numbers", ends, _pool("max_of_n", "numbers", size, largest))
        for size in _sizes("max_of_n", n)
    ]
    about: dict[str, Any] = {"split": split, "held_out": held_out, "seed": seed, "count": count}
    return Generated("max_of_n", spaces, **about, data_source=data_source)


def _sizes(task: str, n: int | Sequence[int]) -> list[int]:
    return levels(task, "n", n, 2, MOST_ITEMS)


def _pool(task: str, items: str, size: int, largest: int) -> int:
    """How many items lists are drawn from."""
    check_largest(task, largest, 1)
    pool = largest + 1 if items == "numbers" else len(WORDS)
    if pool <= size:
        hint = f"only the numbers 0 to largest = {largest}; raise it" if items == "numbers" else f"only {pool} words"
        raise UserError(f"{task}: n = {size}: lists of so many different {items} need more of them: there are {hint}")
    return pool


@dataclasses.dataclass(frozen=True)
class _Lists:
    """Sets of `level` items, asked for in order or for an end."""

    kind: str  # sort | end
    level: int
    items: str
    reverse: tuple[bool, ...]  # what may be asked for: descending order, the largest
    pool: int

    @property
    def size(self) -> int:
        return math.comb(self.pool, self.level)

    def _sorted(self, number: int) -> list[str]:
        found = combination(number, self.pool, self.level)
        return [WORDS[i] for i in found] if self.items == "words" else [str(i) for i in found]

    def content(self, number: int) -> str:
        return " ".join(self._sorted(number))

    def record(self, number: int, draw: Draw) -> dict[str, Any]:
        ascending, reverse = self._sorted(number), draw.choice(self.reverse)
        shown, want = ", ".join(draw.shuffled(ascending)), ascending[::-1] if reverse else ascending
        if self.kind == "end":
            prompt = f"Which of these numbers is the {'largest' if reverse else 'smallest'}: {shown}?"
            return {"prompt": prompt, "response": want[0], "answer": want[0]}
        low, high, of = (
            ("smallest", "largest", "") if self.items == "numbers" else ("first", "last", " in the alphabet")
        )
        low, high = (high, low) if reverse else (low, high)
        prompt = f"Sort these {self.items} from {low} to {high}{of}: {shown}. "
        prompt += f"Answer with the {self.items} alone, separated by commas."
        return {"prompt": prompt, "response": ", ".join(want), "answer": ", ".join(want)}

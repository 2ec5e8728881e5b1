"""Word problems of one to five steps: somebody has a number of things, and things happen to them."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl_llm.tasks.generated import Draw, Generated, digits_of, levels
from jaxrl_llm.tasks.story_forms import BOXES, FORMS, NAMES, THINGS, WHY

MOST_STEPS = 5
LEAST = 10  # things, whatever happens: enough to fill a bag
STARTS = 40  # how many numbers of things a story may begin with


class Kind(NamedTuple):
    """What can happen: how many steps of reasoning it takes, and the ranges of its numbers (both ends included)."""

    steps: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def sizes(self) -> list[int]:
        return [high - low + 1 for low, high in self.ranges]


FIRST = {"have": Kind(0, ()), "groups": Kind(1, ((3, 9),)), "share": Kind(1, ((3, 8),))}
THEN = {
    "gain": Kind(1, ((2, 20),)),
    "lose": Kind(1, ((2, 20),)),
    "times": Kind(1, ((2, 6),)),
    "packs": Kind(2, ((2, 6), (3, 9))),
}
ASKED = {
    "count": Kind(0, ()),
    "price": Kind(1, ((2, 12),)),
    "bags": Kind(1, ((3, 9),)),
    "rest": Kind(1, ((3, 9),)),
    "more": Kind(1, ((2, 20),)),
    "fewer": Kind(1, ((2, 20),)),
    "together": Kind(2, ((2, 5),)),
}
KINDS = FIRST | THEN | ASKED


def word_problems(
    steps: int | Sequence[int] = 2,
    split: str = "all",
    held_out: float = 0.1,
    seed: int = 0,
    count: int = 0,
    data_source: str = "",
) -> Generated:
    """Stories like GSM8K's: somebody has, buys, loses, shares, packs or sells things; `response` (and `solution`, the
    same) reasons one line a step and ends with "#### ANSWER". The level is the number of steps.

    What happens is told in some seventy forms of words, with names and things drawn. Content is what happens with which
    numbers, however it is told.

    Args:
      steps: 1 to 5, or several numbers of them to mix.
      split, held_out, seed, count, data_source: see `Generated`.

    >>> record = word_problems(steps=2)[0]
    >>> print(record["prompt"])
    Kenji owns 29 stickers. 14 of the stickers turn out to be broken, and he throws them away. Each of the stickers is
    worth 11 dollars. How many dollars are Kenji's stickers worth together?
    >>> print(record["response"])
    14 fewer than 29: 29 - 14 = 15.
    11 for each of 15 stickers: 15 * 11 = 165.
    #### 165
    """
    spaces = [_Stories(level) for level in levels("word_problems", "steps", steps, 1, MOST_STEPS)]
    about: dict[str, Any] = {"split": split, "held_out": held_out, "seed": seed, "count": count}
    return Generated("word_problems", spaces, **about, data_source=data_source)


@functools.cache
def plots(steps: int) -> tuple[tuple[str, ...], ...]:
    """Every sequence of kinds that takes so many steps: how it begins, what happens, what is asked.

    >>> plots(1)[:2], len(plots(5))
    ((('have', 'gain', 'count'), ('have', 'lose', 'count')), 1016)
    """
    found = []
    for first, asked in itertools.product(FIRST, ASKED):
        for middle in _middles(steps - FIRST[first].steps - ASKED[asked].steps):
            if middle.count("times") <= 1:  # or the numbers grow too large to reckon with
                found.append((first, *middle, asked))
    return tuple(found)


def _middles(steps: int) -> list[tuple[str, ...]]:
    if steps <= 0:
        return [()] if steps == 0 else []
    return [(kind, *rest) for kind in THEN for rest in _middles(steps - THEN[kind].steps)]


@functools.cache
def _ends(steps: int) -> list[int]:
    """How many stories the plots have, summed up."""
    return list(itertools.accumulate(STARTS * math.prod(_sizes(plot)) for plot in plots(steps)))


def _sizes(plot: Sequence[str]) -> list[int]:
    return [size for kind in plot for size in KINDS[kind].sizes]


@dataclasses.dataclass(frozen=True)
class _Stories:
    """Plots of `level` steps, each with all its numbers."""

    level: int

    @property
    def size(self) -> int:
        return _ends(self.level)[-1]

    def _story(self, number: int) -> tuple[int, list[tuple[str, list[int]]]]:
        """The number of things at the beginning, and what happens, with its numbers."""
        ends = _ends(self.level)
        at = bisect.bisect_right(ends, number)
        plot = plots(self.level)[at]
        start, *digits = digits_of(number - (ends[at - 1] if at else 0), [STARTS, *_sizes(plot)])
        story = []
        for kind in plot:
            ranges = KINDS[kind].ranges
            story.append((kind, [low + digits.pop(0) for low, _ in ranges]))
        # Never fewer than LEAST, whenever things are lost: so many more are there from the start.
        return start + LEAST + sum(numbers[0] for kind, numbers in story if kind in ("lose", "fewer")), story

    def content(self, number: int) -> str:
        start, story = self._story(number)
        return f"{start} " + " ".join(f"{kind}{numbers}" for kind, numbers in story)

    def record(self, number: int, draw: Draw) -> dict[str, Any]:
        value, story = self._story(number)
        (name, he), (friend, _) = draw.shuffled(NAMES)[:2]
        words = {"name": name, "he": he, "He": he.capitalize(), "friend": friend}
        words |= {"things": draw.choice(THINGS), "boxes": draw.choice(BOXES)}
        told, why = [], []
        for kind, numbers in story:
            a, b = [*numbers, 0, 0][:2]
            equations, after = _reckoned(kind, value, a, b)
            shown = words | {"v": value, "a": a, "b": b, "all": value * a, "less": a - 1}
            told.append(draw.choice(FORMS[kind]).format(**shown))
            why += [f"{text.format(**shown)} {equation}." for text, equation in zip(WHY[kind], equations, strict=True)]
            value = after
        solution = "\n".join([*why, f"#### {value}"])
        return {"prompt": " ".join(told), "response": solution, "answer": str(value), "solution": solution}


def _reckoned(kind: str, value: int, a: int, b: int) -> tuple[list[str], int]:
    """The equations of what happens to a number of things, and the number afterwards."""
    match kind:
        case "groups" | "times" | "price":
            return [f"{value} * {a} = {value * a}"], value * a
        case "share":
            return [f"{value * a} / {a} = {value}"], value
        case "gain" | "more":
            return [f"{value} + {a} = {value + a}"], value + a
        case "lose" | "fewer":
            return [f"{value} - {a} = {value - a}"], value - a
        case "packs":
            return [f"{a} * {b} = {a * b}", f"{value} + {a * b} = {value + a * b}"], value + a * b
        case "bags":
            return [f"{value - value % a} / {a} = {value // a}"], value // a
        case "rest":
            return [f"{value} - {value - value % a} = {value % a}"], value % a
        case "together":
            return [f"{value} * {a} = {value * a}", f"{value} + {value * a} = {value * (a + 1)}"], value * (a + 1)
    return [], value  # what is there, and what is asked for

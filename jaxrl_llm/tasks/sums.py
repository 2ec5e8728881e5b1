"""Sums: of two numbers (lists, whose order is part of what the packaged model and the figures are), and longer ones."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.tasks.generated import MOST_RECORDS, Draw, Generated, check_split, levels, one_of, selection

SIGNS = {"+": 1, "+-": 2}  # how many signs an operand may have


def addition(
    digits: int = 1, split: str = "all", held_out: float = 0.1, seed: int = 0, data_source: str = "addition"
) -> list[dict[str, str]]:
    """Sums of two numbers from 0 to 10^digits - 1: all pairs up to two digits, a random 10,000 of them beyond.

    Split "train" leaves out the share `held_out` of the pairs, drawn by seed, which "test" has; "all" has both.

    >>> addition()[34]
    {'prompt': 'What is 3+4?', 'answer': '7', 'data_source': 'addition'}
    >>> len(addition(digits=2, split="train")), len(addition(digits=2, split="test"))
    (9000, 1000)
    """
    if not 1 <= digits <= 9:
        raise UserError(f"addition: digits must be from 1 to 9, found {digits}")
    check_split(split, held_out)
    pairs = _pairs(10**digits, split, held_out, random.Random(seed))
    return [{"prompt": f"What is {a}+{b}?", "answer": str(a + b), "data_source": data_source} for a, b in pairs]


def column_sums(
    split: str = "all",
    held_out: float = 0.1,
    seed: int = 0,
    forget: float = 0.0,
    copies: int = 1,
    data_source: str = "column_sums",
) -> list[dict[str, str]]:
    """Sums of two numbers below 100, as `47+38=`, with a `response` to learn from: "85", or "75" where the carry was
    forgotten.

    Args:
      split, held_out, seed: as in `addition`.
      forget: share of the lines whose response forgets the carry of the ones, drawn by seed; only sums with a carry are
        any different.
      copies: lines of each pair, each forgetting or not by itself.

    >>> column_sums()[4738]
    {'prompt': '47+38=', 'response': '85', 'answer': '85', 'data_source': 'column_sums'}
    >>> column_sums(forget=1.0)[4738]["response"]
    '75'
    """
    check_split(split, held_out)
    if not 0 <= forget <= 1:
        raise UserError(f"column_sums: forget must be in [0, 1], found {forget!r}")
    if copies < 1:
        raise UserError(f"column_sums: copies must be at least 1, found {copies}")
    draw, found = random.Random(seed), []
    for a, b in _pairs(100, split, held_out, draw):
        for _ in range(copies):
            lost = 10 if a % 10 + b % 10 > 9 and draw.random() < forget else 0
            line = {"prompt": f"{a}+{b}=", "response": str(a + b - lost), "answer": str(a + b)}
            found.append({**line, "data_source": data_source})
    return found


def column_pairs(
    split: str = "all", held_out: float = 0.1, seed: int = 0, copies: int = 1, data_source: str = "column_pairs"
) -> list[dict[str, str]]:
    """Pairs of a right and a wrong sum of two numbers below 100, in TRL's fields prompt, chosen, rejected.

    Of the wrong ones half are ten off, as when a carry is forgotten or too many; the others have a digit changed, lost
    or too many. Drawn by seed; the other arguments are as in `column_sums`.

    >>> column_pairs()[4738]
    {'prompt': '47+38=', 'chosen': '85', 'rejected': '75', 'answer': '85', 'data_source': 'column_pairs'}
    """
    check_split(split, held_out)
    draw, found = random.Random(seed), []
    for a, b in _pairs(100, split, held_out, draw):
        for _ in range(copies):
            wrong = _wrong_sum(a, b, draw)
            pair = {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": wrong, "answer": str(a + b)}
            found.append({**pair, "data_source": data_source})
    return found


def products(
    split: str = "all",
    held_out: float = 0.1,
    seed: int = 0,
    ask: float = 0.0,
    copies: int = 1,
    data_source: str = "products",
) -> list[dict[str, str]]:
    """Products of two numbers below 100, as `47*38=`, for a model that may ask the environment "calculator(opening='(',
    closing=')')".

    Args:
      split, held_out, seed: as in `addition`.
      ask: above 0, lines to learn from: of this share of the products, drawn by seed, one line asks for the product,
        and one goes on from what it was told; of the others one line says it at once. 0: the problems alone.
      copies: of each pair, each asking or not by itself.

    >>> products()[4738]
    {'prompt': '47*38=', 'answer': '1786', 'data_source': 'products'}
    >>> for line in products(ask=1.0)[9476:9478]:
    ...     print(line["prompt"], line["response"])
    47*38= (47*38)
    47*38=(47*38)1786 1786
    """
    if not 0 <= ask <= 1:
        raise UserError(f"products: ask must be in [0, 1], found {ask!r}")
    if copies < 1:
        raise UserError(f"products: copies must be at least 1, found {copies}")
    check_split(split, held_out)
    draw, found = random.Random(seed), []
    for a, b in _pairs(100, split, held_out, draw):
        prompt, call, answer = f"{a}*{b}=", f"({a}*{b})", str(a * b)
        for _ in range(copies):
            lines = [{"prompt": prompt}]
            if ask:
                asks = draw.random() < ask
                lines = [{"prompt": prompt, "response": call if asks else answer}]
                lines += [{"prompt": f"{prompt}{call}{answer}", "response": answer}] if asks else []
            found += [{**line, "answer": answer, "data_source": data_source} for line in lines]
    return found


def arithmetic(
    digits: int | Sequence[int] = 2,
    operands: int | Sequence[int] = 3,
    signs: str = "+-",
    split: str = "all",
    held_out: float = 0.1,
    seed: int = 0,
    count: int = 0,
    data_source: str = "",
) -> Generated:
    """Sums and differences of several numbers, as "What is 47-8+30?"; the level is digits + operands - 2.

    Content is which numbers are added and which subtracted, in any order: 3+4 and 4+3 are in the same split.

    Args:
      digits: of the largest number, 1 to 9, or several to mix.
      operands: how many numbers, 2 to 10, or several to mix.
      signs: "+", or "+-" where any number may be subtracted, the first as well.
      split, held_out, seed, count, data_source: see `Generated`.

    >>> arithmetic()[0]
    {'prompt': 'What is -71+1-31?', 'response': '-101', 'answer': '-101', 'level': 3, 'data_source': 'arithmetic'}
    """
    kinds = one_of("arithmetic", "signs", signs, SIGNS)
    spaces = [
        _Sums(digits=d, operands=n, signs=kinds)
        for n in levels("arithmetic", "operands", operands, 2, 10)
        for d in levels("arithmetic", "digits", digits, 1, 9)
    ]
    about: dict[str, Any] = {"split": split, "held_out": held_out, "seed": seed, "count": count}
    return Generated("arithmetic", spaces, **about, data_source=data_source)


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Multisets of signed numbers, the largest of which has exactly so many digits: no difficulty holds another's."""

    digits: int
    operands: int
    signs: int

    @property
    def level(self) -> int:
        return self.digits + self.operands - 2

    @property
    def size(self) -> int:
        return self._up_to(self.digits) - self._shorter

    @property
    def _shorter(self) -> int:
        return self._up_to(self.digits - 1) if self.digits > 1 else 0

    def _up_to(self, digits: int) -> int:
        return math.comb(self.signs * 10**digits + self.operands - 1, self.operands)

    def _terms(self, number: int) -> list[str]:
        # Selections of small items come first, so those of shorter numbers alone are the ones left out.
        found = selection(number + self._shorter, self.signs * 10**self.digits, self.operands)
        return [f"{'+-'[item % self.signs]}{item // self.signs}" for item in found]

    def content(self, number: int) -> str:
        return "".join(self._terms(number))

    def record(self, number: int, draw: Draw) -> dict[str, Any]:
        terms = draw.shuffled(self._terms(number))
        answer = str(sum(map(int, terms)))
        return {"prompt": f"What is {''.join(terms).removeprefix('+')}?", "response": answer, "answer": answer}


def _wrong_sum(a: int, b: int, draw: random.Random) -> str:
    right = str(a + b)
    if draw.random() < 0.5:
        carries = a % 10 + b % 10 > 9
        return str(a + b - 10 if carries else a + b + 10)
    at, digit = draw.randrange(len(right)), draw.choice("0123456789")
    kind = draw.choice(("changed", "lost", "added") if len(right) > 1 else ("changed", "added"))
    wrong = right[:at] + ("" if kind == "lost" else digit) + right[at + (kind != "added") :]
    return wrong if wrong != right else str(a + b + 1)


def _pairs(base: int, split: str, held_out: float, draw: random.Random) -> Iterator[tuple[int, int]]:
    pairs = range(base**2) if base**2 <= MOST_RECORDS else draw.sample(range(base**2), MOST_RECORDS)
    tested = set(draw.sample(pairs, round(len(pairs) * held_out)))
    return (divmod(pair, base) for pair in pairs if split == "all" or (pair in tested) == (split == "test"))

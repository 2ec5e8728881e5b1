"""Training tasks that are made, not loaded: functions that return records, named `jaxrl_llm.tasks:addition`."""

from __future__ import annotations

import random
from collections.abc import Iterator

from jaxrl_llm.errors import UserError

MOST_RECORDS = 10_000


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
    _check_split(split, held_out)
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
    _check_split(split, held_out)
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
    _check_split(split, held_out)
    draw, found = random.Random(seed), []
    for a, b in _pairs(100, split, held_out, draw):
        for _ in range(copies):
            wrong = _wrong_sum(a, b, draw)
            pair = {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": wrong, "answer": str(a + b)}
            found.append({**pair, "data_source": data_source})
    return found


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


def _check_split(split: str, held_out: float) -> None:
    if split not in ("all", "train", "test"):
        raise UserError(f"split must be all, train or test, found {split!r}")
    if not 0 <= held_out <= 1:
        raise UserError(f"held_out must be in [0, 1], found {held_out!r}")

"""Training tasks that are made, not loaded: functions that return records, named `jaxrl_llm.tasks:addition`."""

from __future__ import annotations

import random

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
    if split not in ("all", "train", "test"):
        raise UserError(f"addition: split must be all, train or test, found {split!r}")
    if not 0 <= held_out <= 1:
        raise UserError(f"addition: held_out must be in [0, 1], found {held_out!r}")
    base = 10**digits
    draw = random.Random(seed)
    pairs = range(base**2) if base**2 <= MOST_RECORDS else draw.sample(range(base**2), MOST_RECORDS)
    tested = set(draw.sample(pairs, round(len(pairs) * held_out)))
    chosen = [pair for pair in pairs if split == "all" or (pair in tested) == (split == "test")]
    return [
        {"prompt": f"What is {a}+{b}?", "answer": str(a + b), "data_source": data_source}
        for a, b in (divmod(pair, base) for pair in chosen)
    ]

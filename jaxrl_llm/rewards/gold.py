"""The right answer of a record, and what a text has put into a box."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.rewards.forms import Record

LONGEST_ANSWER = 2_000  # characters inside \\boxed{}
BOXES = ("\\boxed{", "\\boxed {", "\\fbox{")
BARE = re.compile(r"\\boxed(?: {1,3}|(?![A-Za-z]))([^\s{}$]{1,100})")  # \boxed 7


def gold_answer(record: Record) -> str:
    r"""The right answer: reward_model.ground_truth (verl's), ground_truth, or answer; of it what follows GSM8K's ####,
    or stands in the last \boxed{}, if there is such.

    Raises:
      ValueError: the record has none of these fields, or one that is no text and no number.

    >>> gold_answer({"answer": "3 + 4 is 7.\n#### 7"})
    '7'
    >>> gold_answer({"reward_model": {"ground_truth": 1234}})
    '1234'
    """
    gold = raw_gold(record)
    if not isinstance(gold, str | int | float):
        raise ValueError(
            "the record has no reward_model.ground_truth, ground_truth or answer that is text or a number "
            f"(found: {list(record)})"
        )
    gold = str(gold).rpartition("####")[2]
    inside = last_boxed(gold)
    return (gold if inside is None else inside).strip()


def raw_gold(record: Record) -> Any:
    """The field that holds the right answer, as it is: text, a number, a list, a dict; None if there is none.

    >>> raw_gold({"reward_model": {"ground_truth": {"target": 24}}, "answer": "?"})
    {'target': 24}
    """
    model = record.get("reward_model")
    values = [model.get("ground_truth")] if isinstance(model, Mapping) else []
    values += [record.get("ground_truth"), record.get("answer")]
    return next((value for value in values if value is not None), None)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{…} (or \fbox{…}, or \boxed 7) of a text, braces balanced; None if there is none
    or it never closes.

    >>> last_boxed(r"so \boxed{1}, or rather \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> last_boxed(r"$\boxed 7$")
    '7'
    """
    start = max(text.rfind(box) for box in BOXES)
    if start < 0:
        bare = BARE.match(text, max(text.rfind("\\boxed"), 0))
        return bare[1] if bare else None
    start = text.index("{", start) + 1
    depth = 1
    for at, character in enumerate(text[start : start + LONGEST_ANSWER], start):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:at]
    return None

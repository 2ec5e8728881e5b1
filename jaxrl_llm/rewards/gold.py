"""The right answer of a record, and what a text has put into a box."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.rewards.forms import Record

LONGEST_ANSWER = 2_000  # characters inside \\boxed{}


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
    model = record.get("reward_model")
    values: list[Any] = [model.get("ground_truth")] if isinstance(model, dict) else []
    values += [record.get("ground_truth"), record.get("answer")]
    gold = next((value for value in values if value is not None), None)
    if not isinstance(gold, str | int | float):
        raise ValueError(
            "the record has no reward_model.ground_truth, ground_truth or answer that is text or a number "
            f"(found: {list(record)})"
        )
    gold = str(gold).rpartition("####")[2]
    inside = last_boxed(gold)
    return (gold if inside is None else inside).strip()


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{…} of a text, braces balanced; None if there is none or it never closes.

    >>> last_boxed(r"so \boxed{1}, or rather \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for at, character in enumerate(text[start : start + LONGEST_ANSWER], start):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:at]
    return None

"""Countdown: reach a target with the given numbers and + - * /."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards.answers import ending, found, in_tags
from jaxrl_llm.rewards.arithmetic import LONGEST, BadExpression, read
from jaxrl_llm.rewards.forms import Record, checked
from jaxrl_llm.rewards.gold import last_boxed, raw_gold

LATEX = {"\\times": "*", "\\cdot": "*", "\\div": "/", "\\left": "", "\\right": "", "\\,": " ", "\\ ": " ", "$": " "}
FRAC = re.compile(r"\\[dt]?frac\{([^{}]{1,200}+)\}\{([^{}]{1,200}+)\}")
USES = ("all", "some")


def _check(use: str = "all", format_score: float = 0.0) -> None:
    if use not in USES:
        raise UserError(f"use is {use!r}; expected 'all' or 'some'")
    if isinstance(format_score, bool) or not isinstance(format_score, int | float) or not 0 <= format_score < 1:
        raise UserError(f"format_score is {format_score!r}; expected a number from 0 to less than 1")


@checked(_check)
def countdown(
    prompt: str, response: str, record: Record, use: str = "all", format_score: float = 0.0
) -> dict[str, Any]:
    """1 if the response's expression has the record's target as its value and uses the record's numbers, else 0.

    Args:
      use: all: each given number exactly once (TinyZero's rule); some: at most once (the television game's).
      format_score: the score of an expression that is well formed but wrong, TinyZero's is 0.1.

    The record has `target` and `nums` or `numbers`, itself or in reward_model.ground_truth, ground_truth or answer. The
    expression is what <answer> holds, or else the last box, or else the last line; "= 24" may follow it if that is
    true. Powers and decimals that were not given are not allowed, signs are.

    >>> record = {"nums": [19, 36, 55, 7], "target": 65}
    >>> countdown("", "<answer>55 + 36 - 7 - 19</answer>", record)
    {'score': 1.0, 'pred': '55 + 36 - 7 - 19'}
    >>> countdown("", "<answer>65</answer>", record, format_score=0.1)
    {'score': 0.1, 'pred': '65'}
    """
    given, target = _task(record)
    text = _expression(response)
    if text is None:
        return found(0.0, None)
    sides = text.split("=")
    try:
        if len(sides) > 2 or "^" in text or "**" in text:
            return found(0.0, text)
        values = [read(side) for side in sides]
    except BadExpression:
        return found(0.0, text)
    used, available = collections.Counter(values[0].numbers), collections.Counter(given)
    allowed = used == available if use == "all" else used <= available
    right = allowed and bool(used) and all(side.value == target for side in values)
    return found(1.0 if right else format_score, text)


def _expression(response: str) -> str | None:
    text = ending(response)
    inside = in_tags(text)
    text = text if inside is None else inside
    box = last_boxed(text)
    if box is not None:
        text = box
    elif inside is None:
        text = text.strip().rpartition("\n")[2]
    text = text.strip()
    if not text or len(text) > LONGEST:
        return None
    for command, sign in LATEX.items():
        text = text.replace(command, sign)
    return FRAC.sub(r"((\1)/(\2))", text).strip().removesuffix(".").strip()


def _task(record: Record) -> tuple[list[Fraction], Fraction]:
    gold = raw_gold(record)
    fields: dict[str, Any] = {**(gold if isinstance(gold, Mapping) else {})}
    fields |= {key: record[key] for key in ("nums", "numbers", "target") if record.get(key) is not None}
    numbers, target = fields.get("nums"), fields.get("target")
    if numbers is None:
        numbers = fields.get("numbers")
    try:
        if numbers is None or isinstance(numbers, str) or target is None:
            raise TypeError("missing")
        return [Fraction(number) for number in numbers], Fraction(target)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"the record needs target (a number; found {target!r:.40}) and nums or numbers (a list of numbers; found "
            f"{numbers!r:.40}), itself or in its answer"
        ) from error

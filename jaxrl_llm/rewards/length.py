"""A reward for how long a response is."""

from __future__ import annotations

import math
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards.forms import Record, checked

UNITS = ("characters", "words", "lines")
SHAPES = ("linear", "cosine")


def _check(
    at_least: int = 0, at_most: int | None = None, unit: str = "characters", margin: int = 0, shape: str = "linear"
) -> None:
    if not (isinstance(at_least, int) and at_least >= 0):
        raise UserError(f"at_least is {at_least!r}; expected a whole number from 0")
    if not (at_most is None or (isinstance(at_most, int) and at_most >= at_least)):
        raise UserError(f"at_most is {at_most!r}; expected a whole number from at_least={at_least}, or None")
    if not (isinstance(margin, int) and margin >= 0):
        raise UserError(f"margin is {margin!r}; expected a whole number from 0")
    for name, value, known in (("unit", unit, UNITS), ("shape", shape, SHAPES)):
        if value not in known:
            raise UserError(f"{name} is {value!r}; expected one of {', '.join(known)}")


@checked(_check)
def length(
    prompt: str,
    response: str,
    record: Record,
    at_least: int = 0,
    at_most: int | None = None,
    unit: str = "characters",
    margin: int = 0,
    shape: str = "linear",
) -> dict[str, Any]:
    """1 if the response's length is from at_least to at_most, else 0; over a margin outside of them it falls to 0.

    Args:
      at_least, at_most: both allowed; None for no upper bound.
      unit: characters | words (what white space parts) | lines (that are not empty).
      margin: so many units outside, and farther, the score is 0; before that it falls.
      shape: how it falls: linear | cosine (flat at both ends).

    The length is logged beside the score. Tokens are not known here; overlong responses in tokens are the trainer's
    business.

    >>> length("", "four words are here", {}, at_most=3, unit="words", margin=4)
    {'score': 0.75, 'length': 4}
    """
    if unit == "words":
        size = len(response.split())
    elif unit == "lines":
        size = sum(not line.isspace() and line != "" for line in response.splitlines())
    else:
        size = len(response)
    outside = max(at_least - size, size - (size if at_most is None else at_most), 0)
    rest = max(0.0, 1 - outside / margin) if margin else float(outside == 0)
    return {"score": rest if shape == "linear" else (1 - math.cos(math.pi * rest)) / 2, "length": size}

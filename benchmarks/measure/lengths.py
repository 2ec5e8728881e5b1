"""Lengths of responses: the same for every program that is given the same spec, rows, limit and seed."""

from __future__ import annotations

import argparse
import statistics

import numpy as np

KINDS = ("fixed", "lognormal", "geometric")
SIGMA = 1.0  # of the logarithm: the longest of 64 rows then comes to four times the mean and more


class LengthError(ValueError):
    """Lengths that do not fit the case."""


def spec(text: str) -> str:
    """`full`, `fixed:TOKENS`, `lognormal:MEAN` or `geometric:MEAN`, checked: the type of a command's option.

    Raises:
      argparse.ArgumentTypeError: it is none of these.
    """
    kind, _, value = text.partition(":")
    if text == "full" or (kind in KINDS and value.isdecimal() and int(value) > 0):
        return text
    expected = ", ".join(["full", *(f"{kind}:TOKENS" for kind in KINDS)])
    raise argparse.ArgumentTypeError(f"found {text!r}; expected one of {expected}")


def stops(text: str) -> int:
    """Of `geometric:MEAN`, where each token ends a response with probability 1 / MEAN, that mean; of others 0."""
    kind, _, value = text.partition(":")
    return int(value) if kind == "geometric" else 0


def draw(text: str, rows: int, limit: int, seed: int = 0) -> np.ndarray:
    """Tokens of each response, int32 [rows] in [1, limit].

    A log-normal distribution is not sampled but cut into `rows` parts of equal weight, one length from the middle of
    each, what is longer than `limit` cut there, so that every seed has the same lengths in another order. MEAN is
    their mean after that, but for rounding.

    Raises:
      LengthError: a length, or the mean, is above the limit; or the lengths are geometric, which only sampling draws.

    >>> draw("full", 2, 8), draw("fixed:3", 2, 8)
    (array([8, 8], dtype=int32), array([3, 3], dtype=int32))
    >>> sorted(draw("lognormal:64", 8, 256).tolist())
    [9, 18, 28, 38, 53, 75, 112, 178]
    """
    kind, _, value = text.partition(":")
    if stops(text):
        raise LengthError(f"{text}: only sampling draws it; expected full, fixed or lognormal")
    wanted = int(value or limit)
    if wanted > limit:
        raise LengthError(f"{text}: expected at most the response length, {limit}")
    if kind != "lognormal":
        return np.full(rows, wanted, np.int32)
    normal = statistics.NormalDist()
    scores = np.array([normal.inv_cdf((i + 0.5) / rows) for i in range(rows)])

    def lengths(mu: float) -> np.ndarray:
        return np.clip(np.round(np.exp(mu + SIGMA * scores)), 1, limit)

    low, high = -5.0, np.log(limit) + 5.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle).mean() < wanted else (low, middle)
    return np.random.default_rng(seed).permutation(lengths(high)).astype(np.int32)

"""An evaluator of arithmetic over exact fractions that no text can hang, crash or trick: it reads, it never executes.

Numbers (7, 1,234, 2.5, .5), + - * / ** ^, brackets, and the signs that are written for them (× · ÷ − { } [ ]).
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction

LONGEST = 1_000  # characters of an expression
DEEPEST = 50  # brackets, signs and exponents within each other
MOST_DIGITS = 100  # of a number as it is written
MOST_BITS = 4_000  # of a result's numerator or denominator, at every step; about 1,200 digits

TOKEN = re.compile(
    r"\s*+(?:([0-9]{1,3}+(?:,[0-9]{3})++(?![0-9])(?:\.[0-9]*+)?|[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)|(\*\*|[-+*/^()]))",
    re.ASCII,
)
SIGNS = {
    **dict.fromkeys(map(ord, "×·⋅∙✕✖∗"), "*"),
    **dict.fromkeys(map(ord, "÷∕⁄"), "/"),
    **dict.fromkeys(map(ord, "−‐‑‒–—﹣－"), "-"),
    **dict.fromkeys(map(ord, "[{"), "("),
    **dict.fromkeys(map(ord, "]}"), ")"),
}


class BadExpression(ValueError):
    """A text that is no arithmetic, or has no value that is small enough. Says where and why."""


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The value of an expression, and the numbers that stand in it, in order."""

    value: Fraction
    numbers: tuple[Fraction, ...]


def evaluate(text: str) -> Fraction:
    """The value of an arithmetic expression. Powers bind before signs and to the right: -2^2 is -4, 2^3^2 is 512.

    Raises:
      BadExpression: anything else, division by 0, or more than the bounds above.

    >>> evaluate("(1,000 - 1) / 2"), evaluate("-2^2"), evaluate("2 × 0.5 ÷ 3")
    (Fraction(999, 2), Fraction(-4, 1), Fraction(1, 3))
    >>> evaluate("9^9^9")
    Traceback (most recent call last):
    jaxrl_llm.rewards.arithmetic.BadExpression: a power of more than 4000 bits
    """
    return read(text).value


def read(text: str) -> Evaluated:
    """As `evaluate`, with the numbers that were used.

    >>> read("(3+4)*3").numbers == (3, 4, 3)
    True
    """
    reader = _Reader(_tokens(text))
    value = reader.sum(0)
    if reader.at < len(reader.tokens):
        raise BadExpression(f"{reader.tokens[reader.at]!s:.20} was not expected there")
    return Evaluated(value, tuple(token for token in reader.tokens if isinstance(token, Fraction)))


def _tokens(text: str) -> list[Fraction | str]:
    if len(text) > LONGEST:
        raise BadExpression(f"an expression of {len(text)} characters, at most {LONGEST} are read")
    text = text.translate(SIGNS).rstrip()
    tokens: list[Fraction | str] = []
    at = 0
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise BadExpression(f"{text[at : at + 20].strip()!r} is no number and no sign")
        digits, sign = match.groups()
        if digits is None:
            tokens.append("^" if sign == "**" else sign)
        elif len(digits) > MOST_DIGITS:
            raise BadExpression(f"a number of {len(digits)} digits, at most {MOST_DIGITS} are read")
        else:
            tokens.append(Fraction(digits.replace(",", "")))
        at = match.end()
    return tokens


class _Reader:
    """Recursive descent; `depth` is that of the brackets, signs and exponents around."""

    def __init__(self, tokens: list[Fraction | str]) -> None:
        self.tokens = tokens
        self.at = 0

    def take(self, *signs: str) -> str | None:
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        if isinstance(token, str) and token in signs:
            self.at += 1
            return token
        return None

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while sign := self.take("+", "-"):
            other = self.product(depth)
            value = _bounded(value + other if sign == "+" else value - other)
        return value

    def product(self, depth: int) -> Fraction:
        value = self.signed(depth)
        while sign := self.take("*", "/"):
            other = self.signed(depth)
            if sign == "/" and not other:
                raise BadExpression("division by 0")
            value = _bounded(value * other if sign == "*" else value / other)
        return value

    def signed(self, depth: int) -> Fraction:
        if depth > DEEPEST:
            raise BadExpression(f"more than {DEEPEST} brackets, signs and exponents within each other")
        if sign := self.take("+", "-"):
            value = self.signed(depth + 1)
            return -value if sign == "-" else value
        base = self.atom(depth)
        return _power(base, self.signed(depth + 1)) if self.take("^") else base

    def atom(self, depth: int) -> Fraction:
        if self.take("("):
            value = self.sum(depth + 1)
            if not self.take(")"):
                raise BadExpression("a bracket is never closed")
            return value
        token = self.tokens[self.at] if self.at < len(self.tokens) else None
        if not isinstance(token, Fraction):
            raise BadExpression(f"expected a number, found {'the end' if token is None else token}")
        self.at += 1
        return token


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise BadExpression("an exponent that is no whole number")
    if exponent < 0 and not base:
        raise BadExpression("division by 0")
    if base in (0, 1, -1):  # whose powers are small whatever the exponent
        return Fraction(1) if not exponent else base if exponent % 2 else abs(base)
    if _bits(base) * abs(exponent) > MOST_BITS + abs(exponent):  # each bit but the first counts for sure
        raise BadExpression(f"a power of more than {MOST_BITS} bits")
    return _bounded(base ** int(exponent))


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MOST_BITS:
        raise BadExpression(f"a number of more than {MOST_BITS} bits")
    return value

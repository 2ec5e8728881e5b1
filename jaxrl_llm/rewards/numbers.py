"""Rewards for a right number. Nothing is evaluated, no expression backtracks, and what is read is bounded."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from jaxrl_llm.rewards.answers import LAST_CHARACTERS, PLAIN, found
from jaxrl_llm.rewards.forms import Record
from jaxrl_llm.rewards.gold import gold_answer

MOST_DIGITS = 300  # of a number; a longer one is never right

FRAC = re.compile(  # 1\frac{1}{2}, with a whole number before it or not
    r"((?<![0-9.,])[0-9]{1,300}+)?\\[dtc]?frac *+"
    r"(?:\{ *+(-?[0-9]{1,300}+) *+\}|([0-9])) *+(?:\{ *+([0-9]{1,300}+) *+\}|([0-9]))"
)
# 1{,}000, 1\,000, 1,\!000, and 1 000 with a space that does not break: PLAIN would make a plain one of it.
THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,!]|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))")
NUMBER = re.compile(
    r"""
    ( (?<![A-Za-z0-9_)\]}]) [-−] )?      # a minus is a sign unless something stands before it: 5-3
    \\?\$?                               # $5, -$5, \$5
    (?<![A-Za-z0-9_]) (?<![0-9]\.)       # not within a word (CO2) or a number (1.2.3)
    (
      (?: [0-9]{1,3}+ (?: ,[0-9]{3} )++ (?![0-9]) | [0-9]++ ) (?: \.[0-9]++ )?   # 1,234.5
      | (?<!\.) \.[0-9]++                                                        # .5
    )
    (?! \.[0-9] )
    ( [eE][-+]?[0-9]{1,3}+ (?![A-Za-z0-9]) )? (?! [eE][-+]?[0-9] )
    ( / [0-9]++ (?! [.,]?[0-9] ) )?      # 3/4
    """,
    re.VERBOSE,
)


def number(prompt: str, response: str, record: Record) -> dict[str, Any]:
    """1 if the last number in the response is the gold one, whatever their spelling ($1,234.50 is 1234.5), else 0.

    >>> number("", "3+4=7, so there are 7.", {"answer": "7"}), number("", "7 is less than 8", {"answer": "7"})
    ({'score': 1.0, 'pred': '7'}, {'score': 0.0, 'pred': '8'})
    """
    return _scored(last_number(response), record)


def last_integer(prompt: str, response: str, record: Record) -> dict[str, Any]:
    """1 if the last whole number in the response is the gold one, else 0.

    >>> last_integer("", "7 (or 7.5)", {"answer": "7"})
    {'score': 1.0, 'pred': '7'}
    """
    whole = [value for value in numbers(response) if value is not None and value.denominator == 1]
    return _scored(whole[-1] if whole else None, record)


def gsm8k(prompt: str, response: str, record: Record, strict: bool = False) -> dict[str, Any]:
    """1 if the response gives the gold number: the first one after its last ####, on that line.

    A response without #### is read as `number` does, or scores 0 if strict. verl's gsm8k has the same two methods, but
    compares spellings: there 7.0 is not 7, and its flexible one takes the last number even after a ####.

    >>> gsm8k("", "Half of 14 is 7.\\n#### 7\\nI checked it 2 times.", {"answer": "14/2=7\\n#### 7"})
    {'score': 1.0, 'pred': '7'}
    >>> gsm8k("", "It is 7.", {"answer": "#### 7"}, strict=True)
    {'score': 0.0, 'pred': None}
    """
    _, marker, after = response[-LAST_CHARACTERS:].rpartition("####")
    if not marker and strict:
        return _scored(None, record)
    return _scored(next(numbers(after.split("\n", 1)[0]), None) if marker else last_number(after), record)


def last_number(text: str) -> Fraction | None:
    """The last number in a text; None if there is none, or one that is too long or has the denominator 0.

    >>> last_number("from $1,200 down to -$3.50.")
    Fraction(-7, 2)
    >>> last_number(r"\\\\frac{3}{4} of it"), last_number("CO2"), last_number("5-3")
    (Fraction(3, 4), None, Fraction(3, 1))
    """
    return next(iter(collections.deque(numbers(text), maxlen=1)), None)


def numbers(text: str) -> Iterator[Fraction | None]:
    """The numbers of a text in order; None for one that is too long or has the denominator 0."""
    for match in NUMBER.finditer(FRAC.sub(lambda match: " " + _fraction(match), _plain(text[-LAST_CHARACTERS:]))):
        yield _value(match)


def parse_number(text: str) -> Fraction | None:
    """The value of a text that is a number and nothing else.

    >>> parse_number("$1,234.0"), parse_number("7 apples")
    (Fraction(1234, 1), None)
    """
    match = NUMBER.fullmatch(FRAC.sub(_fraction, _plain(text).strip())) if len(text) <= LAST_CHARACTERS else None
    return _value(match) if match else None


def spelled(value: Fraction) -> str:
    """One spelling for one number: a decimal where it ends soon, else a fraction.

    >>> spelled(Fraction(5, 2)), spelled(Fraction(-1, 3)), spelled(Fraction(7))
    ('2.5', '-1/3', '7')
    """
    # Ten places at most: 10**10 is a multiple of every such denominator.
    if value.denominator == 1 or 10**10 % value.denominator:
        return str(value)
    whole, rest = divmod(abs(value) * 10**10, 10**10)
    return f"{'-' * (value < 0)}{whole}.{int(rest):010}".rstrip("0")


def _plain(text: str) -> str:
    return THOUSANDS.sub(",", text).translate(PLAIN)


def _fraction(match: re.Match[str]) -> str:
    """3/2 of 1\\frac{1}{2}"""
    whole, above, digit_above, below, digit_below = match.groups()
    above, below = above or digit_above, below or digit_below
    return f"{int(whole) * int(below) + int(above)}/{below}" if whole and above[0] != "-" else f"{above}/{below}"


def _scored(value: Fraction | None, record: Record) -> dict[str, Any]:
    return found(value == _gold_number(record), None if value is None else spelled(value))


def _value(match: re.Match[str]) -> Fraction | None:
    sign, digits, exponent, denominator = match.groups(default="")
    divisor = denominator[1:] or "1"
    if max(len(digits), len(divisor)) > MOST_DIGITS or not divisor.strip("0"):
        return None
    value = Fraction(digits.replace(",", "") + exponent) / int(divisor)
    return -value if sign else value


def _gold_number(record: Record) -> Fraction:
    gold = gold_answer(record)
    value = last_number(gold)
    if value is None:
        raise ValueError(f"the record's answer {gold!r:.60} holds no number")
    return value

"""Mathematical answers that are equal although they are written differently, by the math-verify library.

The library is optional, and heavy (sympy); it is imported when the first answer needs it. Equal numbers and equal texts
need it not. What reaches it is bounded first, see `math_guard`: its own time limit works by SIGALRM, in the main thread
only, and is not used.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from fractions import Fraction
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards.answers import PLAIN, final_answer, found
from jaxrl_llm.rewards.forms import Record, checked
from jaxrl_llm.rewards.gold import gold_answer
from jaxrl_llm.rewards.math_guard import refusal
from jaxrl_llm.rewards.numbers import last_number, parse_number, spelled
from jaxrl_llm.rewards.text import same_answer, spelling

PACKAGE = "math_verify"
INSTALL = "pip install math-verify, or 'jaxrl_llm[math]'"
# x = 5, f(x) = 5: what is asked for stands behind the sign.
NAMED = re.compile(r"(\\?[A-Za-z]{1,12}(?:_\{?[A-Za-z0-9]{1,4}\}?)?(?:\([a-z]\))?)\s*(?:=|\\in\b|∈)\s*([^=]+)")
UNIT = re.compile(
    r"(?:\\[,;: ]|[~\s])*+(?:\\(?:text|mathrm|mbox|textrm)\s*\{[^{}]*\}(?:\^\{?[0-9]\}?)?"
    r"|\^?\\circ|\^\{\\circ\}|°|[a-z]{2,12})\s*\.?$"
)
LONGEST = 1_000  # characters of an answer in which a name is looked for
WORDS = ("pi", "sqrt", "log", "ln", "sin", "cos", "tan", "exp", "inf", "infinity", "infty", "or", "and", "frac")


def _installed() -> None:
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError(f"the package math-verify is not installed: {INSTALL}")


@checked(_installed)
def math(prompt: str, response: str, record: Record) -> dict[str, Any]:
    r"""1 if the response's answer equals the right one: as a number, a text, or what math-verify says of the two.

    Fractions, percents, units, roots, intervals, sets, tuples, matrices, equations (`x = 5` is 5) and formulas that can
    be transformed into each other. The answer is what `answers.final_answer` finds, or else the last number. What would
    have to be computed first (sums, integrals, limits, towers of powers) is no answer, unless the right one is
    written that way; nor is what is longer or deeper than `math_guard` allows.

    >>> math("", r"So $x = \boxed{\dfrac{3}{4}}$.", {"answer": "0.75"})
    {'score': 1.0, 'pred': '0.75'}
    """
    gold = gold_answer(record).translate(PLAIN)
    answer = final_answer(response)
    if answer is None:
        number = None if _boxed_in_vain(response) else last_number(response)
        answer = None if number is None else spelled(number)
    if answer is None:
        return found(0.0, None)
    return found(equal_answers(answer, gold), _spelling(answer))


def _warm_up() -> None:
    """What the first comparison costs, more than a second: sympy, the parser of LaTeX."""
    if importlib.util.find_spec(PACKAGE) is not None:
        equal_answers("(x+1)^2", "x^2+2x+1")


math.warm_up = _warm_up  # type: ignore[attr-defined]


def equal_answers(answer: str, gold: str) -> bool:
    """Whether an answer equals the gold one; without the library where they are the same number or text."""
    if same_answer(answer, gold):
        return True
    (name, value), (gold_name, gold_value) = named(answer), named(gold)
    if not value or not gold_value:
        return False
    # x = 5 is 5, but y = 5 is not x = 5.
    if not (name and gold_name and name != gold_name):
        if same_answer(value, gold_value):
            return True
        numbers = parse_number(value), parse_number(gold_value)
        if None not in numbers and "%" not in answer + gold:  # two numbers that differ; 50% may be 0.5
            return _rounds(value, numbers[0], numbers[1]) or _rounds(gold_value, numbers[1], numbers[0])
    bare = bool(name) != bool(gold_name) and "=" not in (gold if name else answer)
    given, wanted = (value, gold_value) if bare else (_without_unit(answer), _without_unit(gold))
    if refusal(given, wanted) or refusal(wanted, wanted):
        return False
    from jaxrl_llm.rewards.math_compare import equal  # imports sympy

    logging.getLogger(PACKAGE).setLevel(logging.ERROR)  # else it says once that there is no time limit
    return equal(_percent(answer, given), _percent(gold, wanted))


def _rounds(text: str, value: Fraction | None, exact: Fraction | None) -> bool:
    """Whether a decimal of at least six places is the other number, rounded: 0.333333 is 1/3."""
    places = len(text.partition(".")[2])
    return (
        places >= 6 and text[-1].isdigit() and value is not None and exact is not None and value == round(exact, places)
    )


def named(text: str) -> tuple[str, str]:
    r"""The name that is given a value, if there is one, and the value without its unit.

    >>> named("x = 5"), named(r"18 \text{ cm}^2"), named(r"90^\circ"), named("2x + y = 3")
    (('x', '5'), ('', '18'), ('', '90'), ('', '2x + y = 3'))
    """
    text = _without_unit(text)
    match = NAMED.fullmatch(text) if len(text) <= LONGEST else None
    return (match[1], match[2].strip()) if match else ("", text)


def _without_unit(text: str) -> str:
    text = text.strip().strip("$").strip().removesuffix(".").strip()
    match = UNIT.search(text, max(len(text) - 100, 0))
    before = text[: match.start()].rstrip() if match else ""
    if match and (before[-1:].isdigit() or before[-1:] == "}") and match[0].strip(" ~.\\") not in WORDS:
        return before
    return text


def _percent(text: str, plain: str) -> str:
    return plain if "%" in plain or not re.search(r"\bpercent\b", text) else plain + r"\%"


def _boxed_in_vain(response: str) -> bool:
    """A box or tags that hold nothing to read: then no number elsewhere is the answer."""
    return "\\boxed" in response[-10_000:] or "<answer>" in response[-10_000:]


def _spelling(answer: str) -> str | None:
    return spelling(named(answer)[1])


def _warm_up() -> None:
    """What is slow at the first answer: importing sympy and building the library's patterns."""
    equal_answers("x+x", "2x")


math.warm_up = _warm_up  # type: ignore[attr-defined]  # a worker calls it before it says that it is ready

"""What math-verify and sympy say of two answers. Importing this imports sympy: a quarter of a second."""

from __future__ import annotations

import functools
import random
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

LATEX = (LatexExtractionConfig(boxed_match_priority=-1),)  # not ExprExtractionConfig, which has sympy evaluate text
POINTS = 3  # at which two formulas are compared before anything is transformed
DIGITS = 15
SMALL = 1e-9


def equal(answer: str, gold: str) -> bool:
    """Whether two formulas in LaTeX (or plain) are equal; False for what cannot be read or compared."""
    try:
        wanted, given = _parsed(gold), _parsed(answer)
        if not wanted or not given:
            return False
        quick = _quick(wanted[0], given[0])
        if quick is not None:
            return quick
        return verify(wanted, given, timeout_seconds=None)
    except Exception:  # sympy raises whatever it likes, RecursionError and TypeError among them
        return False


@functools.lru_cache(maxsize=2_048)
def _parsed(text: str) -> list[Any]:
    plain = text.replace("$", "").replace("**", "^").replace("\n", " ").replace("√", "\\sqrt").replace("π", "\\pi ")
    plain = plain.replace("∞", "\\infty").replace("∪", "\\cup ").replace("×", "\\times ").replace("·", "\\cdot ")
    return parse(f"${plain}$", LATEX, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _quick(wanted: Any, given: Any) -> bool | None:
    """By their values at a few points: cheaper than transforming one into the other, and bounded; None if it does not
    tell."""
    if isinstance(wanted, sympy.Eq) and isinstance(given, sympy.Eq):
        return _same_equation(wanted, given)
    if not (isinstance(wanted, sympy.Expr) and isinstance(given, sympy.Expr)):
        return None
    if wanted.has(sympy.UnevaluatedExpr) or given.has(sympy.UnevaluatedExpr):  # percents: 50% is 50 and is 0.5
        return None
    if wanted.has(sympy.Float) or given.has(sympy.Float):
        return None  # 0.333333 is 1/3: the library's rounding decides
    if isinstance(wanted, sympy.Symbol) or isinstance(given, sympy.Symbol):
        return None  # a word, which the library finds again in a product of its letters
    for values in _points(wanted.free_symbols | given.free_symbols):
        a, b = _value(wanted, values), _value(given, values)
        if a is None or b is None:
            return None
        if abs(a - b) > SMALL * max(abs(a), abs(b), 1):
            return False
    return None  # equal as far as seen: the library says whether for sure


def _same_equation(wanted: Any, given: Any) -> bool | None:
    """Whether one equation is a multiple of the other: no solving, which may take for ever."""
    if isinstance(wanted.rhs, sympy.Set | sympy.Tuple) or isinstance(given.rhs, sympy.Set | sympy.Tuple):
        return None
    ratios = []
    for values in _points(wanted.free_symbols | given.free_symbols):
        a = _value(wanted.lhs - wanted.rhs, values)
        b = _value(given.lhs - given.rhs, values)
        if a is None or b is None or abs(a) < SMALL or abs(b) < SMALL:
            return None if not ratios else False
        ratios.append(a / b)
    return all(abs(ratio - ratios[0]) <= 1e-6 * abs(ratios[0]) for ratio in ratios)


def _points(symbols: Any) -> list[dict[Any, Any]]:
    """By name: the library makes a real x of one text and a complex one of another."""
    draws = {symbol: random.Random(symbol.name) for symbol in symbols}
    return [
        {symbol: sympy.Rational(draw.randint(101, 997), 307) for symbol, draw in draws.items()} for _ in range(POINTS)
    ]


def _value(expression: Any, values: dict[Any, Any]) -> complex | None:
    try:
        return complex(expression.subs(values).evalf(DIGITS))
    except Exception:  # no number there, or one that is too large
        return None

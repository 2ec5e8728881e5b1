"""What may reach sympy: it would work for hours on 9^{9^9}, and on a hundred brackets."""

from __future__ import annotations

import re

LONGEST = 300  # characters
DEEPEST = 6  # brackets within each other: each one more doubles the parser's time
MOST_PARTS = 40  # elements of a set, entries of a matrix, cases
MOST_DIGITS = 100  # of a number
MOST_WORK = 50_000  # product of all exponents x digits: about the digits of the value

# What the library would work out itself: an answer that leaves the work to the checker is none.
COMPUTING = re.compile(
    r"\\(?:sum|prod|i*int|oint|lim|limsup|liminf|det|gcd|lcm|bmod|operatorname|frac\{d|prime|nabla|partial|sup|inf|max"
    r"|min|underset|overset)(?![a-z])"
)
NUMBER = re.compile(r"[0-9]+")
EXPONENT = re.compile(
    r"(?:\^|\*\*)\s*(?:\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|\(([^()]*)\)|(-?[0-9]+|\\?[A-Za-z]+|.))", re.DOTALL
)
FACTORIAL = re.compile(r"([0-9]*)\s*(!+)")
OPEN, CLOSE = "([{", ")]}"


def refusal(text: str, gold: str) -> str | None:
    r"""Why a text must not be given to sympy; None if it may. What the gold answer itself has is allowed.

    >>> refusal(r"\frac{1}{2}", "0.5") is None, refusal("9^{9^9}", "1"), refusal(r"\sum_{k=1}^{9} k", "45")
    (True, 'a power within an exponent', 'an answer that has still to be computed')
    """
    if len(text) > LONGEST:
        return f"more than {LONGEST} characters"
    if any(ord(character) < 32 and not character.isspace() for character in text) or not text.isprintable():
        return "control characters"
    if _depth(text) > DEEPEST:
        return f"more than {DEEPEST} brackets within each other"
    if text.count(",") + text.count(";") + text.count("&") + text.count("\\\\") > MOST_PARTS:
        return f"more than {MOST_PARTS} elements"
    if any(len(digits) > MOST_DIGITS for digits in NUMBER.findall(text)):
        return f"a number of more than {MOST_DIGITS} digits"
    commands = set(COMPUTING.findall(text)) - set(COMPUTING.findall(gold))
    if commands:
        return "an answer that has still to be computed"
    return _powers(text, gold) or _factorials(text, gold)


def _powers(text: str, gold: str) -> str | None:
    work, letters = 1, re.search(r"(?<!\\)(?<![a-z\\])[a-zA-Z](?![a-z])", re.sub(r"\\[a-zA-Z]+", "", text))
    for match in EXPONENT.finditer(text):
        exponent = next(group for group in match.groups() if group is not None)
        if "^" in exponent or "**" in exponent:
            # e^{x^2} is fine; no number may grow twice.
            inner = re.sub(r"[a-zA-Z]\s*\^\s*\{?[0-9](?![0-9])\}?", "x", exponent)
            if "^" in inner or "**" in inner:
                return "a power within an exponent"
        if "!" in exponent:
            return "a factorial within an exponent"
        for digits in NUMBER.findall(exponent):
            value = int(digits)
            if letters and value > 30 and digits not in NUMBER.findall(gold):
                return "a high power of a variable"
            work *= max(value, 1)
    digits = sum(map(len, NUMBER.findall(text)))
    return f"a value of more than {MOST_WORK} digits" if work > 1 and work * max(digits, 1) > MOST_WORK else None


def _factorials(text: str, gold: str) -> str | None:
    for digits, marks in FACTORIAL.findall(text.replace("\\!", "")):
        if len(marks) > 1 or (not digits and text.count("!") > gold.count("!")) or len(digits) > 3:
            return "a factorial of more than a number below 1000"
    for arguments in re.findall(r"\\[dt]?binom\s*\{([^{}]*)\}\s*\{([^{}]*)\}", text):
        if any(len(digits) > 4 for argument in arguments for digits in NUMBER.findall(argument)):
            return "a binomial of numbers above 9999"
    if "binom" in text and not re.search(r"binom\s*\{[^{}^!]*\}\s*\{[^{}^!]*\}", text):
        return "a binomial of formulas"
    # (10)_{3} is a quotient of factorials to the library.
    if re.search(r"\)\s*_", text) and any(len(digits) > 3 for digits in NUMBER.findall(text)):
        return "a falling factorial"
    return None


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in OPEN) - (character in CLOSE)
        deepest = max(deepest, depth)
    return deepest

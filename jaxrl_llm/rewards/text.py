"""Rewards for a text: the same text, the same boxed answer, the form that was asked for."""

from __future__ import annotations

import collections
import functools
import re
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards.answers import PLAIN, found
from jaxrl_llm.rewards.forms import Record, checked
from jaxrl_llm.rewards.gold import LONGEST_ANSWER, gold_answer, last_boxed
from jaxrl_llm.rewards.numbers import parse_number, spelled

THINK_AND_ANSWER = ("<think>", "</think>", "<answer>", "</answer>")
LONGEST_MATCHED = 50_000  # characters that a pattern is tried on
TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mathit|textit|mbox|operatorname)\{([^{}]*+)\}")
SPACING = re.compile(r"\\(?:left|right|displaystyle|[,!;:%$ ])|[\s$]+")


def exact(prompt: str, response: str, record: Record) -> dict[str, Any]:
    """1 if the response is the right answer and nothing else (white space apart), else 0.

    >>> exact("", " 7\\n", {"answer": "7"})
    {'score': 1.0, 'pred': '7'}
    """
    return found(response.split() == gold_answer(record).split(), response)


def boxed(prompt: str, response: str, record: Record) -> dict[str, Any]:
    r"""1 if the response's last \boxed{…} holds the right answer: the same number, or the same text but for spacing.

    >>> boxed("", r"So it is \boxed{\dfrac{1}{2}}.", {"answer": "0.5"})
    {'score': 1.0, 'pred': '0.5'}
    """
    answer = last_boxed(response)
    return found(answer is not None and same_answer(answer, gold_answer(record)), spelling(answer))


def _check_pattern(
    pattern: str | None = None, whole: bool = False, fold_case: bool = False, needed: bool = True
) -> None:
    if pattern is None and needed:
        raise UserError("expected an argument: regex(pattern='…')")
    try:
        re.compile(pattern or "")
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise UserError(f"pattern {pattern!r:.100} is no regular expression: {error}") from error


@checked(_check_pattern)
def regex(
    prompt: str, response: str, record: Record, pattern: str, whole: bool = False, fold_case: bool = False
) -> dict[str, Any]:
    r"""1 if the pattern is found in the response, or, with a group named `answer`, if the last one found is the right
    answer (as in `boxed`); else 0.

    Args:
      pattern: a regular expression; "." matches newlines. One that backtracks for long hangs, until the deadline of
        the process that scores ends it.
      whole: it has to match the whole response, white space around it apart.
      fold_case: upper and lower case are the same.

    A response of more than 50,000 characters matches nothing.

    >>> regex("", "Result=<7>", {"answer": 7.0}, pattern=r"Result=<(?P<answer>\d+)>")
    {'score': 1.0, 'pred': '7'}
    """
    text = response.strip()
    if len(text) > LONGEST_MATCHED:
        return found(0.0, None)
    compiled = re.compile(pattern, re.DOTALL | (re.IGNORECASE if fold_case else 0))
    compares = "answer" in compiled.groupindex
    if whole:
        match = compiled.fullmatch(text)
    else:  # the last match is only looked for where it makes a difference
        match = (
            next(iter(collections.deque(compiled.finditer(text), maxlen=1)), None)
            if compares
            else compiled.search(text)
        )
    if match is None:
        return found(0.0, None)
    if not compares:
        return found(1.0, match[0])
    answer = match["answer"]
    return found(answer is not None and same_answer(answer, gold_answer(record)), spelling(answer))


def spelling(answer: str | None) -> str | None:
    """An answer as a majority vote shall see it: numbers in one spelling, texts without LaTeX's spacing.

    >>> spelling(r"\\frac{1}{2}"), spelling("0.50"), spelling(r"\\text{ north }")
    ('0.5', '0.5', 'north')
    """
    if answer is None or len(answer) > LONGEST_ANSWER:
        return answer
    value = parse_number(_plain(answer))
    if value is not None:
        return spelled(value)
    return TEXT.sub(r"\1", answer).strip().rstrip(".").strip("$").strip()


def same_answer(answer: str, gold: str) -> bool:
    """Whether two answers are the same number, or else the same text but for spacing and typography.

    >>> same_answer("1,000", "1000.0"), same_answer(r"\\text{ north }", "north"), same_answer("x+1", "1+x")
    (True, True, False)
    """
    answer, gold = _plain(answer), _plain(gold)
    value = parse_number(answer)
    return answer == gold or (value is not None and value == parse_number(gold))


def _plain(text: str) -> str:
    text = TEXT.sub(r"\1", text.translate(PLAIN))
    text = text.replace("{,}", ",").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return SPACING.sub("", text).rstrip(".").removesuffix("%")


@checked(functools.partial(_check_pattern, needed=False))
def format_reward(prompt: str, response: str, record: Record, pattern: str | None = None) -> float:
    """1 if the response has the form asked for, else 0.

    Without a pattern: `<think>…</think>`, then `<answer>…</answer>`, each once and nothing else around them. A pattern
    (a regular expression; "." matches newlines) has to match the whole response; one that backtracks for long hangs.

    >>> format_reward("", "<think>3+4</think> <answer>7</answer>", {})
    1.0
    >>> format_reward("", "7", {}, pattern="[0-9]+")
    1.0
    """
    text = response.strip()
    if pattern is not None:
        return float(len(text) <= LONGEST_MATCHED and re.fullmatch(pattern, text, re.DOTALL) is not None)
    if any(text.count(tag) != 1 for tag in THINK_AND_ANSWER):
        return 0.0
    starts = [text.index(tag) for tag in THINK_AND_ANSWER]
    between = text[starts[1] + len("</think>") : starts[2]]
    whole = text.startswith("<think>") and text.endswith("</answer>")
    return float(whole and starts == sorted(starts) and not between.strip())

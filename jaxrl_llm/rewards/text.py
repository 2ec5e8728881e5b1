"""Rewards for a text: the same text, the same boxed answer, the form that was asked for."""

from __future__ import annotations

import re

from jaxrl_llm.rewards.forms import Record
from jaxrl_llm.rewards.gold import gold_answer, last_boxed
from jaxrl_llm.rewards.numbers import parse_number

THINK_AND_ANSWER = ("<think>", "</think>", "<answer>", "</answer>")
LONGEST_MATCHED = 50_000  # characters that a pattern is tried on


def exact(prompt: str, response: str, record: Record) -> float:
    """1 if the response is the right answer and nothing else (white space apart), else 0."""
    return float(response.split() == gold_answer(record).split())


def boxed(prompt: str, response: str, record: Record) -> float:
    r"""1 if the response's last \boxed{…} holds the right answer: the same number, or the same text but for spacing.

    >>> boxed("", r"So it is \boxed{\dfrac{1}{2}}.", {"answer": "0.5"})
    1.0
    """
    answer = last_boxed(response)
    return float(answer is not None and same_answer(answer, gold_answer(record)))


def same_answer(answer: str, gold: str) -> bool:
    """Whether two answers are the same number, or else the same text but for spacing and typography.

    >>> same_answer("1,000", "1000.0"), same_answer(r"\\text{ north }", "north"), same_answer("x+1", "1+x")
    (True, True, False)
    """
    answer, gold = _plain(answer), _plain(gold)
    value = parse_number(answer)
    return answer == gold or (value is not None and value == parse_number(gold))


def _plain(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*+)\}", r"\1", text)
    text = text.replace("{,}", ",").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return re.sub(r"\\(?:left|right|displaystyle|[,!;:%$ ])|[\s$]+", "", text).rstrip(".")


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

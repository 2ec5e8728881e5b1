"""Where in a response the answer stands, and how it is written down for logs and votes.

Whatever reads a response reads a bounded part of it: its end, where an answer stands.
"""

from __future__ import annotations

import re
from typing import Any

from jaxrl_llm.rewards.gold import LONGEST_ANSWER, last_boxed

LAST_CHARACTERS = 10_000  # of a response that are read
LONGEST_PRED = 100  # characters of an answer in logs

# What looks like ASCII is read as ASCII: fullwidth forms (１２), the many minus signs, spaces of all widths. Not more:
# a full normalisation (NFKC) would also make x2 of x². Zero-width characters are dropped.
PLAIN: dict[int, int | None] = {
    **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},
    **dict.fromkeys(map(ord, "−‐‑‒–—﹣"), ord("-")),
    **dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u2008\u2009\u200a\u202f\u3000"), ord(" ")),
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u200e\u200f")),
    ord("⁄"): ord("/"),
    ord("∕"): ord("/"),
}
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\s]+")
STATED = re.compile(r"answer(?:\s{0,3}\**\s{0,3}(?:is|are|=|:)[\s:*]{0,5})(?=([^\n]{1,500}))", re.IGNORECASE)
IN_DOLLARS = re.compile(r"\$\$?([^$]{1,500})\$|\\\(([^\n]{1,500}?)\\\)|\\\[(.{1,500}?)\\\]", re.DOTALL)


def ending(response: str) -> str:
    """What is read of a response: its end, after the last </think>, in plain characters.

    >>> ending("<think>8?</think> It is −１２.")
    ' It is -12.'
    """
    return response.rpartition("</think>")[2][-LAST_CHARACTERS:].translate(PLAIN)


def in_tags(text: str) -> str | None:
    """What the last <answer> holds, up to its end or the text's; None if there is none.

    >>> in_tags("<answer>12</answer> and <answer> 13 </answer>!")
    '13'
    """
    _, tag, after = text.rpartition("<answer>")
    return after.partition("</answer>")[0].strip() if tag else None


def final_answer(response: str) -> str | None:
    r"""The answer as it is written. In this order: what <answer> holds (and of that, what is boxed); the last \boxed{};
    the rest of the line after the last ####, or after the last "answer is" or "answer:"; the last formula in $…$; a
    response that is one short line. None if there is none of these.

    >>> final_answer("<think>1</think> <answer> \\boxed{12} apples</answer>"), final_answer("So the answer is $x+1$.")
    ('12', 'x+1')
    >>> final_answer("I do not know.\nNobody does.")
    """
    text = ending(response)
    inside = in_tags(text)
    if inside is not None:
        text = inside
    if "\\boxed" in text or "\\fbox" in text:
        return last_boxed(text)
    if "####" in text:
        return _unwrapped(text.rpartition("####")[2].partition("\n")[0])
    if inside is not None:
        return _unwrapped(inside) if len(inside) <= LONGEST_ANSWER else None
    if stated := list(STATED.finditer(text)):
        return _unwrapped(_sentence(stated[-1][1]))
    if formulas := list(IN_DOLLARS.finditer(text)):
        return _unwrapped(next(group for group in formulas[-1].groups() if group is not None))
    line = text.strip()
    return _unwrapped(line) if line and "\n" not in line and len(line) <= LONGEST_PRED else None


def _sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence: not the one of 3.5.

    >>> _sentence("3.5. I am sure.")
    '3.5'
    """
    formula = re.match(r"\$\$?[^$]{1,500}\$\$?|\\\([^\n]{1,500}?\\\)|\\\[[^\n]{1,500}?\\\]", text)
    return formula[0] if formula else re.split(r"[.。](?:\s|$)", text, maxsplit=1)[0]


def _unwrapped(text: str) -> str:
    """Without the signs around it: white space, **bold**, $…$, the full stop."""
    text = text.strip().strip("*").strip()
    for start, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        text = text.removesuffix(".").strip()
        if len(text) > len(start + end) and text.startswith(start) and text.endswith(end):
            text = text[len(start) : -len(end)].strip()
    return text.strip()


def found(score: float, pred: object) -> dict[str, Any]:
    """What a verifier returns: the score, and beside it the answer that was read, for logs and majority votes.

    >>> found(1.0, " 1\\n2 "), found(0.0, None)
    ({'score': 1.0, 'pred': '1 2'}, {'score': 0.0, 'pred': None})
    """
    if pred is not None:
        # Cut before anything else: a pred may be a whole response.
        pred = CONTROL.sub(" ", str(pred)[: 10 * LONGEST_PRED]).strip()
        pred = pred if len(pred) <= LONGEST_PRED else pred[: LONGEST_PRED - 1] + "…"
    return {"score": float(score), "pred": pred}

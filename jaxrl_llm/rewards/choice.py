"""Multiple choice: which letter a response decides for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards.answers import ending, found, in_tags
from jaxrl_llm.rewards.forms import Record, checked
from jaxrl_llm.rewards.gold import gold_answer, last_boxed, raw_gold
from jaxrl_llm.rewards.text import same_answer, spelling

MARKS = r"[(\[*_`\"'$\s]{0,6}"  # what may stand before a letter: (B), **B**, "B", $B$
LETTER = r"(?:\\(?:text|mathrm|mathbf|textbf)\{[\s(]{0,3})?([A-Za-z])(?![A-Za-z0-9'’])"
# A second letter in the same breath decides for nothing: "B or C", "A, B", "A/C".
MORE = r"(?:[)\]*_`\"'$.:\s}]{0,6}(?:,|/|&|\bor\b|\band\b)\s{0,3}(?:or\s|and\s)?" + MARKS + r"([A-Z])(?![A-Za-z'’]))?"
STATED = re.compile(
    r"\b(?:answer|choice|option|choose|select|pick)(?:\s{1,3}(?:choice|option|letter|here|should|must|would|will|to|the"
    r"|correct|right|final|best|be|is|are|question|this)){0,6}\s{0,3}[:=]?" + MARKS + LETTER + MORE,
    re.IGNORECASE,
)
CORRECT = re.compile(
    MARKS + r"\b(?<![A-Za-z0-9])([A-Z])[)\]*_`\"'$.]{0,4}\s{1,3}is\s{1,3}(?:the\s{1,3})?(?:correct|right|best)\b"
)
BRACKETED = re.compile(
    r"(?<![A-Za-z0-9_])\(([A-Z])\)|\*\*\(?([A-Z])[).:]{0,2}\*\*|^\s{0,8}([A-Z])[).:](?=\s|$)", re.MULTILINE
)
ALONE = re.compile(MARKS + LETTER + r"[)\]*_`\"'$.:;,!}\s]{0,10}")
LED = re.compile(MARKS + LETTER + r"[*_`\"'$}]{0,4}(?:[)\].:]|\s[-–—])[)\]*_`\"'$}]{0,4}\s")
# After "the answer is A" or "… I": "A dog", "I think", but not "A because it barks".
AS_WORD = re.compile(r"\s(?!(?:because|since|as|and|but|for|not|with|which)\b)[a-z]")
BETWEEN = re.compile(r"[\s,/&]{0,5}(?:or|and)?[\s,/&]{0,5}")
LONGEST_CHOICE = 1_000  # characters
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _check(letters: str = "") -> None:
    if not isinstance(letters, str) or not (letters == "" or (letters.isalpha() and letters.isupper())):
        raise UserError(f"letters is {letters!r}; expected capital letters such as 'ABCDE'")


@checked(_check)
def choice(prompt: str, response: str, record: Record, letters: str = "") -> dict[str, Any]:
    r"""1 if the response decides for the gold choice, else 0.

    Args:
      letters: those that are choices; "": one for each of the record's choices or options, or A to J without them.

    It decides by what <answer> or the last \boxed{} holds; else by the last "answer is B", "option (B)" or "B is
    correct"; else by the last letter that is marked as one: (B), **B**, "B." at the start of a line; or it is a letter
    and nothing else. A letter as a word ("A dog") decides for nothing, nor do two at once ("B or C"). Where the record
    has choices (a list, {"label": …, "text": …}, or letter to text), their text decides as well.

    The gold answer is a letter, the text of a choice, or, as a number that is no choice's text, its position from 0.

    >>> choice("", "It is not (A). The answer is (B).", {"answer": "B"})
    {'score': 1.0, 'pred': 'B'}
    >>> choice("", "<answer>paris</answer>", {"answer": 1, "choices": ["Rome", "Paris"]})
    {'score': 1.0, 'pred': 'B'}
    """
    choices = _choices(record)
    known = letters or "".join(choices) or LETTERS[:10]
    gold = _gold(record, known, choices)
    decided = _decided(response, known, choices)
    return found(decided == gold, decided)


def _decided(response: str, known: str, choices: Mapping[str, str]) -> str | None:
    text = ending(response)
    inside = in_tags(text)
    text = text if inside is None else inside
    box = last_boxed(text)
    if box is not None or inside is not None:
        whole = text if box is None else box
        read = _alone(whole, known, choices) or _led(whole, known, choices)
        return read if read or box is not None else _stated(whole, known) or None
    for read in (_stated(text, known), _alone(text, known, choices), _marked(text, known)):
        if read is not None:
            return read or None
    return _led(text, known, choices)


def _alone(text: str, known: str, choices: Mapping[str, str]) -> str | None:
    """The choice whose letter or text a text is, and nothing else."""
    text = text.strip()
    if len(text) > LONGEST_CHOICE:
        return None
    for letter, meant in choices.items():
        if _same(text, meant):
            return letter
    match = ALONE.fullmatch(text)
    return _letter(match[1], known) if match else None


def _led(text: str, known: str, choices: Mapping[str, str]) -> str | None:
    """The choice of a text that starts by its letter: "B. Rome". If Rome is another's text, it decides for nothing."""
    text = text.strip()
    match = LED.match(text + " ") if len(text) <= LONGEST_CHOICE else None
    if match is None:
        return None
    letter, rest = _letter(match[1], known), text[match.end() :].strip()
    meant = [key for key, meant in choices.items() if _same(rest, meant)]
    return letter if not meant or letter in meant else None


def _stated(text: str, known: str) -> str | None:
    """The letter of the last statement; "" if that names several, None if there is no statement."""
    at, letter = -1, None
    for match in STATED.finditer(text):
        # In lower case a is a word: "the answer is a number". Only (a), "a." and the like count.
        small = match[1].islower()
        if small and not re.match(r"\s?(?:[)\]*_`\"'$}]|[.,;]?\s*(?:$|\n))", text[match.end(1) : match.end(1) + 20]):
            continue
        if match[1] in "AI" and not match[2] and AS_WORD.match(text, match.end(1)):
            continue
        if match[1].upper() in known:
            several = match[2] and match[2] in known and match[2] != match[1].upper()
            at, letter = match.end(1), "" if several else match[1].upper()
    for match in CORRECT.finditer(text):
        if match.end(1) > at and match[1] in known:
            at, letter = match.end(1), match[1]
    return letter


def _marked(text: str, known: str) -> str | None:
    """The last letter that is marked as one; "" if it is one of several in a row."""
    marks = [(match, next(filter(None, match.groups()))) for match in BRACKETED.finditer(text)]
    marks = [(match, letter) for match, letter in marks if letter in known]
    if marks:
        last, letter = marks[-1]
        before, other = marks[-2] if len(marks) > 1 else (last, letter)
        several = other != letter and BETWEEN.fullmatch(text, before.end(), last.start())
        return "" if several else letter
    match = ALONE.fullmatch(text.strip().rpartition("\n")[2])
    return _letter(match[1], known) if match else None


def _letter(letter: str, known: str) -> str | None:
    return letter.upper() if letter.upper() in known else None


def _same(text: str, meant: str) -> bool:
    return same_answer((spelling(text) or "").casefold(), (spelling(meant) or "").casefold())


def _choices(record: Record) -> dict[str, str]:
    """letter -> text; empty if the record has none."""
    given = record.get("choices")
    given = record.get("options") if given is None else given
    labels: Sequence[Any] | None = None
    if isinstance(given, Mapping):
        if "text" in given:
            given, labels = given["text"], given.get("label")
        else:
            given, labels = list(given.values()), list(given)
    if given is None:
        return {}
    if isinstance(given, str) or len(given) > len(LETTERS):
        raise ValueError(f"the record's choices are {given!r:.60}; expected a list of at most {len(LETTERS)} texts")
    texts = [str(text) for text in given]
    names = [str(label).strip("()[]. ").upper() for label in (labels if labels is not None else LETTERS[: len(texts)])]
    if len(names) != len(texts) or any(name not in LETTERS or len(name) != 1 for name in names):
        names = list(LETTERS[: len(texts)])  # ARC has choices that are labelled 1 to 4; letters are what is asked for
    # "(A) Rome" is Rome.
    return {name: re.sub(rf"^\(?{name}[).:]\s+", "", text) for name, text in zip(names, texts, strict=True)}


def _gold(record: Record, known: str, choices: Mapping[str, str]) -> str:
    raw, gold = raw_gold(record), gold_answer(record)
    for letter, meant in choices.items():
        if _same(gold, meant):
            return letter
    if (match := ALONE.fullmatch(gold) or LED.match(gold + " ")) and match[1].upper() in known:
        return match[1].upper()
    if choices and isinstance(raw, int) and 0 <= raw < len(choices):
        return list(choices)[raw]
    labels = record["choices"].get("label") if isinstance(record.get("choices"), Mapping) else None
    if labels is not None and gold in (names := [str(label) for label in labels]):
        return list(choices)[names.index(gold)]
    raise ValueError(
        f"the record's answer {gold!r:.60} is none of the choices {', '.join(known)} {dict(choices) or ''!s:.200}"
    )

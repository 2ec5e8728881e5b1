"""A reward for JSON: valid, bounded, and of the right value."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards.answers import found, in_tags
from jaxrl_llm.rewards.forms import Record, checked
from jaxrl_llm.rewards.gold import raw_gold

LONGEST = 50_000  # characters of JSON
DEEPEST = 50  # lists and objects within each other
MOST_DIGITS = 300  # of a whole number
FENCE = re.compile(r"^[ \t]{0,8}```[ \t]{0,8}(json)?[ \t]{0,8}$", re.MULTILINE | re.IGNORECASE)
# A string, closed or not, or a bracket: linear, whatever the text.
BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z|\\\Z)|([\[{])|([\]}])', re.DOTALL)
TOLERANCE = 1e-9  # between two numbers of which one is no whole number, relative


def _check(keys: Sequence[str] = (), values: Mapping[str, Any] | None = None, subset: bool = False) -> None:
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise UserError(f"keys is {keys!r:.60}; expected a tuple of texts such as ('name', 'age')")
    if values is not None and not isinstance(values, Mapping):
        raise UserError(f"values is {values!r:.60}; expected a dict such as {{'name': 'Ada'}}")


@checked(_check)
def json_match(
    prompt: str,
    response: str,
    record: Record,
    keys: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    subset: bool = False,
) -> dict[str, Any]:
    """1 if the response is JSON of the right value, else 0.

    Args:
      keys: an object with these keys, and perhaps others, is right.
      values: an object with these keys and values is right.
      subset: an object with all of the gold object's keys and values is right, whatever else it has.

    With neither keys nor values the value is the record's answer, as JSON text or as a dict, list or number. JSON is
    the whole response, what <answer> holds, or the last ```json fence of them. 1 is 1.0 but not true; the order of keys
    does not matter, that of lists does. Refused: keys given twice, NaN and Infinity, comments, more than 50,000
    characters or 50 levels.

    >>> json_match("", 'Here: \\n```json\\n{"b": [2], "a": 1.0}\\n```', {"answer": '{"a": 1, "b": [2]}'})["score"]
    1.0
    >>> json_match("", '{"name": "Ada", "age": 36}', {}, keys=("name",), values={"age": 36})["score"]
    1.0
    """
    wanted = None if keys or values else _gold(record)
    try:
        value = _loads(_json_text(response))
    except ValueError:
        return found(0.0, None)
    right = _equal(wanted, value, subset) if not (keys or values) else isinstance(value, dict)
    if keys:
        right = right and all(key in value for key in keys)
    if values:
        right = right and all(key in value and _equal(wanted, value[key], subset) for key, wanted in values.items())
    return found(right, json.dumps(value, sort_keys=True, ensure_ascii=False))


def _json_text(response: str) -> str:
    text = response.rpartition("</think>")[2]
    inside = in_tags(text)
    text = (text if inside is None else inside).strip()
    if not text.startswith(("{", "[", '"')):
        marks = list(FENCE.finditer(text[-LONGEST - 100 :]))
        text = text[-LONGEST - 100 :] if marks else text
        # The last closing mark, and the one that opens before it.
        if len(marks) >= 2 and not marks[-1][1]:
            return text[marks[-2].end() : marks[-1].start()].strip()
    return text


def _loads(text: str) -> Any:
    """Raises ValueError for whatever is no JSON, or too much."""
    if len(text) > LONGEST:
        raise ValueError(f"{len(text)} characters")
    depth = 0
    for match in BRACKETS.finditer(text):
        depth += bool(match[1]) - bool(match[2])
        if depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} levels")
    return json.loads(text, object_pairs_hook=_object, parse_constant=_refused, parse_int=_whole, parse_float=_decimal)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(made := dict(pairs)) < len(pairs):
        raise ValueError("a key is given twice")
    return made


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError("a number that is too long")
    return int(digits)


def _decimal(digits: str) -> float:
    if len(digits) > MOST_DIGITS or not math.isfinite(value := float(digits)):
        raise ValueError("a number that is too large")
    return value


def _equal(wanted: Any, value: Any, subset: bool) -> bool:
    if isinstance(wanted, bool) or isinstance(value, bool):
        return wanted is value
    if isinstance(wanted, int) and isinstance(value, int):
        return wanted == value
    if isinstance(wanted, int | float) and isinstance(value, int | float):
        try:
            return math.isclose(wanted, value, rel_tol=TOLERANCE)
        except OverflowError:  # an int beyond the largest float
            return False
    if isinstance(wanted, Mapping) and isinstance(value, dict):
        same = wanted.keys() <= value.keys() if subset else wanted.keys() == value.keys()
        return same and all(_equal(wanted[key], value[key], subset) for key in wanted)
    if isinstance(wanted, list | tuple) and isinstance(value, list):
        return len(wanted) == len(value) and all(map(_equal, wanted, value, [subset] * len(value)))
    return type(wanted) is type(value) and wanted == value


def _gold(record: Record) -> Any:
    gold = raw_gold(record)
    if not isinstance(gold, str):
        if gold is None:
            raise ValueError(
                "the record has no reward_model.ground_truth, ground_truth or answer to compare JSON with (found: "
                f"{list(record)})"
            )
        return gold
    try:
        return _loads(gold)
    except ValueError as error:
        raise ValueError(f"the record's answer {gold!r:.60} is no JSON: {error}") from error

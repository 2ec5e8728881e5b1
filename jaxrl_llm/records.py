"""What a record holds: fields by name, its prompt, and the prompt as people and rewards see it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.chat import Chat
from jaxrl_llm.errors import UserError, naming, nearest
from jaxrl_llm.sources import Record

# What a JAX reward reads of a record: a key that holds a number (or array of one shape), or a function of the record.
RecordArray = str | Callable[[Record], Any]


def field(record: Record, name: str) -> Any:
    """record["a"]["b"] for the name "a.b".

    Raises:
      UserError: it is not there; names what is, and the nearest.

    >>> field({"reward_model": {"ground_truth": "7"}}, "reward_model.ground_truth")
    '7'
    """
    if name in record:
        return record[name]
    value: Any = record
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            found = ", ".join(map(str, record)) or "nothing"
            near = nearest(name, map(str, record))
            hint = f"; {near}" if near.startswith("did you mean") else ""
            raise UserError(f"no field {name!r} in the record (found: {found}){hint}")
        value = value[key]
    return value


def format_prompt(template: str, record: Record) -> str:
    """The template with each {field} replaced; {{ and }} stand for braces, and braces around no name for themselves.

    Raises:
      UserError: a field that the record does not have, or that is neither text nor a number.

    >>> format_prompt(r"What is {a}+{b}? Put it in \\boxed{}.", {"a": 3, "b": 4})
    'What is 3+4? Put it in \\\\boxed{}.'
    """

    def value(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        with naming(f"data.prompt_template: {match[0]}"):
            found = field(record, match[1])
        if not isinstance(found, str | int | float):
            raise UserError(f"data.prompt_template: {match[0]} is a {type(found).__name__}, expected text or a number")
        return str(found)

    return re.sub(r"\{\{|\}\}|\{([A-Za-z_][\w.]*)\}", value, template)


def prompt_of(record: Record, prompt_key: str = "prompt", prompt_template: str = "") -> str | Chat:
    """A record's prompt, as text or as chat messages."""
    if prompt_template:
        return format_prompt(prompt_template, record)
    with naming("data.prompt_key"):
        prompt = field(record, prompt_key)
    if not isinstance(prompt, str | Sequence):
        raise UserError(
            f"data.prompt_key {prompt_key!r}: a prompt is a string or a list of messages, found {prompt!r:.40}"
        )
    return prompt


def prompt_text(prompt: str | Chat) -> str:
    """The prompt as rewards and logs see it: a string itself, of a chat the contents of its messages.

    >>> prompt_text([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3+4?"}])
    'Be brief.\\n\\nWhat is 3+4?'
    """
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(_said(message["content"]) for message in prompt if message.get("content"))


def _said(content: Any) -> str:
    """A message's text; of a list of parts that of those that have one."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part["text"]) for part in content if part.get("text"))


def record_array(name: str, record: Record, get: RecordArray) -> np.ndarray:
    """What a JAX reward reads of one record.

    Raises:
      UserError: the record does not have it, or it is no number.
    """
    try:
        found = np.asarray(field(record, get) if isinstance(get, str) else get(record))
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"record array {name!r}: {type(error).__name__}: {error}") from error
    if found.dtype.kind not in "biuf":
        raise UserError(f"record array {name!r}: expected a number, found {found.tolist()!r:.40}")
    return found


def stacked(name: str, values: Sequence[np.ndarray]) -> np.ndarray:
    """[N, …]: whole numbers as int32, others as float32, truth values as bool.

    Raises:
      UserError: the values have several shapes, or do not fit.
    """
    shapes = {v.shape for v in values}
    if len(shapes) > 1:
        raise UserError(f"record array {name!r}: the records hold arrays of several shapes: {sorted(shapes)}")
    found = np.stack(values) if values else np.zeros(0, np.float32)
    dtype = {"b": np.bool_, "f": np.float32}.get(found.dtype.kind, np.int32)
    if dtype == np.int32 and found.size and np.abs(found).max() > np.iinfo(np.int32).max:
        raise UserError(f"record array {name!r}: {np.abs(found).max()} does not fit into 32 bits")
    return found.astype(dtype)

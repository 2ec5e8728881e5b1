"""Frozen records from plain dicts and from text, checked against their annotations. Knows no key by name."""

from __future__ import annotations

import ast
import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from jaxrl_llm.errors import nearest

UNIONS = (types.UnionType, typing.Union)  # `int | str`, and what `Annotated[…] | None` is


@dataclasses.dataclass(frozen=True)
class Range:
    """An annotation: what a value of the right type must fulfil."""

    text: str
    holds: Callable[[Any], bool]


def hint_of(cls: Any, key: str) -> Any:
    """The annotated type of a dotted key of `cls`; Any inside a dict, str where there is no such key."""
    known = knobs(cls)
    if key in known:
        return known[key]
    parents = (key.rsplit(".", i)[0] for i in range(1, key.count(".") + 1))
    return Any if any(typing.get_origin(known.get(parent)) is dict for parent in parents) else str


def knobs(cls: Any, prefix: str = "") -> dict[str, Any]:
    """{"rollout.n": annotated type, …}: every dotted key of the record type `cls`."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        found |= knobs(hint, f"{prefix}{name}.") if dataclasses.is_dataclass(hint) else {prefix + name: hint}
    return found


def flatten(record: Any, prefix: str = "") -> dict[str, Any]:
    """{"rollout.n": 8, …}: every value of a record by its dotted key."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value, key = getattr(record, field.name), prefix + field.name
        found |= flatten(value, f"{key}.") if dataclasses.is_dataclass(value) else {key: value}
    return found


def build(cls: Any, plain: Any, problems: dict[str, str], prefix: str = "") -> Any:
    """A `cls` from nested dicts. What is wrong goes to `problems`, by key, and a stand-in of its type comes in."""
    if not isinstance(plain, Mapping):
        problems[prefix.rstrip(".")] = f"expected a section with keys, found {plain!r}"
        return build(cls, {}, {}, prefix)  # that its keys are missing goes without saying
    values = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        key = prefix + name
        if dataclasses.is_dataclass(hint):
            values[name] = build(hint, plain.get(name, {}), problems, f"{key}.")
        elif name not in plain:
            problems[key] = "is missing; start from configs.base.get_config()"
            values[name] = _stand_in(hint)
        else:
            try:
                values[name] = convert(plain[name], hint)
            except ValueError as error:
                problems[key] = str(error)
                values[name] = _stand_in(hint)
    return cls(**values)


def unknown_keys(cls: Any, plain: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted keys in `plain` that `cls` does not have."""
    hints, found = typing.get_type_hints(cls), []
    for name, value in plain.items():
        if name not in hints:
            found.append(f"{prefix}{name}")
        elif dataclasses.is_dataclass(hints[name]) and isinstance(value, Mapping):
            found += unknown_keys(hints[name], value, f"{prefix}{name}.")
    return found


def suggest(cls: Any, key: str) -> str:
    """A clause with the key that was probably meant: the same name in another section, else the nearest spelling."""
    known = list(knobs(cls))
    section, _, name = key.rpartition(".")
    if same := [repr(k) for k in known if k.rpartition(".")[2] == name]:
        return f"did you mean {' or '.join(same)}?"
    sections = [field.name for field in dataclasses.fields(cls)]
    if (close := nearest(key, [*known, *sections])).startswith("did you mean"):
        return close
    return nearest(key, [k for k in known if k.rpartition(".")[0] == section] if section else sections)


def convert(value: Any, hint: Any) -> Any:
    """`value` as the annotated type `hint`; an int may stand for a float, a string for a tuple of one, a list for any.

    >>> convert(1, float), convert("a", tuple[str, ...]), convert(["a", "b"], tuple[str, ...])
    (1.0, ('a',), ('a', 'b'))

    Raises:
      ValueError: the value is not of that type, or outside its range.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        converted = convert(value, arguments[0])
        for limit in arguments[1:]:
            if not limit.holds(converted):
                raise ValueError(f"must be {limit.text}, found {value!r}")
        return converted
    if origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
        raise ValueError(f"must be one of {', '.join(arguments)}; found {value!r}")
    if origin in UNIONS:
        choices = [choice for choice in arguments if choice is not types.NoneType]
        if len(choices) < len(arguments):
            if value is None:
                return None
            if len(choices) == 1:
                try:
                    return convert(value, choices[0])
                except ValueError as error:
                    raise ValueError(f"{error}; or None") from error
        for choice in choices:
            try:
                return convert(value, choice)
            except ValueError:
                continue
    elif origin is tuple:
        if isinstance(value, str) and (arguments[0] is str or typing.get_origin(arguments[0]) is Literal):
            return (convert(value, arguments[0]),)
        if isinstance(value, tuple | list):
            return tuple(convert(item, arguments[0]) for item in value)
    elif origin is dict:
        if isinstance(value, Mapping):
            return {str(k): _json_value(v) for k, v in value.items()}
    elif hint is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise ValueError(f"must be finite, found {value!r}")
        return float(value)
    elif type(value) is hint:  # not isinstance: True is no int
        return value
    raise ValueError(f"must be {_describe(hint)}; found {value!r} ({type(value).__name__})")


def parse(text: str, hint: Any) -> Any:
    """`text` from a command line as a value for `convert`; what cannot be read stays text, which `convert` refuses.

    >>> parse("3", int), parse("1e-3", float), parse("3", str), parse("('a', 'b')", tuple[str, ...])
    (3, 0.001, '3', ('a', 'b'))
    >>> parse("None", float | None), parse("0.5", float | None), parse("False", Any), parse("some text", Any)
    (None, 0.5, False, 'some text')
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return parse(text, arguments[0])
    if origin in UNIONS and types.NoneType in arguments:
        (inner,) = (choice for choice in arguments if choice is not types.NoneType)
        return None if text == "None" else parse(text, inner)
    if hint is str or origin is Literal or (origin in UNIONS and "_" in text):
        return text  # "0.5_2", a pair of bounds, would read as the number 0.52
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if origin is tuple and arguments[0] is str and not text.startswith(("(", "[")):
        return (text,) if text else ()
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    if hint is Any:
        return value
    return text if isinstance(value, bool) else value  # a ConfigDict would make 1.0 of True where a float stands


def _json_value(value: Any) -> Any:
    """`value` with lists as tuples. Raises ValueError unless it can stand in a JSON file and come back the same."""
    if isinstance(value, Mapping):
        return {str(k): _json_value(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_json_value(v) for v in value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ValueError(f"may hold numbers, strings, bools, None, tuples and dicts; found {value!r}")


def _describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return f"{_describe(arguments[0])} {arguments[1].text}"
    if origin in UNIONS:
        return " or ".join(map(_describe, arguments))
    if origin is tuple:
        example = {"str": '("a", "b")', "int": "(1, 2)"}.get(getattr(arguments[0], "__name__", ""), "(0.5, 0.5)")
        return f"a tuple such as {example}"
    if origin is dict:
        return 'a dict such as {"key": 1}'
    return {int: "a whole number", float: "a number", bool: "True or False", str: "a string"}[hint]


def _stand_in(hint: Any) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS and types.NoneType in arguments:
        return None
    if origin is Annotated or origin in UNIONS:
        return _stand_in(arguments[0])
    if origin is Literal:
        return arguments[0]
    return {tuple: (), dict: {}, int: 1, float: 1.0, bool: False, str: ""}[origin or hint]

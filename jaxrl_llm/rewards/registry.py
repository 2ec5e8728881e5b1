"""Reward functions by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from jaxrl_llm import dotted
from jaxrl_llm.errors import UserError, naming, nearest
from jaxrl_llm.rewards import choice, code, countdown, json_match, length, math_answers, numbers, text

BUILT_IN: dict[str, Callable[..., Any]] = {
    "number": numbers.number,
    "last_integer": numbers.last_integer,
    "gsm8k": numbers.gsm8k,
    "boxed": text.boxed,
    "math": math_answers.math,
    "choice": choice.choice,
    "exact": text.exact,
    "regex": text.regex,
    "json_match": json_match.json_match,
    "countdown": countdown.countdown,
    "code": code.code,
    "format": text.format_reward,
    "length": length.length,
}


def own_deadline(function: Callable[..., Any]) -> float:
    """Seconds after which a built-in reward gives up a response by itself, and scores it; 0 of one that has no such
    bound.

    >>> own_deadline(functools.partial(code.code, seconds=3)), own_deadline(numbers.number)
    (3.0, 0.0)
    """
    given = function.keywords if isinstance(function, functools.partial) else {}
    if getattr(function, "func", function) is not code.code:
        return 0.0
    return float(given.get("seconds", inspect.signature(code.code).parameters["seconds"].default))


def resolve(name: str) -> Callable[..., Any]:
    """The function that a name stands for: a built-in one, `module:function`, `module.function` or `file.py:function`.

    Arguments may follow, as in `format(pattern='…')`.

    Raises:
      UserError: there is none of that name (naming the nearest), it does not take the arguments or lacks one, or what
        it needs is not there.

    >>> resolve("number")("What is 3+4?", "It is 7.", {"answer": "7"})
    {'score': 1.0, 'pred': '7'}
    """
    path, arguments = dotted.split_call(name)
    if path in BUILT_IN:
        function = BUILT_IN[path]
    elif ":" in path or "." in path:
        function = dotted.load(path)
    else:
        raise UserError(f"no built-in reward {path!r}; {nearest(path, BUILT_IN)}; or module:function")
    if arguments:
        known = inspect.signature(function).parameters
        for argument in arguments:
            if argument not in known:
                raise UserError(f"reward {path!r} has no argument {argument!r}; {nearest(argument, known)}")
    if check := getattr(function, "check_arguments", None):
        with naming(f"reward {path!r}"):
            check(**arguments)
    if not arguments:
        return function
    bound = functools.partial(function, **arguments)
    if marked := getattr(function, "reward_form", None):
        bound.reward_form = marked  # type: ignore[attr-defined]
        bound.record_arrays = getattr(function, "record_arrays", {})  # type: ignore[attr-defined]
    return bound

"""The forms in which a reward function may be written, and how each is called.

- own: `f(prompt, response, record) -> float | {"score": float, **extras} | None`; None means that it failed
- batched: the same over lists, `f(prompts, responses, records) -> list`, marked by `@batched`; an exception in the list
  says why its row has failed
- verl's: `f(data_source, solution_str, ground_truth, extra_info)`, known by its parameters' names, and its batched form
- JAX: `f(responses, mask, record_arrays) -> [B] or [B, R]`, marked by `@jax_reward`; the steps call it
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from jaxrl_llm.errors import UserError

F = TypeVar("F", bound=Callable[..., Any])
Record = Mapping[str, Any]
Form = Literal["own", "batched", "verl", "verl_batched", "jax"]

VERL = ("data_source", "solution_str", "ground_truth")
VERL_BATCHED = ("data_sources", "solution_strs", "ground_truths")
LARGEST_SCORE = 3.4e38  # of a float32
LONGEST_TRACEBACK = 4_000  # characters; a deep recursion's would fill the log
LARGEST_EXTRAS = 100_000  # characters as JSON, of a row
DEEPEST_EXTRAS = 50  # lists and dicts within each other


def batched(function: F) -> F:
    """Marks a reward that scores all rows at once: `f(prompts, responses, records) -> list`, one entry a row."""
    function.reward_form = "batched"  # type: ignore[attr-defined]
    return function


def jax_reward(**record_arrays: Any) -> Callable[[F], F]:
    """Marks a reward over arrays: `f(responses [B, R], mask [B, R], record_arrays) -> [B] or [B, R]`.

    Args:
      record_arrays: name -> what of each record stands under it in `record_arrays`: a key that holds a number (or an
        array of one shape), or a function of the record.

    >>> @jax_reward(answer=lambda record: int(record["answer"]))
    ... def first_token_is_the_answer(responses, mask, record_arrays):
    ...     return responses[:, 0] == record_arrays["answer"]
    """

    def mark(function: F) -> F:
        function.reward_form = "jax"  # type: ignore[attr-defined]
        function.record_arrays = record_arrays  # type: ignore[attr-defined]
        return function

    return mark


def checked(check: Callable[..., Any]) -> Callable[[F], F]:
    """Marks a reward whose arguments are looked at when it is named, before a run starts.

    Args:
      check: called with the arguments that stand in `name(key=value)`; raises UserError.
    """

    def mark(function: F) -> F:
        function.check_arguments = check  # type: ignore[attr-defined]
        return function

    return mark


def form_of(function: Callable[..., Any], name: str) -> Form:
    """Which form a function has.

    Raises:
      UserError: it is not callable, asynchronous, or takes other parameters than any of the forms.
    """
    if not callable(function):
        raise UserError(f"reward {name!r} is a {type(function).__name__}, expected a function")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"reward {name!r} is an async function, which is not possible here")
    if marked := getattr(function, "reward_form", None):
        return marked
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none
        return "own"
    if all(parameter in signature.parameters for parameter in VERL):
        return "verl"
    if all(parameter in signature.parameters for parameter in VERL_BATCHED):
        return "verl_batched"
    try:
        signature.bind("prompt", "response", {})
    except TypeError as error:
        raise UserError(
            f"reward {name!r} takes {signature}; expected (prompt, response, record), or verl's (data_source, "
            "solution_str, ground_truth, extra_info)"
        ) from error
    return "own"


@dataclasses.dataclass(frozen=True)
class Result:
    """What one function says of one row. A failed row has a reason and no score. Extras are plain data."""

    score: float = math.nan
    extras: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    failure: str | None = None


def call(
    function: Callable[..., Any],
    form: Form,
    name: str,
    prompts: Sequence[str],
    responses: Sequence[str],
    records: Sequence[Record],
) -> list[Result]:
    """One `Result` a row. A row whose call raises has failed; so have all rows if a batched function raises.

    Raises:
      UserError: the function returned something that is no score, or a wrong number of them.
    """
    if form in ("batched", "verl_batched"):
        return _call_batched(function, form, name, prompts, responses, records)
    results = []
    for prompt, response, record in zip(prompts, responses, records, strict=True):
        try:
            if form == "verl":
                returned = function(**_verl_arguments(function, VERL, [_verl_row(response, record)], single=True))
            else:
                returned = function(prompt, response, record)
        except (Exception, SystemExit):
            results.append(_failed(name))
        else:
            results.append(_result(returned, name))
    return results


def _call_batched(
    function: Callable[..., Any],
    form: Form,
    name: str,
    prompts: Sequence[str],
    responses: Sequence[str],
    records: Sequence[Record],
) -> list[Result]:
    try:
        if form == "verl_batched":
            rows = [_verl_row(response, record) for response, record in zip(responses, records, strict=True)]
            returned = function(**_verl_arguments(function, VERL_BATCHED, rows, single=False))
        else:
            returned = function(list(prompts), list(responses), list(records))
    except (Exception, SystemExit):
        return [_failed(name)] * len(responses)
    if not hasattr(returned, "__len__") or isinstance(returned, str | Mapping):
        raise UserError(
            f"reward {name!r} returned a {type(returned).__name__}; expected a list of {len(responses)} scores"
        )
    if len(returned) != len(responses):
        raise UserError(f"reward {name!r} returned {len(returned)} scores for {len(responses)} rows")
    return [_result(item, name) for item in returned]


def _verl_row(response: str, record: Record) -> tuple[Any, ...]:
    model = record.get("reward_model") or {}
    truth = model["ground_truth"] if "ground_truth" in model else record.get("ground_truth", record.get("answer"))
    return record.get("data_source"), response, truth, record.get("extra_info")


def _verl_arguments(function: Callable[..., Any], names: Sequence[str], rows: list[tuple], *, single: bool) -> dict:
    columns = rows[0] if single else [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    extra = "extra_info" if single else "extra_infos"
    arguments = dict(zip((*names, extra), columns, strict=True))
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return arguments if takes_any or extra in parameters else {name: arguments[name] for name in names}


def _failed(name: str) -> Result:
    return Result(failure=f"reward {name!r}: {traceback.format_exc()[-LONGEST_TRACEBACK:]}")


def _result(returned: Any, name: str) -> Result:
    if isinstance(returned, Exception):  # of a batched function, which cannot raise for one row alone
        return Result(failure=f"reward {name!r}: {str(returned)[-LONGEST_TRACEBACK:]}")
    score, extras = returned, {}
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise UserError(f"reward {name!r} returned a dict without 'score' (found: {', '.join(map(str, returned))})")
        score, extras = returned["score"], {key: value for key, value in returned.items() if key != "score"}
    try:
        extras = _plain(extras)
    except (TypeError, ValueError, RecursionError, MemoryError) as error:
        return Result(failure=f"reward {name!r} returned extras that cannot be kept: {str(error)[:LONGEST_TRACEBACK]}")
    if score is None:
        return Result(extras=extras, failure=f"reward {name!r} returned None")
    # numpy's and jax's scalars are no numbers.Real, but turn into one.
    if hasattr(score, "item") and getattr(score, "shape", None) == ():
        score = score.item()
    if not isinstance(score, numbers.Real):
        raise UserError(
            f"reward {name!r} returned {score!r:.60} ({type(score).__name__}); expected a number, a dict with 'score', "
            "or None"
        )
    try:
        value = float(score)
    except OverflowError:
        value = math.inf
    if not abs(value) <= LARGEST_SCORE:
        return Result(extras=extras, failure=f"reward {name!r} returned {value}")
    return Result(value, extras)


def _plain(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Extras as plain data, the same whether they come from this process or from a worker: numbers, text, None, and
    lists and dicts of such; numpy's scalars and arrays become numbers and lists.

    Raises:
      TypeError, ValueError, RecursionError: they are something else, or too large.
    """
    if not extras:
        return {}
    text = json.dumps(extras, default=_of_arrays)
    if len(text) > LARGEST_EXTRAS:
        raise ValueError(f"{len(text)} characters as JSON, more than {LARGEST_EXTRAS}")
    found = json.loads(text)
    _check_depth(found)
    return found


def _check_depth(extras: Mapping[str, Any]) -> None:
    """
    Raises:
      ValueError: a value is nested so deeply that what writes or shows it might not come to its end.
    """
    level, depth = list(extras.values()), 0
    while level := [item for item in level if isinstance(item, list | dict)]:
        depth += 1
        if depth > DEEPEST_EXTRAS:
            raise ValueError(f"lists and dicts nested more than {DEEPEST_EXTRAS} deep")
        level = [part for item in level for part in (item.values() if isinstance(item, dict) else item)]


def _of_arrays(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no plain data (numbers, text, None, lists and dicts)")

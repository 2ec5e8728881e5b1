"""Environments: who answers the policy between its turns. Text in, text out, on the host; nothing here imports jax.

An environment is a function `(messages, record) -> observation | None` of the conversation so far: the prompt's
messages, the policy's turns ({"role": "assistant"}, without the stop string that ended them) and what it has been
answered. It returns what the policy is told next, a message ({"role": "tool", "content": …}) or a text (a message of
the user), or None where the conversation is over. It keeps nothing between calls: all that it knows stands in the
conversation, so that a resumed run is the same run. It runs where rewards run (docs/rewards.md): in a worker process,
for at most `reward.timeout` seconds a turn.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from jaxrl_llm import dotted
from jaxrl_llm.errors import UserError, nearest
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rewards.arithmetic import BadExpression, evaluate

Message = Mapping[str, Any]
Environment = Callable[[Sequence[Message], Mapping[str, Any]], Message | str | None]


def calculator(
    messages: Sequence[Message], record: Mapping[str, Any], opening: str = "<calc>", closing: str = "</calc>"
) -> str | None:
    """Answers `<calc>12*(3+4)` with its value, "84"; ends the conversation at a turn that asks for none.

    Only what follows the last opening in a turn counts, and only if it was not closed and gone on from; `closing` is
    meant to be the stop string (`rollout.stop`), which a turn's text does not have. What cannot be worked out is
    answered by "error".

    >>> calculator([{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "I ask <calc>2+3"}], {})
    '5'
    >>> calculator([{"role": "assistant", "content": "It is 5."}], {}) is None
    True
    """
    _, asked, expression = str(messages[-1]["content"]).rpartition(opening)
    expression, _, more = expression.partition(closing)
    if not asked or more.strip():
        return None
    try:
        value = evaluate(expression)
    except BadExpression:
        return "error"
    if value.denominator == 1:
        return str(value.numerator)
    decimal = f"{float(value):.12g}" if abs(value) < 1e15 else str(value)
    return decimal if Fraction(decimal) == value else str(value)  # 5/2 is 2.5, 1/3 stays 1/3


BUILT_IN: dict[str, Callable[..., Any]] = {"calculator": calculator}


def resolve(name: str) -> Environment:
    """The environment that a name stands for: a built-in one, `module:function` or `file.py:function`; arguments may
    follow, as in `calculator(opening='(', closing=')')`.

    Raises:
      UserError: there is none of that name (naming the nearest), or it does not take the arguments.
    """
    path, arguments = dotted.split_call(name)
    function: Any
    if path in BUILT_IN:
        function = BUILT_IN[path]
    elif ":" in path or "." in path:
        function = dotted.load(path)
    else:
        raise UserError(f"no built-in environment {path!r}; {nearest(path, BUILT_IN)}; or module:function")
    if not callable(function):
        raise UserError(f"environment {path!r} is a {type(function).__name__}, expected a function")
    try:
        inspect.signature(function).bind([], {}, **arguments)
    except TypeError as error:
        expected = "(messages, record) and keyword arguments"
        raise UserError(f"environment {name!r} takes {inspect.signature(function)}; expected {expected}") from error
    except ValueError:  # some builtins have no signature
        pass
    bound: Any = functools.partial(function, **arguments) if arguments else function
    return bound


@dataclasses.dataclass(frozen=True)
class Asker:
    """An environment in the form of a reward function, so that it can be asked where those run: in worker processes
    with a deadline. The record holds `messages` and the `record`; the observation stands beside a score of 0."""

    name: str  # what `resolve` takes
    longest: int  # characters of an observation that are kept

    @property
    def reward(self) -> Reward:
        return Reward(f"environment {self.name}", self, "own", 0.0, ())

    def __call__(self, prompt: str, response: str, record: Mapping[str, Any]) -> dict[str, Any]:
        del prompt, response
        # Its own, whatever it does to them: other rows of a prompt have the same record.
        messages, given = copy.deepcopy((record["messages"], record["record"]))
        observation: Any = _resolved(self.name)(messages, given)
        if isinstance(observation, str):
            observation = observation[: self.longest]
        elif isinstance(observation, Mapping) and isinstance(observation.get("content"), str):
            observation = {**observation, "content": observation["content"][: self.longest]}
        return {"score": 0.0, "observation": observation}


_resolved = functools.lru_cache(maxsize=8)(resolve)


def as_message(observation: Any, name: str = "the environment") -> Message | None:
    """What an environment returned, as a message; None where the conversation is over. Halves of characters (lone
    surrogates, of a JSON escape that a tool has read, say), which no tokenizer takes, become U+FFFD.

    Raises:
      UserError: it is neither a text, nor a message with a role and a text, nor None.

    >>> as_message("7")
    {'role': 'user', 'content': '7'}
    """
    if observation is None:
        return None
    if isinstance(observation, str):
        return {"role": "user", "content": _whole(observation)}
    if isinstance(observation, Mapping) and isinstance(observation.get("content"), str) and observation.get("role"):
        return _whole(dict(observation))
    raise UserError(
        f"{name} returned {observation!r:.80} ({type(observation).__name__}); expected a text, a message with 'role' "
        "and 'content', or None"
    )


def _whole(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case Mapping():
            return {_whole(key): _whole(item) for key, item in value.items()}
        case list() | tuple():
            return [_whole(item) for item in value]
        case _:
            return value

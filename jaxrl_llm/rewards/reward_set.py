"""Several reward functions with weights, each applied to the rows that are its own."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards.forms import Form, Record, Result, call, form_of
from jaxrl_llm.rewards.registry import resolve

if TYPE_CHECKING:
    from jaxrl_llm.rewards.pool import RewardPool

REWARD_MODEL = "reward_model"  # the name of a reward model's column


@dataclasses.dataclass(frozen=True)
class Scores:
    """What the reward functions say of B rows."""

    scores: np.ndarray  # float32 [B, K], not weighted; NaN where a function does not apply, 0 where it has failed
    valid: np.ndarray  # bool [B], False where a function failed or none applies
    extras: list[dict[str, Any]]  # B, {"function/key": value}
    failures: list[str]  # why, the first failure first: a traceback, or what was wrong with the value

    @property
    def num_failed(self) -> int:
        return int((~self.valid).sum())

    @classmethod
    def join(cls, parts: Sequence[Scores]) -> Scores:
        """The scores of several batches, one behind the other."""
        return cls(
            np.concatenate([part.scores for part in parts]),
            np.concatenate([part.valid for part in parts]),
            [extras for part in parts for extras in part.extras],
            [failure for part in parts for failure in part.failures],
        )

    def rows(self, places: Sequence[int]) -> Scores:
        """Those of some rows; the failures stay, whichever rows they are of."""
        return Scores(
            self.scores[list(places)], self.valid[list(places)], [self.extras[p] for p in places], self.failures
        )


@dataclasses.dataclass(frozen=True)
class Reward:
    """One column of the scores."""

    name: str
    function: Callable[..., Any]
    form: Form
    weight: float
    data_sources: tuple[str, ...]  # empty: all
    source: str = ""  # what `resolve` made the function of; "": it was given as it is

    def applies_to(self, record: Record) -> bool:
        """Rows without a data_source are scored by every function."""
        source = record.get("data_source")
        return not self.data_sources or source is None or source in self.data_sources


@dataclasses.dataclass(frozen=True)
class RewardSet:
    """K reward functions. `score` calls those over text; `jax_functions` are the steps' to call.

    Functions run in this process, or where `pooled` has put them, until `close`.
    """

    rewards: tuple[Reward, ...]
    pool: RewardPool | None = dataclasses.field(default=None, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(reward.name for reward in self.rewards)

    @property
    def weights(self) -> np.ndarray:
        """float32 [K]"""
        return np.array([reward.weight for reward in self.rewards], np.float32)

    @property
    def jax_functions(self) -> dict[int, Callable[..., Any]]:
        """column -> function over arrays"""
        return {k: reward.function for k, reward in enumerate(self.rewards) if reward.form == "jax"}

    def with_model(self, score: Callable[..., Any], weight: float) -> RewardSet:
        """These rewards and a reward model's as the last column, named REWARD_MODEL.

        Args:
          score: (prompts, responses, records) -> one entry a row, a batched reward.

        Raises:
          UserError: a function has that name.
        """
        if REWARD_MODEL in self.names:
            raise UserError(f"reward.functions: {REWARD_MODEL!r} is the reward model's name; rename the function")
        column = Reward(REWARD_MODEL, score, "batched", float(weight), ())
        return dataclasses.replace(self, rewards=(*self.rewards, column))

    @property
    def record_arrays(self) -> dict[str, Any]:
        """What JAX rewards read of the records, see `jax_reward`.

        Raises:
          UserError: two functions mean different things by one name.
        """
        arrays: dict[str, Any] = {}
        for column, function in self.jax_functions.items():
            for name, get in getattr(function, "record_arrays", {}).items():
                if arrays.setdefault(name, get) is not get and arrays[name] != get:
                    raise UserError(
                        f"reward {self.names[column]!r}: another reward reads record array {name!r} otherwise"
                    )
        return arrays

    def check(self, records: Iterable[Record]) -> None:
        """Looks for records that no function scores; to be called before the first step.

        Raises:
          UserError: naming the first data_source that no function takes.
        """
        known = sorted({source for reward in self.rewards for source in reward.data_sources})
        for record in records:
            if not any(reward.applies_to(record) for reward in self.rewards):
                source = record.get("data_source")
                raise UserError(f"reward.data_sources: no function scores {source!r} (known: {', '.join(known)})")

    def try_out(self, prompt: str, record: Record) -> None:
        """Calls every function of text once with an empty response: one that returns no score is found out before
        anything is compiled. That it fails on nothing proves nothing, and is passed over. A reward model is left out.

        Raises:
          UserError: a function returned something that is no score, or a wrong number of them; or a worker of the pool
            cannot load it.
        """
        functions = tuple(reward for reward in self.rewards if reward.name != REWARD_MODEL)
        dataclasses.replace(self, rewards=functions).score([prompt], [""], [record])

    def score(self, prompts: Sequence[str], responses: Sequence[str], records: Sequence[Record]) -> Scores:
        """Scores B rows; a row that fails does so alone.

        The columns of JAX functions are left to the steps: 0 on the rows that such a function applies to.

        Raises:
          UserError: a function returned something that is no score, or a wrong number of them.
        """
        return self.start(prompts, responses, records).result()

    def start(self, prompts: Sequence[str], responses: Sequence[str], records: Sequence[Record]) -> Pending:
        """As `score`, but without waiting: what the pool's workers do is under way when this returns, however many
        batches are. What runs in this process, a reward model among it, runs when the result is asked for."""
        return Pending(self, prompts, responses, records)

    def close(self) -> None:
        """Ends the pool's workers, if there is one, and all that they have started."""
        if self.pool is not None:
            self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Pending:
    """Rows whose scoring has begun, see `RewardSet.start`."""

    def __init__(
        self, rewards: RewardSet, prompts: Sequence[str], responses: Sequence[str], records: Sequence[Record]
    ) -> None:
        self._rewards, self._records, self._scores = rewards, records, None
        self._columns: list[tuple[int, list[int], Callable[[], list[Result]]]] = []  # column, its rows, what they get
        for column, reward in enumerate(rewards.rewards):
            own = [row for row in range(len(responses)) if reward.applies_to(records[row])]
            if reward.form == "jax" or not own:
                continue
            given = ([prompts[row] for row in own], [responses[row] for row in own], [records[row] for row in own])
            if rewards.pool is not None and reward.name in rewards.pool.names:
                self._columns.append((column, own, rewards.pool.start(reward.name, *given)))
            else:
                self._columns.append((column, own, functools.partial(_call_here, reward, *given)))

    def result(self) -> Scores:
        """Waits for the scores, the same at each call.

        Raises:
          UserError: see `RewardSet.score`.
        """
        if self._scores is None:
            self._scores = self._collect()
        return self._scores

    def _collect(self) -> Scores:
        rewards, records = self._rewards.rewards, self._records
        rows = len(records)
        scores = np.full((rows, len(rewards)), np.nan, np.float32)
        applied, failed = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
        extras: list[dict[str, Any]] = [{} for _ in range(rows)]
        failures: list[str] = []
        for column, reward in enumerate(rewards):
            own = [row for row in range(rows) if reward.applies_to(records[row])]
            applied[own] = True
            scores[own, column] = 0
        for column, own, get in self._columns:
            name = rewards[column].name
            for row, result in zip(own, get(), strict=True):
                extras[row] |= {f"{name}/{key}": value for key, value in result.extras.items()}
                if result.failure is None:
                    scores[row, column] = result.score
                else:
                    failed[row] = True
                    failures.append(f"row {row}, {result.failure}")
        for row in np.flatnonzero(~applied).tolist():
            failures.append(f"row {row}: no reward function takes data_source {records[row].get('data_source')!r}")
        return Scores(scores, applied & ~failed, extras, failures)


def _call_here(
    reward: Reward, prompts: Sequence[str], responses: Sequence[str], records: Sequence[Record]
) -> list[Result]:
    """`call`, on records that are the function's own, as in a worker: what it does to one is not seen by other rows."""
    if reward.name != REWARD_MODEL:
        batched = reward.form.endswith("batched")
        records = copy.deepcopy(records) if batched else [copy.deepcopy(record) for record in records]
    return call(reward.function, reward.form, reward.name, prompts, responses, records)


def make_rewards(
    functions: Sequence[str | Callable[..., Any]], weights: Sequence[float] = (), data_sources: Sequence[str] = ()
) -> RewardSet:
    """The reward functions of a run.

    Args:
      functions: what `resolve` takes, or functions themselves.
      weights: factor of each in the total score; none: 1 each.
      data_sources: for each the records' data_source that it scores, several separated by commas, "" for all.

    Raises:
      UserError: an unknown name, a function of no known form, or lists of different lengths.

    >>> rewards = make_rewards(["number", "exact"], weights=[1.0, 0.5])
    >>> rewards.score(["What is 3+4?"], ["It is 7."], [{"answer": "7"}]).scores.tolist()
    [[1.0, 0.0]]
    """
    if not functions:
        raise UserError("reward.functions: at least one reward must be given")
    for key, values in (("weights", weights), ("data_sources", data_sources)):
        if values and len(values) != len(functions):
            raise UserError(f"reward.{key}: {len(values)} values for {len(functions)} functions")
    rewards: list[Reward] = []
    for i, given in enumerate(functions):
        function = resolve(given) if isinstance(given, str) else given
        name = given.partition("(")[0] if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
        name = name.replace(":", ".").rpartition(".")[2]
        same = sum(reward.name.partition("#")[0] == name for reward in rewards)
        sources = [source.strip() for source in (data_sources[i] if data_sources else "").split(",")]
        rewards.append(
            Reward(
                name=f"{name}#{same + 1}" if same else name,
                function=function,
                form=form_of(function, str(given) if isinstance(given, str) else name),
                weight=float(weights[i]) if weights else 1.0,
                data_sources=tuple(source for source in sources if source),
                source=given if isinstance(given, str) else "",
            )
        )
    return RewardSet(tuple(rewards))

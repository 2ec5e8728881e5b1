"""From prompts to a scored batch: the phases data, gen (gen_max) and reward, again where groups without spread are
replaced (DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476). Host rewards of one part of the prompts are worked
out while the next part is being sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.compiled import Compiled, CompiledStep
from jaxrl_llm.config import Config
from jaxrl_llm.curriculum import Curriculum
from jaxrl_llm.data import PromptBatch, PromptData
from jaxrl_llm.errors import UserError, nearest
from jaxrl_llm.lengths import Lengths
from jaxrl_llm.loading import Inputs
from jaxrl_llm.metrics import finite_number
from jaxrl_llm.peers import Peers
from jaxrl_llm.rewards import RewardSet, Scores, pooled
from jaxrl_llm.samplers import Sampled, Sampler, environment_of
from jaxrl_llm.sharding import Layout, fetch
from jaxrl_llm.timers import Timers
from jaxrl_llm.types import Batch, Params, check_batch

Metrics = dict[str, float]
ROUNDING = 1e-6  # by which a sum of weighted float32 may miss the number that it is


@dataclasses.dataclass(frozen=True)
class Collected:
    """A scored batch, and what belongs to its rows on the host."""

    batch: Batch  # with the evidence of `reward`
    given: PromptBatch
    sampled: Sampled
    scored: Scores
    lengths: Lengths
    generated: tuple[Lengths, ...] = ()  # of each batch that was sampled, this one's prompts and those left out
    metrics: Metrics = dataclasses.field(default_factory=dict)
    curriculum: Curriculum | None = None  # as it is after this step


@dataclasses.dataclass(frozen=True)
class Underway:
    """Prompts whose responses are sampled and are being scored."""

    given: PromptBatch
    sampled: Sampled
    pending: Sequence[Callable[[], Scores]]  # of each part, called, waits for its scores
    greedy: Sampled | None = None  # a response to each prompt, where the estimator wants them
    greedy_pending: Sequence[Callable[[], Scores]] = ()


class Collector:
    """Samples and scores the prompts of a step."""

    def __init__(
        self,
        config: Config,
        data: PromptData,
        rewards: RewardSet,
        phases: CompiledStep,
        *,
        sampler: Sampler,
        greedy_sampler: Sampler | None,
        layout: Layout,
        vocab_size: int,
        timers: Timers,
    ) -> None:
        self._config, self._data, self._rewards, self._phases = config, data, rewards, phases
        self._sampler, self._greedy_sampler = sampler, greedy_sampler
        self._layout, self._vocab_size, self._timers = layout, vocab_size, timers
        self._found: set[str] = set()  # metrics beside a score that a response has had

    def __call__(self, view: Params, step: int, cursor: int, curriculum: Curriculum | None) -> Collected:
        """The batch of a step.

        Raises:
          UserError: a reward returned something that is no score; or none has the metric that groups are chosen by.
        """
        settings = self._config.algorithm.filter_groups
        count = self._config.data.train_batch_size
        kept, good, sampled, failed, batches = None, 0, 0, 0, 0
        learned, generated = curriculum, []
        while good < count and batches < settings.max_num_gen_batches:
            batches += 1
            underway = self.begin(view, step, cursor, learned)
            cursor = underway.given.cursor
            new = self.finish(underway)
            learned = self.learn(learned, new)
            generated.append(new.lengths)
            sampled, failed = sampled + len(new.scored.valid), failed + new.scored.num_failed
            if not settings.enable:
                return self.told(new, learned, tuple(generated))
            with self._timers("reward") as wait:
                spread = self._groups_with_spread(new)
                found = len(spread)
                rest = [g for g in range(count) if g not in set(spread)]
                if kept is None:
                    kept = new if found == count else self._pick(new, new, [*spread, *rest])
                else:
                    order = [*range(good), *(count + g for g in [*spread, *rest])][:count]
                    kept = self._pick(kept, new, order)
                wait(kept.batch)
            good += found
        assert kept is not None
        groups = batches * count
        metrics = _metrics(kept, learned) | {
            "train/num_gen_batches": float(batches),
            "filter_groups/kept_ratio": good / groups,
            "filter_groups/unfilled": float(max(count - good, 0)),
            "filter_groups/discarded": float(groups - count),
            "reward/failed_ratio": failed / sampled,
        }
        given = dataclasses.replace(kept.given, cursor=cursor)
        made = tuple(generated)
        return dataclasses.replace(kept, given=given, metrics=metrics, curriculum=learned, generated=made)

    def learn(self, curriculum: Curriculum | None, collected: Collected) -> Curriculum | None:
        """The curriculum, if there is one, with what these responses say of their prompts."""
        return curriculum and curriculum.learn(collected.given.indices, self.success(collected))

    def told(self, collected: Collected, curriculum: Curriculum | None, generated: tuple[Lengths, ...]) -> Collected:
        """A batch with what its step is told of: the curriculum after it, and what was sampled in it."""
        metrics = _metrics(collected, curriculum)
        return dataclasses.replace(collected, metrics=metrics, curriculum=curriculum, generated=generated)

    def success(self, collected: Collected) -> list[float]:
        """How right the responses to each prompt are, by the curriculum's metric: means in [0, 1], NaN of none.

        Raises:
          UserError: the metric is not there, or not in [0, 1].
        """
        key = "config.data.curriculum.metric"
        values = self._metric(collected, self._config.data.curriculum.metric, key)
        outside = (values > 1 + ROUNDING) | (values < -ROUNDING)
        if outside.any():
            raise UserError(f"{key}: a success is in [0, 1], found {values[outside][0]:g}; name a metric that is")
        values = np.clip(values, 0, 1)
        count = (~np.isnan(values)).sum(1)
        return np.where(count > 0, np.nansum(values, 1) / np.maximum(count, 1), np.nan).tolist()

    def _draw(self, cursor: int, curriculum: Curriculum | None) -> PromptBatch:
        count = self._config.data.train_batch_size
        if curriculum is None:
            return self._data.batch(cursor, count)
        return self._data.take(curriculum.draw(cursor, count), cursor)

    def begin(self, view: Params, step: int, cursor: int, curriculum: Curriculum | None) -> Underway:
        """The phases data, gen and gen_max, and the beginning of reward."""
        phases, timer = self._phases, self._timers
        with timer("data"):
            given = self._draw(cursor, curriculum)
            parts = given.split(self._config.rollout.parts)
        with timer("gen") as wait:
            started = [self._sampler.start(view, part, step) for part in parts]
            pieces, pending = [], []
            for part, finish in zip(parts, started, strict=True):
                pieces.append(finish())
                pending.append(start_scoring(self._rewards, part, pieces[-1]))
            sampled = join_sampled(phases.join, pieces)
            wait(sampled.batch)
        if self._greedy_sampler is None:
            return Underway(given, sampled, pending)
        with timer("gen_max") as wait:
            best = [self._greedy_sampler(view, part, step) for part in parts]
            scoring = [start_scoring(self._rewards, part, piece) for part, piece in zip(parts, best, strict=True)]
            greedy = join_sampled(phases.join_max, best)
            wait(greedy.batch)
        return Underway(given, sampled, pending, greedy, scoring)

    def again(self, given: PromptBatch, written: Mapping[str, Mapping[str, Any]]) -> Underway:
        """What `begin` returned, of which a checkpoint had kept the responses: they are scored anew.

        Args:
          written: phase -> the evidence that it wrote, by field.
        """

        def read(sampler: Sampler, phase: str) -> tuple[Sampled, list[Callable[[], Scores]]]:
            prompts = self._layout.put_rows(given.prompts)
            known = {
                name: getattr(prompts, name) for name in ("prompts", "prompt_mask", "prompt_valid", "record_arrays")
            }
            sampled = sampler.read(Batch(**known, **written[phase]))
            parts = given.split(self._config.rollout.parts)
            size = len(sampled.texts) // len(parts)
            texts = [sampled.texts[i * size : (i + 1) * size] for i in range(len(parts))]
            pieces = [dataclasses.replace(sampled, texts=own) for own in texts]
            return sampled, [start_scoring(self._rewards, *both) for both in zip(parts, pieces, strict=True)]

        underway = Underway(given, *read(self._sampler, "gen"))
        if self._greedy_sampler is None:
            return underway
        greedy, pending = read(self._greedy_sampler, "gen_max")
        return dataclasses.replace(underway, greedy=greedy, greedy_pending=pending)

    def finish(self, underway: Underway) -> Collected:
        """The rest of the phase reward."""
        phases, greedy, greedy_failures = self._phases, None, []
        if underway.greedy and phases.reward_max:
            with self._timers("reward"):
                scored = [finish() for finish in underway.greedy_pending]
                greedy, scored, _ = self._write(phases.reward_max, underway.greedy, scored, None)
                greedy_failures = [f"greedy response, {failure}" for failure in scored.failures]
        with self._timers("reward") as wait:
            scored = [finish() for finish in underway.pending]
            batch, scored, lengths = self._write(phases.reward, underway.sampled, scored, greedy)
            wait(batch)
            scored = dataclasses.replace(scored, failures=[*scored.failures, *greedy_failures])
        return Collected(batch, underway.given, underway.sampled, scored, lengths)

    def _write(
        self, reward: Compiled, sampled: Sampled, scored: Sequence[Scores], greedy: Batch | None
    ) -> tuple[Batch, Scores, Lengths]:
        host = fetch(sampled.batch)
        check_batch(host, n=sampled.batch.n, vocab_size=self._vocab_size)
        whole = Scores.join(scored)
        batch = reward(sampled.batch, *self._layout.put_rows((whole.scores, whole.valid)), greedy)
        # What has failed on the devices is out of the host's statistics as well: JAX rewards, a greedy response's.
        valid, others = fetch((batch.row_valid, None if greedy is None else greedy.row_valid))
        lost = whole.valid & ~valid & (True if others is None else np.repeat(others, batch.n))
        failures = [f"row {row}: a JAX reward's score is not finite" for row in np.flatnonzero(lost)]
        whole = dataclasses.replace(whole, valid=valid, failures=[*whole.failures, *failures])
        return batch, whole, Lengths.of(host)

    def _groups_with_spread(self, collected: Collected) -> list[int]:
        key = "config.algorithm.filter_groups.metric"
        values = self._metric(collected, self._config.algorithm.filter_groups.metric, key)
        low = np.where(np.isnan(values), np.inf, values).min(1)
        high = np.where(np.isnan(values), -np.inf, values).max(1)
        return np.flatnonzero(high > low).tolist()

    def _metric(self, collected: Collected, name: str, key: str) -> np.ndarray:
        """float64 [G, n] of the raw scores; NaN where a row has none. Nothing that shapes the reward is in it."""
        batch = collected.batch
        scores, scored, valid = fetch((batch.scores, batch.scores_mask, batch.row_valid))
        names = self._rewards.names
        extras = collected.scored.extras
        if name == "score":
            values = scores.astype(np.float64) @ self._rewards.weights.astype(np.float64)
        elif name in names:
            column = names.index(name)
            values = np.where(scored[:, column], scores[:, column].astype(np.float64), np.nan)
        else:
            numbers = [{k: finite_number(v) for k, v in row.items()} for row in extras]
            found = [row.get(name) for row in numbers]
            values = np.array([np.nan if x is None else x for x in found])
            # Of a name that was there before, or whose function has scored nothing here, only these rows have none.
            owner = name.partition("/")[0]
            asked = valid & scored[:, names.index(owner)] if owner in names else valid
            if not np.isnan(values).all():
                self._found.add(name)
            elif asked.any() and name not in self._found:
                known = sorted({"score", *names, *(k for row in numbers for k, v in row.items() if v is not None)})
                raise UserError(f"{key} = {name!r}: no response has it; {nearest(name, known)}")
        return np.where(valid, values, np.nan).reshape(-1, batch.n)

    def _pick(self, first: Collected, second: Collected, order: list[int]) -> Collected:
        """The groups of both at `order`, the second one's behind the first one's."""
        assert self._phases.pick is not None
        batch = self._phases.pick(first.batch, second.batch, np.array(order, np.int32))
        n = batch.n
        rows = [g * n + i for g in order for i in range(n)]
        one, other = first.sampled, second.sampled
        whole = join_sampled(lambda _: batch, (one, other))
        sampled = dataclasses.replace(
            whole,
            texts=_at(whole.texts, rows),
            conversations=whole.conversations and _at(whole.conversations, rows),
            openings=whole.openings and _at(whole.openings, rows),
        )
        prompts = jax.tree.map(lambda a, b: np.concatenate([a, b])[order], first.given.prompts, second.given.prompts)
        given = dataclasses.replace(
            second.given,
            prompts=prompts,
            records=_at([*first.given.records, *second.given.records], order),
            texts=_at([*first.given.texts, *second.given.texts], order),
            indices=_at([*first.given.indices, *second.given.indices], order),
            sets=_at([*first.given.sets, *second.given.sets], order),
        )
        scored = Scores.join([first.scored, second.scored]).rows(rows)
        return Collected(batch, given, sampled, scored, Lengths.join([first.lengths, second.lengths]).take(order))


def open_rewards(config: Config, inputs: Inputs) -> Inputs:
    """The inputs, their rewards over text in a pool of workers, which are starting up and which
    `inputs.rewards.close()` ends.

    Raises:
      UserError: there is no reward, or a function cannot be sent to a worker.
    """
    settings = config.reward
    # No rule of the configuration, which does not say what it is for: training on pairs scores nothing.
    if not settings.functions and not settings.model.path:
        raise UserError(
            "config.reward.functions = (): must be given: at least one reward, by name or as module:function (or a "
            "reward model: config.reward.model.path)"
        )
    peers = Peers.of_run()
    others = [environment_of(config)] if config.rollout.multi_turn.environment else []
    limits: dict[str, Any] = {"timeout": settings.timeout, "memory_limit": settings.memory_limit}
    rewards = pooled(
        inputs.rewards,
        num_workers=settings.num_workers,
        **limits,
        others=others,
        peers=peers if peers.count > 1 else None,
    )
    return dataclasses.replace(inputs, rewards=rewards)


def try_out(inputs: Inputs) -> None:
    """Calls every reward once for each kind of prompts, see `RewardSet.try_out`."""
    for data in (inputs.train, inputs.held_out):
        if data is not None:
            inputs.rewards.try_out(*data.first())


def start_scoring(rewards: RewardSet, given: PromptBatch, sampled: Sampled) -> Callable[[], Scores]:
    """Begins to score B = G · n responses; what it returns, called, waits for the scores. The rows of filler prompts
    are not scored, and not valid; neither are those whose environment has failed."""
    n = len(sampled.texts) // len(given.records)
    real = int(np.asarray(given.prompts.prompt_valid).sum())  # fillers come last
    records: list[Mapping[str, Any]] = [record for record in given.records[:real] for _ in range(n)]
    if sampled.conversations is not None:
        records = [{**r, "conversation": c} for r, c in zip(records, sampled.conversations, strict=False)]
    prompts = [text for text in given.texts[:real] for _ in range(n)]

    pending = rewards.start(prompts, sampled.texts[: real * n], records)

    def finish() -> Scores:
        scored = pending.result()
        fill, valid = len(sampled.texts) - real * n, scored.valid.copy()
        valid[list(sampled.failures)] = False
        return dataclasses.replace(
            scored,
            scores=np.pad(scored.scores, ((0, fill), (0, 0))),
            valid=np.pad(valid, (0, fill)),
            extras=scored.extras + [{}] * fill,
            failures=[*sampled.failures.values(), *scored.failures],
        )

    return finish


def join_sampled(join: Callable[[Any], Batch] | None, pieces: Sequence[Sampled]) -> Sampled:
    """The parts of a batch as the whole. (Failures of their environments are the scores' by then.)

    Args:
      join: (batches) -> batch; None where there is one part.
    """
    if join is None:
        (whole,) = pieces
        return whole

    def joined(parts: Sequence[list[Any] | None]) -> list[Any] | None:
        return None if None in parts else [x for part in parts for x in part or ()]

    return Sampled(
        join(tuple(piece.batch for piece in pieces)),
        [text for piece in pieces for text in piece.texts],
        joined([piece.conversations for piece in pieces]),
        joined([piece.openings for piece in pieces]),
    )


def _metrics(collected: Collected, curriculum: Curriculum | None) -> Metrics:
    found: Metrics = {}
    if collected.sampled.conversations is not None:
        turns = [collected.sampled.num_turns(row) for row in np.flatnonzero(collected.scored.valid).tolist()] or [0]
        found |= {f"num_turns/{name}": float(f(turns)) for name, f in (("mean", np.mean), ("max", max), ("min", min))}
    if curriculum is not None:
        success = curriculum.success
        drawn = ~np.isnan(success)
        found["curriculum/success/mean"] = float(success[drawn].mean()) if drawn.any() else 0.0
        found["curriculum/drawn_ratio"] = float(drawn.mean())
    return found


def _at(values: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [values[place] for place in places]

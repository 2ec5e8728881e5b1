"""The phases compiled before the first step, for the shapes of the run: nothing compiles after that.

Shapes and shardings are handed from phase to phase as the batch gains evidence, so that this file reads like the step.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.compile_log import Compilation, Report, cache_hits
from jaxrl_llm.config import Config
from jaxrl_llm.sharding import Layout, abstract_like
from jaxrl_llm.steps.packing import needed_width
from jaxrl_llm.steps.phases import Program, cascade, gen, train_sampling, with_whole_tables
from jaxrl_llm.steps.reward import JaxReward, write_scores
from jaxrl_llm.steps.rollout import StopRules, as_batch, begin, decode, observe
from jaxrl_llm.steps.sampling import Sampling
from jaxrl_llm.steps.step import ACTOR, CRITIC, EVAL, GEN, GEN_MAX, step_key, update_phase_keys
from jaxrl_llm.steps.training import Training
from jaxrl_llm.steps.update import UpdateFn
from jaxrl_llm.types import FINISH_LENGTH, Array, Batch, Cache, DecodeState, Params, Prompts, RunState

SCALAR = jax.ShapeDtypeStruct((), np.int32)


_IN_USE: weakref.WeakSet[Compiled] = weakref.WeakSet()


def programs_in_use() -> list[Compiled]:
    """All that this process has compiled and not thrown away, for errors that say where memory went."""
    return list(_IN_USE)


class Compiled:
    """A function compiled for one set of shapes, dtypes and shardings."""

    def __init__(
        self, name: str, fn: Callable[..., Any], *args: Any, report: Report, donate: tuple[int, ...] = (), **jit: Any
    ) -> None:
        """
        Args:
          args: trees of arrays or of jax.ShapeDtypeStruct.
          report: told what begins to be compiled, and how long it took.
          donate: positions of arguments whose buffers the result takes over.
        """
        start, hits, self.name = time.perf_counter(), cache_hits(), name
        report(Compilation(name))
        try:
            lowered = jax.jit(fn, donate_argnums=donate, **jit).lower(*args)
            self.executable = lowered.compile()
        except Exception as error:
            error.add_note(f"while {name} was compiled")
            raise
        self.out = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            lowered.out_info,
            self.executable.output_shardings,
        )
        _IN_USE.add(self)
        report(Compilation(name, time.perf_counter() - start, cached=cache_hits() > hits))

    def __call__(self, *args: Any) -> Any:
        return self.executable(*args)


@dataclasses.dataclass(frozen=True)
class CompiledTurns:
    """A rollout of several turns; between them the host asks the environment (samplers.py)."""

    begin: Compiled  # (view, prompts, stops, step) -> (cache, state), each row at the end of its first turn
    # (view, cache, state, tokens, mask, stops) -> (cache, state), each row with an observation at the end of its next
    # turn; takes over the buffers of cache and state.
    go_on: Compiled
    finish: Compiled  # (prompts, state, truncated) -> batch

    @property
    def out(self) -> Batch:
        return self.finish.out


AnySampler = Compiled | CompiledTurns


@dataclasses.dataclass(frozen=True)
class CompiledTraining:
    """The mini-batch updates of one role."""

    update: Compiled  # (state, batch, step, index, frozen) -> (state, metrics)
    count: int  # updates a step
    group: int = 1  # responses of a line
    packed: Mapping[int, Compiled] = dataclasses.field(default_factory=dict)  # slots of a packed line -> that update

    def fit(self, response_length: np.ndarray) -> CompiledTraining:
        """The same whose update is that of the narrowest lines in which responses of these lengths [B] fit."""
        return dataclasses.replace(self, update=narrowest(self.update, self.packed, self.group, response_length))


def narrowest(padded: Compiled, packed: Mapping[int, Compiled], n: int, response_length: np.ndarray) -> Compiled:
    """Of a phase's programs of packed lines of n responses that of the narrowest in which all fit; else the padded
    one, in which all do.

    Args:
      packed: slots of a line -> the program, narrow ones first.
      response_length: int [B], on the host.
    """
    needed = needed_width(response_length, n)
    return next((program for slots, program in packed.items() if needed <= slots), padded)


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The phases of `Program`, compiled. Keys are made inside, from the seed and the step's number."""

    update_weights: Compiled  # (params) -> view
    # Of one part of the prompts, see rollout.parts:
    gen: AnySampler  # (view, prompts, stops, step) -> batch
    gen_max: AnySampler | None  # (view, prompts, stops, step) -> batch of one greedy response a prompt
    join: Compiled | None  # (the parts' batches) -> batch; None where there is one part
    join_max: Compiled | None
    reward_max: Compiled | None  # `reward` of the greedy batch
    reward: Compiled  # (batch, scores [B, K], row_valid [B], greedy batch or None) -> batch
    pick: Compiled | None  # (batch, batch, prompts [G]) -> batch: of both batches' prompts those at these places
    old_log_prob: Compiled | None  # (params, batch) -> batch
    ref: Compiled | None  # (params, batch) -> batch
    values: Compiled | None  # (params, batch) -> batch
    adv: Compiled  # (batch, kl_coef) -> (batch, kl_coef, metrics)
    update_critic: CompiledTraining | None
    update_actor: CompiledTraining
    update_reference: Compiled | None  # (reference, actor's params, steps taken) -> reference
    group: int  # responses of a line of old_log_prob, ref and values
    packed: Mapping[str, Mapping[int, Compiled]]  # their names -> slots of a packed line -> the same, packed

    def fit(self, response_length: np.ndarray) -> CompiledStep:
        """The step whose phases after the reward are those of the narrowest lines in which responses of these lengths
        [B] fit."""
        scoring = {
            name: narrowest(getattr(self, name), packed, self.group, response_length)
            for name, packed in self.packed.items()
        }
        training = {
            name: role.fit(response_length)
            for name in ("update_critic", "update_actor")
            if (role := getattr(self, name)) is not None
        }
        return dataclasses.replace(self, **scoring, **training)


def sampler_programs(config: Config) -> int:
    """How many `compile_sampler` compiles."""
    return 3 if config.rollout.multi_turn.environment else 1


def step_programs(program: Program) -> int:
    """How many `compile_step` compiles."""
    p, rollout = program, program.config.rollout
    ways = 1 + (p.gen_max is not None)
    each = sampler_programs(p.config) + 1 + (rollout.parts > 1)  # a sampler, its reward, what joins its parts
    others = (p.old_log_prob, p.ref, p.values, p.critic, p.update_reference)
    some = sum(phase is not None for phase in others) + p.config.algorithm.filter_groups.enable
    return 3 + ways * each + some  # update_weights, adv, update_actor


def compile_step(
    program: Program,
    state: RunState,
    prompts: Prompts,
    *,
    weights: tuple[float, ...],
    jax_rewards: Mapping[int, JaxReward],
    report: Report,
) -> CompiledStep:
    """Compiles every phase.

    Args:
      state, prompts: as the steps will have them, arrays or abstract, with their shardings.
      weights, jax_rewards: of the reward phase, see `write_scores`.
      report: told what is being compiled.
    """
    seed, layout = program.config.seed, program.layout
    # Stated, not left to the compiler: evidence stays where its rows are, and small numbers are everywhere.
    rows, whole = layout.rows, layout.replicated
    state = abstract_like(state)

    def compiled(name: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Compiled:
        return Compiled(name, fn, *args, report=report, **options)

    def sampler(name: str, n: int, sampling: Sampling, consumer: int) -> AnySampler:
        options: dict[str, Any] = {"n": n, "sampling": sampling, "consumer": consumer}
        return compile_sampler(program, update_weights.out, part, **options, report=report, name=name)

    def reward_of(name: str, batch: Batch, greedy: Batch | None) -> Compiled:
        given = {"weights": weights, "jax_rewards": jax_rewards, "report": report}
        return compile_reward(layout, batch, greedy, name=name, **given)

    def score(name: str, fn: Callable[..., Batch] | None, params: Any, batch: Batch) -> tuple[Compiled | None, Batch]:
        if fn is None:
            return None, batch
        made = compiled(name, fn, params, batch, out_shardings=rows)
        packed[name] = {
            slots: compiled(f"{name} in {slots} slots", fn, params, batch, out_shardings=rows)
            for slots, fn in program.packed.get(name, {}).items()
        }
        return made, made.out

    def train(role: str, training: Training, train_state: Any, batch: Batch, consumer: int) -> CompiledTraining:
        name = f"update_{role}"
        keys: dict[str, Any] = {"seed": seed, "consumer": consumer, "report": report}
        return compile_training(name, training, train_state, batch, layout, frozen=training.base(state), **keys)

    def join(name: str, part: Batch) -> tuple[Compiled | None, Batch]:
        if parts == 1:
            return None, part
        made = compiled(f"join of {name}", concatenate, (part,) * parts, out_shardings=rows)
        return made, made.out

    parts, policy = program.config.rollout.parts, program.policy(state)
    packed: dict[str, dict[int, Compiled]] = {}
    part = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype, sharding=rows), prompts
    )
    update_weights = compiled("update_weights", program.update_weights, policy)
    gen = sampler("gen", program.config.rollout.n, train_sampling(program.config), GEN)
    gen_max = sampler("gen_max", 1, Sampling(temperature=0.0), GEN_MAX) if program.gen_max else None
    join_gen, batch = join("gen", gen.out)
    join_max, greedy = join("gen_max", gen_max.out) if gen_max else (None, None)
    reward_max = reward_of("reward of gen_max", greedy, None) if greedy is not None else None
    reward = reward_of("reward", batch, reward_max.out if reward_max else None)
    batch, pick = reward.out, None
    if program.config.algorithm.filter_groups.enable:
        order = jax.ShapeDtypeStruct((batch.num_prompts,), np.int32)
        pick = compiled("pick", pick_prompts, batch, batch, order, out_shardings=rows)
    old_log_prob, batch = score("old_log_prob", program.old_log_prob, policy, batch)
    ref, batch = score("ref", program.ref, program.reference(state), batch)
    values, batch = score("values", program.values, program.critic_params(state), batch)
    adv = compiled("adv", program.adv, batch, state.kl_coef, out_shardings=(rows, whole, whole))
    batch = adv.out[0]
    update_reference = None
    if program.update_reference:
        # The new reference lies where the old one lay, and takes over its buffers; the actor's stay its own.
        given, where = (state.reference, state.actor.params), jax.tree.map(lambda x: x.sharding, state.reference)
        options: dict[str, Any] = {"donate": (0,), "out_shardings": where}
        update_reference = compiled("update_reference", program.update_reference, *given, SCALAR, **options)
    return CompiledStep(
        update_weights=update_weights,
        gen=gen,
        gen_max=gen_max,
        join=join_gen,
        join_max=join_max,
        pick=pick,
        reward_max=reward_max,
        reward=reward,
        old_log_prob=old_log_prob,
        ref=ref,
        values=values,
        adv=adv,
        update_critic=train("critic", program.critic, state.critic, batch, CRITIC) if program.critic else None,
        update_actor=train("actor", program.actor, state.actor, batch, ACTOR),
        update_reference=update_reference,
        group=program.group,
        packed=packed,
    )


def concatenate(parts: Sequence[Batch]) -> Batch:
    """The batches of several parts of the prompts as one."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)


def pick_prompts(first: Batch, second: Batch, prompts: Array) -> Batch:
    """Of the prompts of both, the second's behind the first's, those at these places with all of their rows."""
    return concatenate((first, second)).select(prompts)


def compile_training(
    name: str,
    training: Training,
    state: Any,
    batch: Batch,
    layout: Layout,
    *,
    frozen: Any = None,
    seed: int,
    consumer: int,
    report: Report,
) -> CompiledTraining:
    """(state, batch, step, index, frozen) -> (state, metrics): one mini-batch's update, which takes over the state's
    buffers.

    Args:
      state, batch, frozen: a TrainState, a batch and frozen parameters (or None) like those to come, abstract, with
        their shardings.
      consumer: what is folded into the step's key for this phase.
    """

    def numbered(update: UpdateFn, state: Any, batch: Batch, step: Array, index: Array, frozen: Any) -> Any:
        order_key, update_key = update_phase_keys(jax.random.fold_in(step_key(seed, step), consumer))
        prompts = training.order(order_key)[index]
        return update(state, batch.select(prompts), jax.random.fold_in(update_key, index), frozen)

    # The new state lies where the old one lay.
    shardings = (jax.tree.map(lambda x: x.sharding, state), layout.replicated)
    given = (state, batch, SCALAR, SCALAR, frozen)

    def compiled(name: str, update: UpdateFn) -> Compiled:
        return Compiled(name, partial(numbered, update), *given, report=report, donate=(0,), out_shardings=shardings)

    return CompiledTraining(
        update=compiled(name, training.update),
        count=training.count,
        group=training.group,
        packed={slots: compiled(f"{name} in {slots} slots", update) for slots, update in training.packed.items()},
    )


def compile_reward(
    layout: Layout,
    batch: Batch,
    greedy: Batch | None = None,
    *,
    weights: tuple[float, ...],
    jax_rewards: Mapping[int, JaxReward],
    report: Report,
    name: str = "reward",
) -> Compiled:
    """(batch, scores float32 [B, K], row_valid bool [B], greedy) -> batch: `write_scores` for batches like these."""
    rows = batch.num_rows
    scores = jax.ShapeDtypeStruct((rows, len(weights)), np.float32, sharding=layout.rows)
    valid = jax.ShapeDtypeStruct((rows,), np.bool_, sharding=layout.rows)

    def reward(batch: Batch, scores: Array, row_valid: Array, greedy: Batch | None) -> Batch:
        return write_scores(batch, scores, row_valid, weights=weights, jax_rewards=jax_rewards, greedy=greedy)

    return Compiled(name, reward, batch, scores, valid, greedy, report=report, out_shardings=layout.rows)


def compile_sampler(
    program: Program,
    view: Any,
    prompts: Prompts,
    *,
    n: int,
    sampling: Sampling,
    report: Report,
    consumer: int = EVAL,
    name: str = "testing",
) -> AnySampler:
    """(view, prompts, stops, step) -> batch; where the config has an environment, the parts of such a rollout.

    Args:
      view, prompts: like those that it will be called with, arrays or abstract, with their shardings.
      n: responses per prompt.
      report: told what is being compiled.
      consumer: what is folded into the step's key.
    """
    width, seed = program.config.rollout.response_length, program.config.seed

    def key_of(step: Array) -> Array:
        return jax.random.fold_in(step_key(seed, step), consumer)

    if program.config.rollout.multi_turn.environment:
        return _compile_turns(program, view, prompts, key_of, n=n, sampling=sampling, report=report, name=name)

    shapes = cascade(program.config, program.layout)

    def sample(view: Params, prompts: Prompts, stops: StopRules, step: Array) -> Batch:
        given: dict[str, Any] = {"n": n, "width": width, "sampling": sampling, "cascade": shapes}
        return gen(program.actor_model, program.layout, view, prompts, key_of(step), stops, **given)

    rows = program.layout.rows
    return Compiled(name, sample, view, prompts, program.stops, SCALAR, report=report, out_shardings=rows)


def _compile_turns(
    program: Program,
    view: Any,
    prompts: Prompts,
    key_of: Callable[[Array], Array],
    *,
    n: int,
    sampling: Sampling,
    report: Report,
    name: str,
) -> CompiledTurns:
    model, layout, rollout = program.actor_model, program.layout, program.config.rollout
    rows = prompts.prompts.shape[0] * n
    shapes = cascade(program.config, layout)
    turn = partial(decode, model, sampling=sampling, cascade=shapes)

    def first(view: Params, prompts: Prompts, stops: StopRules, step: Array) -> tuple[Cache, DecodeState]:
        view, width = with_whole_tables(model, layout, view), rollout.response_length
        cache, state = begin(model, view, prompts, key_of(step), n=n, width=width, cascade=shapes)
        return turn(view, cache, layout.constrain_rows(state), stops=stops, first_turn=True)

    def following(
        view: Params, cache: Any, state: DecodeState, tokens: Array, mask: Array, stops: StopRules
    ) -> tuple[Cache, DecodeState]:
        view = with_whole_tables(model, layout, view)
        return turn(view, *observe(model, view, cache, state, tokens, mask), stops=stops)

    def finish(prompts: Prompts, state: DecodeState, truncated: Array) -> Batch:
        reason = jnp.where(truncated, FINISH_LENGTH, state.finish_reason)
        return layout.constrain_rows(as_batch(prompts, state.replace(finish_reason=reason)))

    made = Compiled(f"{name}, first turn", first, view, prompts, program.stops, SCALAR, report=report)
    given = [
        jax.ShapeDtypeStruct((rows, rollout.multi_turn.max_observation_length), dtype, sharding=layout.rows)
        for dtype in (np.int32, np.bool_)
    ]
    # What goes on lies where it lay.
    options: dict[str, Any] = {"donate": (1, 2), "out_shardings": jax.tree.map(lambda x: x.sharding, made.out)}
    go_on = Compiled(f"{name}, next turn", following, view, *made.out, *given, program.stops, report=report, **options)
    truncated = jax.ShapeDtypeStruct((rows,), np.bool_, sharding=layout.rows)
    ended = Compiled(f"{name}, end", finish, prompts, made.out[1], truncated, report=report, out_shardings=layout.rows)
    return CompiledTurns(made, go_on, ended)

"""The phases compiled before the first step, for the shapes of the run: nothing compiles after that.

Shapes and shardings are handed from phase to phase as the batch gains evidence, so that this file reads like the step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_llm.checkpoint import abstract
from jaxrl_llm.sharding import Layout
from jaxrl_llm.steps.phases import Program, Updates, gen
from jaxrl_llm.steps.reward import JaxReward, write_scores
from jaxrl_llm.steps.rollout import StopRules
from jaxrl_llm.steps.sampling import Sampling
from jaxrl_llm.steps.step import ACTOR, CRITIC, EVAL, GEN, step_key, update_phase_keys
from jaxrl_llm.types import Array, Batch, Params, Prompts, RunState

Report = Callable[[str], None]
SCALAR = jax.ShapeDtypeStruct((), np.int32)


class Compiled:
    """A function compiled for one set of shapes, dtypes and shardings."""

    def __init__(
        self, name: str, fn: Callable[..., Any], *args: Any, report: Report, donate: tuple[int, ...] = (), **jit: Any
    ) -> None:
        """
        Args:
          args: trees of arrays or of jax.ShapeDtypeStruct.
          report: told what is being compiled and how long it took.
          donate: positions of arguments whose buffers the result takes over.
        """
        start = time.perf_counter()
        lowered = jax.jit(fn, donate_argnums=donate, **jit).lower(*args)
        self.executable = lowered.compile()
        self.out = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            lowered.out_info,
            self.executable.output_shardings,
        )
        report(f"compiled {name} in {time.perf_counter() - start:.1f} s")

    def __call__(self, *args: Any) -> Any:
        return self.executable(*args)


@dataclasses.dataclass(frozen=True)
class CompiledUpdates:
    """The mini-batch updates of one role."""

    update: Compiled  # (state, batch, step, index) -> (state, metrics)
    count: int  # updates a step


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The phases of `Program`, compiled. Keys are made inside, from the seed and the step's number."""

    update_weights: Compiled  # (params) -> view
    gen: Compiled  # (view, prompts, stops, step) -> batch
    reward: Compiled  # (batch, scores [B, K], row_valid [B]) -> batch
    old_log_prob: Compiled | None  # (params, batch) -> batch
    ref: Compiled | None  # (params, batch) -> batch
    values: Compiled | None  # (params, batch) -> batch
    adv: Compiled  # (batch, kl_coef) -> (batch, kl_coef, metrics)
    update_critic: CompiledUpdates | None
    update_actor: CompiledUpdates


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
    state = abstract(state)

    def compiled(name: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Compiled:
        return Compiled(name, fn, *args, report=report, **options)

    def sample(view: Params, prompts: Prompts, stops: StopRules, step: Array) -> Batch:
        return program.gen(view, prompts, jax.random.fold_in(step_key(seed, step), GEN), stops)

    def score(name: str, fn: Callable[..., Batch] | None, params: Any, batch: Batch) -> tuple[Compiled | None, Batch]:
        if fn is None:
            return None, batch
        made = compiled(name, fn, params, batch, out_shardings=rows)
        return made, made.out

    def updates(role: str, updates: Updates, train_state: Any, batch: Batch, consumer: int) -> CompiledUpdates:
        def update(train_state: Any, batch: Batch, step: Array, index: Array) -> Any:
            order_key, update_key = update_phase_keys(jax.random.fold_in(step_key(seed, step), consumer))
            prompts = updates.order(order_key)[index]
            return updates.update(train_state, batch.select(prompts), jax.random.fold_in(update_key, index))

        # The new state lies where the old one lay, and takes over its buffers.
        shardings = (jax.tree.map(lambda x: x.sharding, train_state), whole)
        made = compiled(
            f"update_{role}", update, train_state, batch, SCALAR, SCALAR, donate=(0,), out_shardings=shardings
        )
        return CompiledUpdates(update=made, count=updates.per_step)

    update_weights = compiled("update_weights", program.update_weights, state.actor.params)
    gen_ = compiled("gen", sample, update_weights.out, prompts, program.stops, SCALAR, out_shardings=rows)
    reward = compile_reward(layout, gen_.out, weights=weights, jax_rewards=jax_rewards, report=report)
    batch = reward.out
    old_log_prob, batch = score("old_log_prob", program.old_log_prob, state.actor.params, batch)
    ref, batch = score("ref", program.ref, state.reference, batch)
    values, batch = score("values", program.values, state.critic.params if state.critic else None, batch)
    adv = compiled("adv", program.adv, batch, state.kl_coef, out_shardings=(rows, whole, whole))
    batch = adv.out[0]
    return CompiledStep(
        update_weights=update_weights,
        gen=gen_,
        reward=reward,
        old_log_prob=old_log_prob,
        ref=ref,
        values=values,
        adv=adv,
        update_critic=updates("critic", program.critic, state.critic, batch, CRITIC) if program.critic else None,
        update_actor=updates("actor", program.actor, state.actor, batch, ACTOR),
    )


def compile_reward(
    layout: Layout, batch: Batch, *, weights: tuple[float, ...], jax_rewards: Mapping[int, JaxReward], report: Report
) -> Compiled:
    """(batch, scores, row_valid) -> batch"""
    rows = batch.num_rows
    scores = jax.ShapeDtypeStruct((rows, len(weights)), np.float32, sharding=layout.rows)
    valid = jax.ShapeDtypeStruct((rows,), np.bool_, sharding=layout.rows)

    def reward(batch: Batch, scores: Array, row_valid: Array) -> Batch:
        return write_scores(batch, scores, row_valid, weights=weights, jax_rewards=jax_rewards)

    return Compiled("reward", reward, batch, scores, valid, report=report, out_shardings=layout.rows)


def compile_sampler(
    program: Program, view: Any, prompts: Prompts, *, n: int, sampling: Sampling, report: Report, name: str = "testing"
) -> Compiled:
    """(view, prompts, stops, step) -> batch, for evaluation: with a sampling and a number of responses of its own."""
    width, seed = program.config.rollout.response_length, program.config.seed

    def sample(view: Params, prompts: Prompts, stops: StopRules, step: Array) -> Batch:
        key = jax.random.fold_in(step_key(seed, step), EVAL)
        return gen(program.actor_model, program.layout, n, width, sampling, view, prompts, key, stops)

    rows = program.layout.rows
    return Compiled(name, sample, view, prompts, program.stops, SCALAR, report=report, out_shardings=rows)

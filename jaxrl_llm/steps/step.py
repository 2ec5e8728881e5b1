"""The whole step as one pure function: the phases of `phases.py` composed, for a reward that is a JAX function.

>>> import jax
>>> import jax.numpy as jnp
>>> from jaxrl_llm import load_config
>>> from jaxrl_llm.models.transformer import TransformerConfig, init_params, make_transformer
>>> from jaxrl_llm.steps.phases import make_program
>>> from jaxrl_llm.steps.step import make_step, step_key
>>> from jaxrl_llm.types import Prompts
>>> sizes = {"num_layers": 1, "width": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "mlp_width": 32}
>>> shape = TransformerConfig(
...     vocab_size=32, real_vocab_size=32, max_positions=64, tie_embeddings=True, **sizes
... )
>>> def even_tokens(responses, mask, record_arrays):  # [B, R], [B, R] -> a score for each response
...     return (mask & (responses % 2 == 0)).sum(1) / mask.sum(1)
>>> prompts = Prompts(
...     prompts=jnp.array([[0, 5, 6], [7, 8, 9]]),
...     prompt_mask=jnp.array([[False, True, True], [True, True, True]]),  # padded on the left
...     uid=jnp.arange(2),
...     prompt_valid=jnp.ones(2, bool),
... )

>>> config = load_config("configs/quickstart.py", {"data.train_batch_size": 2, "model.scan_layers": True})
>>> program = make_program(config, make_transformer(shape))
>>> state = program.init(init_params(program.actor_model, jax.random.key(0)))
>>> step = jax.jit(make_step(program, even_tokens))
>>> state, metrics, batch = step(state, prompts, step_key(config.seed, 0))
>>> int(state.step), batch.advantages.shape  # 2 prompts, 8 responses to each, of 4 tokens at most
(1, (16, 4))

It can be jitted, scanned over steps and vmapped over seeds. The trainer runs the same phases one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.metrics import variance_proxy
from jaxrl_llm.steps.phases import Program
from jaxrl_llm.steps.reward import JaxReward, write_scores
from jaxrl_llm.steps.training import Training
from jaxrl_llm.steps.update import Metrics, run_updates
from jaxrl_llm.types import Array, Batch, Params, Prompts, RunState, TrainState

StepFn = Callable[[RunState, Prompts, Array], tuple[RunState, Metrics, Batch]]

# What each consumer of a step's key folds into it.
GEN, CRITIC, ACTOR, EVAL, GEN_MAX = range(5)


def step_key(seed: int, step: int | Array) -> Array:
    """The key of a step, from which everything random in it derives."""
    return jax.random.fold_in(jax.random.key(seed), step)


def init_key(seed: int, role: int) -> Array:
    """The key of a role's fresh parameters; no step's number is that large."""
    return jax.random.fold_in(step_key(seed, 2**32 - 1), role)


def score_rows(batch: Batch, reward_fn: JaxReward, greedy: Batch | None = None) -> Batch:
    """The reward phase for one JAX function, every row valid; `greedy` as in `write_scores`."""
    rows = batch.num_rows
    nothing, valid = jnp.zeros((rows, 1), jnp.float32), jnp.ones(rows, bool)
    return write_scores(batch, nothing, valid, weights=(1.0,), jax_rewards={0: reward_fn}, greedy=greedy)


def make_step(program: Program, reward_fn: JaxReward) -> StepFn:
    """step(state, prompts, key) -> (state, metrics, batch). The key is consumed; `step_key` makes one.

    Raises:
      ValueError: the config has what only a host can do in the middle of a step: an environment that answers, or
        prompts that are replaced.
    """
    p = program
    for key, set_ in (
        ("rollout.multi_turn.environment", p.config.rollout.multi_turn.environment),
        ("algorithm.filter_groups.enable", p.config.algorithm.filter_groups.enable),
    ):
        if set_:
            raise ValueError(f"config.{key} = {set_!r}: has no part in a pure step; train with jaxrl_llm.fit instead")
    warmup = p.config.critic.warmup_steps if p.critic else 0

    def step(state: RunState, prompts: Prompts, key: Array) -> tuple[RunState, Metrics, Batch]:
        policy = p.policy(state)
        view = p.update_weights(policy)
        batch = p.gen(view, prompts, jax.random.fold_in(key, GEN), p.stops)
        greedy = None
        if p.gen_max:
            greedy = score_rows(p.gen_max(view, prompts, jax.random.fold_in(key, GEN_MAX), p.stops), reward_fn)
        batch = score_rows(batch, reward_fn, greedy)
        if p.old_log_prob:
            batch = p.old_log_prob(policy, batch)
        if p.ref:
            batch = p.ref(p.reference(state), batch)
        if p.values:
            batch = p.values(p.critic_params(state), batch)
        batch, kl_coef, metrics = p.adv(batch, state.kl_coef)
        critic, actor = state.critic, state.actor
        if p.critic and critic:
            critic_key = jax.random.fold_in(key, CRITIC)
            critic, critic_metrics = _train(p.critic, critic, batch, critic_key, p.critic.base(state))
            metrics |= prefixed("critic", critic_metrics)
        trained, actor_metrics = _train(p.actor, actor, batch, jax.random.fold_in(key, ACTOR), p.actor.base(state))
        if warmup:
            # In the warm-up only the critic learns; its metrics alone mean anything then.
            actor = jax.tree.map(lambda new, old: jnp.where(state.step < warmup, old, new), trained, actor)
        else:
            actor = trained
        metrics |= prefixed("actor", actor_metrics)
        metrics |= variance_proxy(metrics)
        reference, done = state.reference, state.step + 1
        if p.update_reference:
            reference = p.update_reference(reference, actor.params, done)
        state = state.replace(actor=actor, critic=critic, reference=reference, kl_coef=kl_coef, step=done)
        return state, metrics, batch

    return step


def _train(
    training: Training, state: TrainState, batch: Batch, key: Array, frozen: Params | None
) -> tuple[TrainState, Metrics]:
    order_key, update_key = update_phase_keys(key)
    return run_updates(training.update, state, batch, update_key, training.order(order_key), frozen)


def update_phase_keys(key: Array) -> tuple[Array, Array]:
    """From the key of an update phase, those of its mini-batches' order and of its updates."""
    return jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)


def prefixed(role: str, metrics: Metrics) -> Metrics:
    """{"pg_loss": …} as {"actor/pg_loss": …}; a name that has a section keeps it."""
    return {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items()}

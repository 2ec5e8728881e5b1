"""The phases of a config, each a pure function ready for `jax.jit`; built once, before anything is traced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.advantages import Estimator
from jaxrl_llm.algorithms.log_probs import TokenStats
from jaxrl_llm.config import Config, need_base, need_critic, need_reference
from jaxrl_llm.config_roles import chosen_estimator
from jaxrl_llm.metrics import data_metrics
from jaxrl_llm.models.declare import init_declared
from jaxrl_llm.sharding import Layout
from jaxrl_llm.steps.advantage import compute_advantages
from jaxrl_llm.steps.reference import sync_reference
from jaxrl_llm.steps.rollout import Cascade, StopRules, no_stop_rules, rollout
from jaxrl_llm.steps.sampling import Sampling
from jaxrl_llm.steps.scoring import in_micro_batches, score_tokens, score_values
from jaxrl_llm.steps.training import (
    TRAINED_WHOLE,
    Training,
    actor_loss,
    critic_loss,
    enter,
    frozen,
    make_training,
    merged,
    split_rows,
    widths,
)
from jaxrl_llm.steps.update import Metrics
from jaxrl_llm.types import Array, Batch, Model, Params, Prompts, RunState

ScoreFn = Callable[[Params, Batch], Batch]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The phases of a config; None where the config has no such phase."""

    config: Config
    layout: Layout
    actor_model: Model
    critic_model: Model | None
    stops: StopRules
    update_weights: Callable[[Params], Params]  # actor parameters -> the sampler's view of them
    gen: Callable[[Params, Prompts, Array, StopRules], Batch]
    gen_max: Callable[[Params, Prompts, Array, StopRules], Batch] | None  # a greedy response per prompt, the baseline
    old_log_prob: ScoreFn | None
    ref: ScoreFn | None
    values: ScoreFn | None
    group: int  # responses of a line of these three
    packed: Mapping[str, Mapping[int, ScoreFn]]  # their names -> slots of a packed line -> the same, packed
    adv: Callable[[Batch, Array], tuple[Batch, Array, Metrics]]
    critic: Training | None
    actor: Training
    update_reference: Callable[[Params, Params, Array], Params] | None  # (reference, actor, steps taken) -> reference

    def init(
        self, actor: Params, critic: Params | None = None, reference: Params | None = None, key: Array | None = None
    ) -> RunState:
        """The state before the first step; a reference that is not given is a copy of the actor.

        Args:
          actor: all of its parameters, which stay frozen beneath a LoRA overlay (but for a reward model's head).
          critic: what is trained of it: all of its parameters, or with `critic.freeze_trunk` the value head alone.
          key: of a fresh overlay; consumed. None is seed 0's.

        Raises:
          ValueError: the config has a critic and its parameters are not given.
        """
        if (critic is None) != (self.critic is None):
            raise ValueError(
                f"the config has {'no critic' if self.critic is None else 'a critic'}, its parameters differ"
            )
        base = frozen(self.config, actor) if need_base(self.config) else None
        trained = actor
        if self.actor.frozen:
            fresh = init_declared(self.actor.declare(), jax.random.key(0) if key is None else key)
            trained = fresh | {name: actor[name] for name in TRAINED_WHOLE if name in fresh}
        if self.ref is None:
            reference = None
        elif reference is None and self.reference_is_base:
            pass
        elif reference is None:
            # Donated buffers must not be shared between the actor and what outlives its update.
            reference = jax.tree.map(jnp.copy, actor)
        return RunState(
            actor=self.actor.init(trained),
            critic=self.critic.init(critic) if self.critic else None,
            reference=reference,
            kl_coef=jnp.float32(self.config.algorithm.kl_ctrl.kl_coef),
            step=jnp.int32(0),
            base=base,
        )

    @property
    def reference_is_base(self) -> bool:
        """Whether the frozen parameters are the reference as well, so that it is not kept twice."""
        reference = self.config.reference
        return need_base(self.config) and not reference.path and not reference.sync_steps

    # What the phases read of a state. No array is copied: trees are laid over each other.

    def policy(self, state: RunState) -> Params:
        return self.actor.whole(state.actor, state)

    def critic_params(self, state: RunState) -> Params | None:
        return self.critic.whole(state.critic, state) if self.critic and state.critic else None

    def reference(self, state: RunState) -> Params | None:
        return state.base if self.ref and state.reference is None else state.reference


def make_program(
    config: Config,
    actor: Model,
    critic: Model | None = None,
    *,
    layout: Layout | None = None,
    stops: StopRules | None = None,
    total_steps: int | None = None,
    reward_names: tuple[str, ...] = (),
) -> Program:
    """The phases of a config.

    Args:
      actor: a model with a "logits" head; critic: one with a "value" head, where the config has a critic.
      layout: keeps rows spread over a mesh; None is one device.
      stops: what ends a response; None is nothing but its length.
      total_steps: for schedules that decay over the run; None is `trainer.steps`.
      reward_names: of the scores' columns, for metrics of each; () for none.
    """
    if need_critic(config) != (critic is not None):
        raise ValueError(f"the config {'needs a critic model' if need_critic(config) else 'has no critic'}")
    layout = layout or Layout.single()
    steps = config.trainer.steps if total_steps is None else total_steps
    estimator, options = chosen_estimator(config)
    rows = config.data.train_batch_size * config.rollout.n
    _, group = split_rows(rows, config.rollout.n, config.trainer.score_micro_batch_size, layout)
    scorers = partial(_scorers, config, layout, actor, critic, estimator)
    rollout_of = partial(gen, actor, layout, width=config.rollout.response_length, cascade=cascade(config, layout))
    relayout = partial(layout.undo_fsdp, declaration=actor.declare()) if config.rollout.gather_params else None
    packed: dict[str, dict[int, ScoreFn]] = {}
    for width in widths(config, group):
        for name, fn in scorers(packed_width=width).items():
            if fn:
                packed.setdefault(name, {})[width] = fn
    # In the critic's warm-up the actor does not move.
    actor_steps = max(steps - (config.critic.warmup_steps if critic else 0), 1)
    return Program(
        config=config,
        layout=layout,
        actor_model=actor,
        critic_model=critic,
        stops=no_stop_rules(actor.vocab_size) if stops is None else stops,
        update_weights=partial(sampler_view, config, relayout=relayout),
        gen=partial(rollout_of, n=config.rollout.n, sampling=train_sampling(config)),
        gen_max=partial(rollout_of, n=1, sampling=Sampling(temperature=0.0))
        if "reward_baselines" in estimator.needs
        else None,
        **scorers(),
        group=group,
        packed=packed,
        adv=partial(_adv, config, estimator, options, critic is not None, reward_names),
        critic=make_training(config, config.critic, critic, partial(critic_loss, config, critic), layout, steps)
        if critic
        else None,
        actor=make_training(
            config, config.actor, actor, partial(actor_loss, config, actor, layout), layout, actor_steps
        ),
        update_reference=partial(sync_reference, every=config.reference.sync_steps, alpha=config.reference.sync_alpha)
        if config.reference.sync_steps
        else None,
    )


# Sampling


def sampler_view(config: Config, params: Params, relayout: Callable[[Params], Params] | None = None) -> Params:
    """The parameters as the sampler wants them: an overlay merged, in the compute dtype, on the mesh as `relayout` puts
    them, layers apart if so configured."""
    dtype = jnp.dtype(config.model.dtype)

    def cast(x: Array) -> Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x  # whole numbers are quantized kernels

    view = jax.tree.map(cast, merged(config, params))
    return enter(config, relayout(view) if relayout else view)


def train_sampling(config: Config) -> Sampling:
    r = config.rollout
    return Sampling(temperature=r.temperature, top_k=r.top_k, top_p=r.top_p, min_p=r.min_p)


def cascade(config: Config, layout: Layout) -> Cascade:
    """The shapes in which rollouts decode."""
    c = config.rollout.cascade
    return Cascade(width=c.width, halvings=c.halvings, min_rows=c.min_rows, shards=layout.batch_shards)


def with_whole_tables(actor: Model, layout: Layout, view: Params) -> Params:
    """The sampler's view with what has an axis of the vocabulary whole over fsdp: the prompts' lookup, each token's and
    the head then share one copy, which compilers otherwise may or may not find out by themselves."""
    return layout.undo_fsdp(view, actor.declare(), only="vocab")


def gen(
    actor: Model,
    layout: Layout,
    view: Params,
    prompts: Prompts,
    key: Array,
    stops: StopRules,
    *,
    n: int,
    width: int,
    sampling: Sampling,
    cascade: Cascade,
) -> Batch:
    """The rollout, its rows spread over the mesh."""
    view = with_whole_tables(actor, layout, view)
    batch = rollout(actor, view, prompts, key, n=n, width=width, sampling=sampling, stops=stops, cascade=cascade)
    return layout.constrain_rows(batch)


# Scoring


def _scorers(
    config: Config,
    layout: Layout,
    actor: Model,
    critic: Model | None,
    estimator: Estimator,
    packed_width: int | None = None,
) -> dict[str, ScoreFn | None]:
    """The phases old_log_prob, ref and values, as far as the config has them, and there is something to pack."""
    score = partial(_score, config, layout, actor, packed_width=packed_width)
    copies = config.algorithm.rollout_correction.bypass and packed_width is not None
    return {
        "old_log_prob": None if copies else _old_log_prob(config, estimator, score),
        "ref": partial(_ref, score) if need_reference(config) else None,
        "values": partial(_values, config, layout, critic, packed_width) if critic else None,
    }


def _score(
    config: Config,
    layout: Layout,
    actor: Model,
    params: Params,
    batch: Batch,
    *,
    everything: bool = False,
    pi_squared: bool = False,
    packed_width: int | None = None,
) -> TokenStats:
    entered = enter(config, params)

    def score(rows: Batch) -> TokenStats:
        return score_tokens(
            actor,
            entered,
            layout.constrain_rows(rows),
            temperature=config.rollout.temperature,
            chunk_tokens=config.model.logprob_chunk * layout.batch_shards,
            with_entropy=everything,
            with_sum_pi_squared=pi_squared,
            packed_width=packed_width,
        )

    return _in_micro_batches(config, layout, score, batch)


def _in_micro_batches(config: Config, layout: Layout, score: Callable[[Batch], Any], batch: Batch) -> Any:
    parts, group = split_rows(batch.num_rows, batch.n, config.trainer.score_micro_batch_size, layout)
    return in_micro_batches(score, batch.regroup(group), parts)


def need_old_log_probs(config: Config, estimator: Estimator) -> bool:
    """Whether the old policy's log-probs need a pass of their own.

    With one epoch and one mini-batch the first update is the only one, and old is new, held constant; unless something
    before the update asks for them.
    """
    once = config.actor.epochs == 1 and config.actor.mini_batch_size == config.data.train_batch_size
    correction = config.algorithm.rollout_correction
    corrected = correction.rollout_is != "none" or correction.rollout_rs != "none"
    asked = {"old_log_probs", "sum_pi_squared"} & set(estimator.needs)
    return not once or corrected or bool(asked) or config.algorithm.use_kl_in_reward


def _old_log_prob(config: Config, estimator: Estimator, score: Callable[..., TokenStats]) -> ScoreFn | None:
    def bypass(params: Params, batch: Batch) -> Batch:
        del params
        return batch.write("old_log_prob", old_log_probs=batch.rollout_log_probs)

    def recompute(params: Params, batch: Batch) -> Batch:
        stats = score(params, batch, everything=True, pi_squared="sum_pi_squared" in estimator.needs)
        return batch.write(
            "old_log_prob", old_log_probs=stats.log_probs, entropys=stats.entropys, sum_pi_squared=stats.sum_pi_squared
        )

    if config.algorithm.rollout_correction.bypass:
        return bypass
    return recompute if need_old_log_probs(config, estimator) else None


def _ref(score: Callable[..., TokenStats], params: Params, batch: Batch) -> Batch:
    return batch.write("ref", ref_log_prob=score(params, batch).log_probs)


def _values(
    config: Config, layout: Layout, critic: Model, packed_width: int | None, params: Params, batch: Batch
) -> Batch:
    entered = enter(config, params)

    def score(rows: Batch) -> Array:
        return score_values(critic, entered, layout.constrain_rows(rows), packed_width=packed_width)

    return batch.write("values", values=_in_micro_batches(config, layout, score, batch))


# Advantages


def _adv(
    config: Config,
    estimator: Estimator,
    options: dict[str, Any],
    use_critic: bool,
    names: tuple[str, ...],
    batch: Batch,
    kl_coef: Array,
) -> tuple[Batch, Array, Metrics]:
    batch, kl_coef, metrics = compute_advantages(
        batch,
        kl_coef,
        estimator=estimator,
        settings=config.algorithm,
        options=options,
        overlong=config.reward.overlong_buffer,
    )
    return batch, kl_coef, metrics | data_metrics(batch, use_critic=use_critic, reward_names=names)

"""The phases of a config, each a pure function ready for `jax.jit`; built once, before anything is traced."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.algorithms.advantages import Estimator
from jaxrl_llm.algorithms.log_probs import TokenStats
from jaxrl_llm.config import Actor, Config, Critic, need_base, need_critic, need_reference
from jaxrl_llm.config_rules import chosen_estimator, chosen_policy_loss, loss_aggregation
from jaxrl_llm.errors import UserError
from jaxrl_llm.metrics import data_metrics
from jaxrl_llm.models.declare import VALUE_HEAD, init_declared
from jaxrl_llm.models.lora import declare_overlay, join, merge
from jaxrl_llm.models.quantize import declare_quantized, quantize_kernels
from jaxrl_llm.models.transformer import stack_layers, unstack_layers
from jaxrl_llm.sharding import Layout
from jaxrl_llm.steps.advantage import compute_advantages
from jaxrl_llm.steps.objectives import make_actor_loss, make_critic_loss, make_reward_model_loss, make_sft_loss
from jaxrl_llm.steps.optimizer import make_optimizer, make_schedule
from jaxrl_llm.steps.reference import sync_reference
from jaxrl_llm.steps.rollout import StopRules, no_stop_rules, rollout
from jaxrl_llm.steps.sampling import Sampling
from jaxrl_llm.steps.scoring import in_micro_batches, score_tokens, score_values
from jaxrl_llm.steps.update import LossFn, Metrics, UpdateFn, make_update, mini_batches
from jaxrl_llm.types import Array, Batch, Model, Params, Prompts, RunState, TrainState

ScoreFn = Callable[[Params, Batch], Batch]


@dataclasses.dataclass(frozen=True)
class Training:
    """How one model is trained in a step: its optimizer, one mini-batch's update, and which mini-batches there are."""

    declare: Callable[[], Any]  # the tree of `Param` that is trained
    frozen: bool  # whether it lies over the state's frozen parameters
    optimizer: optax.GradientTransformation
    update: UpdateFn
    order: Callable[[Array], Array]  # key -> int32 [count, prompts of a mini-batch]
    count: int  # updates a step

    def init(self, params: Params) -> TrainState:
        zero = jnp.int32(0)
        return TrainState(params=params, opt_state=self.optimizer.init(params), updates=zero, skipped=zero)

    def base(self, state: RunState) -> Params | None:
        """The frozen parameters that this model's lie over, if it has any."""
        return state.base if self.frozen else None

    def whole(self, trained: TrainState, state: RunState) -> Params:
        """All parameters of the model: the trained ones over the frozen ones."""
        return join(trained.params, self.base(state))


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
    adv: Callable[[Batch, Array], tuple[Batch, Array, Metrics]]
    critic: Training | None
    actor: Training
    update_reference: Callable[[Params, Params, Array], Params] | None  # (reference, actor, steps taken) -> reference

    def init(
        self, actor: Params, critic: Params | None = None, reference: Params | None = None, key: Array | None = None
    ) -> RunState:
        """The state before the first step; a reference that is not given is a copy of the actor.

        Args:
          actor: all of its parameters, which stay frozen beneath a LoRA overlay.
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
            trained = init_declared(self.actor.declare(), jax.random.key(0) if key is None else key)
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
        return state.base if self.ref and self.reference_is_base else state.reference


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
    score = partial(_score, config, layout, actor)
    rollout_of = partial(gen, actor, layout, width=config.rollout.response_length)
    # In the critic's warm-up the actor does not move.
    actor_steps = max(steps - (config.critic.warmup_steps if critic else 0), 1)
    return Program(
        config=config,
        layout=layout,
        actor_model=actor,
        critic_model=critic,
        stops=no_stop_rules(actor.vocab_size) if stops is None else stops,
        update_weights=partial(sampler_view, config),
        gen=partial(rollout_of, n=config.rollout.n, sampling=train_sampling(config)),
        gen_max=partial(rollout_of, n=1, sampling=Sampling(temperature=0.0))
        if "reward_baselines" in estimator.needs
        else None,
        old_log_prob=_old_log_prob(config, estimator, score),
        ref=partial(_ref, score) if need_reference(config) else None,
        values=partial(_values, config, layout, critic) if critic else None,
        adv=partial(_adv, config, estimator, options, critic is not None, reward_names),
        critic=_training(config, config.critic, critic, critic_loss(config, critic), layout, steps) if critic else None,
        actor=_training(config, config.actor, actor, actor_loss(config, actor, layout), layout, actor_steps),
        update_reference=partial(sync_reference, every=config.reference.sync_steps, alpha=config.reference.sync_alpha)
        if config.reference.sync_steps
        else None,
    )


# Sampling


def sampler_view(config: Config, params: Params) -> Params:
    """The parameters as the sampler wants them: an overlay merged, in the compute dtype, layers apart if so
    configured."""
    dtype = jnp.dtype(config.model.dtype)

    def cast(x: Array) -> Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x  # whole numbers are quantized kernels

    return _enter(config, jax.tree.map(cast, merged(config, params)))


def frozen(config: Config, params: Params) -> Params:
    """The actor's first parameters as they are kept beneath what is trained."""
    return quantize_kernels(params) if config.model.quantize_base == "int8" else params


def declare_frozen(config: Config, model: Model) -> Params:
    """The declaration of `frozen`'s result."""
    return declare_quantized(model.declare()) if config.model.quantize_base == "int8" else model.declare()


def merged(config: Config, params: Params) -> Params:
    """The parameters of an ordinary model: with what a LoRA overlay adds written into the kernels."""
    return merge(params, config.model.lora_alpha / config.model.lora_rank) if config.model.lora_rank else params


def train_sampling(config: Config) -> Sampling:
    r = config.rollout
    return Sampling(temperature=r.temperature, top_k=r.top_k, top_p=r.top_p, min_p=r.min_p)


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
) -> Batch:
    """The rollout, its rows spread over the mesh."""
    batch = rollout(actor, view, prompts, key, n=n, width=width, sampling=sampling, stops=stops)
    return layout.constrain_rows(batch)


# Scoring


def _score(
    config: Config,
    layout: Layout,
    actor: Model,
    params: Params,
    batch: Batch,
    *,
    everything: bool = False,
    pi_squared: bool = False,
) -> TokenStats:
    entered = _enter(config, params)

    def score(rows: Batch) -> TokenStats:
        return score_tokens(
            actor,
            entered,
            layout.constrain_rows(rows),
            temperature=config.rollout.temperature,
            chunk_tokens=config.model.logprob_chunk * layout.batch_shards,
            with_entropy=everything,
            with_sum_pi_squared=pi_squared,
        )

    return _in_micro_batches(config, layout, score, batch)


def _in_micro_batches(config: Config, layout: Layout, score: Callable[[Batch], Any], batch: Batch) -> Any:
    parts, group = _micro_batches(batch.num_rows, batch.n, config.trainer.score_micro_batch_size, layout)
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


def _values(config: Config, layout: Layout, critic: Model, params: Params, batch: Batch) -> Batch:
    entered = _enter(config, params)
    values = _in_micro_batches(
        config, layout, lambda rows: score_values(critic, entered, layout.constrain_rows(rows)), batch
    )
    return batch.write("values", values=values)


def _micro_batches(rows: int, n: int, rows_per_device: int, layout: Layout) -> tuple[int, int]:
    """Micro-batches that `rows` make at `rows_per_device` at a time (0: all at once), and the responses that share a
    prompt.

    Those are all n, or as many as let every device have whole groups.
    """
    per_device = rows_per_device or max(rows // layout.batch_shards, 1)
    at_once = per_device * layout.batch_shards
    if rows % at_once:
        raise ValueError(f"{rows} rows do not divide into micro-batches of {at_once} ({per_device} per device)")
    return rows // at_once, math.gcd(n, per_device)


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
        batch, kl_coef, estimator=estimator, settings=config.algorithm, options=options
    )
    return batch, kl_coef, metrics | data_metrics(batch, use_critic=use_critic, reward_names=names)


# Updates


def actor_loss(config: Config, actor: Model, layout: Layout) -> LossFn:
    """The actor's loss as configured."""
    a = config.actor
    policy_loss, options = chosen_policy_loss(config)
    return make_actor_loss(
        actor,
        partial(policy_loss, **options),
        aggregation=loss_aggregation(config),
        scale_factor=a.loss_scale_factor,
        temperature=config.rollout.temperature,
        chunk_tokens=config.model.logprob_chunk * layout.batch_shards,
        entropy_coeff=a.entropy_coeff,
        kl_loss_coef=a.kl_loss_coef if a.use_kl_loss else None,
        kl_loss_type=a.kl_loss_type,
        top_entropy_quantile=a.top_entropy_quantile,
    )


def critic_loss(config: Config, critic: Model) -> LossFn:
    """The critic's loss as configured."""
    c = config.critic
    return make_critic_loss(
        critic,
        cliprange_value=c.cliprange_value,
        aggregation=c.loss_agg_mode,
        scale_factor=float(config.rollout.response_length),
    )


def make_sft(config: Config, actor: Model, layout: Layout, total_steps: int) -> Training:
    """The actor trained on given responses, one to a prompt."""
    loss_fn = make_sft_loss(
        actor,
        aggregation=config.actor.loss_agg_mode or "token-mean",
        scale_factor=config.actor.loss_scale_factor,
        chunk_tokens=config.model.logprob_chunk * layout.batch_shards,
    )
    return _training(config, config.actor, actor, loss_fn, layout, total_steps, n=1)


def make_reward_training(config: Config, model: Model, layout: Layout, total_steps: int) -> Training:
    """A reward model trained on pairs of responses, two to a prompt.

    Raises:
      UserError: micro-batches would part a pair.
    """
    loss_fn = make_reward_model_loss(model, center_coef=config.reward.model.center_coefficient)
    rows, micro = 2 * config.actor.mini_batch_size, config.actor.micro_batch_size
    per_device = micro or rows // layout.batch_shards
    if per_device % 2 or rows % (per_device * layout.batch_shards):
        raise UserError(
            f"config.actor.micro_batch_size = {micro}, config.actor.mini_batch_size = {config.actor.mini_batch_size}: "
            f"each of {layout.batch_shards} shard(s) takes whole pairs, two rows each: rows a micro-batch must be even "
            f"and divide the {rows} rows of a mini-batch"
        )
    return _training(config, config.actor, model, loss_fn, layout, total_steps, n=2)


def overlay(config: Config, declaration: Params) -> Params:
    """What LoRA trains of a model.

    Raises:
      UserError: the model has no module of a name in `model.target_modules`.
    """
    m = config.model
    dtype = jnp.dtype(m.param_dtype)
    return declare_overlay(declaration, rank=m.lora_rank, target_modules=m.target_modules, dtype=dtype)


def _trained(config: Config, role: Actor | Critic, model: Model) -> tuple[Callable[[], Any], bool]:
    """What is declared of what is trained, and whether it lies over frozen parameters."""
    if isinstance(role, Actor) and config.model.lora_rank:
        return lambda: overlay(config, model.declare()), True
    if isinstance(role, Critic) and role.freeze_trunk:
        return lambda: {VALUE_HEAD: model.declare()[VALUE_HEAD]}, True
    return model.declare, False


def _training(
    config: Config,
    role: Actor | Critic,
    model: Model,
    loss_fn: LossFn,
    layout: Layout,
    steps: int,
    n: int | None = None,
) -> Training:
    optimizer = role.optimizer if isinstance(role, Critic) else config.optimizer
    prompts, size = config.data.train_batch_size, role.mini_batch_size
    count = role.epochs * (prompts // size)
    total = steps * count
    schedule, transform = make_schedule(optimizer, total), make_optimizer(optimizer, total)
    n = n or config.rollout.n
    parts, group = _micro_batches(size * n, n, role.micro_batch_size, layout)
    # Not metrics of rows: they must not add up over micro-batches.
    constants = {"kl_coef": role.kl_loss_coef} if isinstance(role, Actor) and role.use_kl_loss else {}

    def describe(state: TrainState) -> Metrics:
        found = constants | {"lr": schedule(state.updates)}
        return {name: jnp.asarray(value, jnp.float32) for name, value in found.items()}

    update = make_update(
        loss_fn,
        transform,
        micro_batches=parts,
        group=group,
        enter=partial(_enter, config),
        leave=partial(_leave, config),
        constrain_rows=layout.constrain_rows,
        describe=describe,
    )
    order = partial(mini_batches, prompts=prompts, size=size, epochs=role.epochs, shuffle=role.shuffle)
    declare, frozen = _trained(config, role, model)
    return Training(declare=declare, frozen=frozen, optimizer=transform, update=update, order=order, count=count)


def _enter(config: Config, params: Params) -> Params:
    return params if config.model.scan_layers or "layers" not in params else unstack_layers(params)


def _leave(config: Config, grads: Params) -> Params:
    return grads if config.model.scan_layers or "layers" not in grads else stack_layers(grads)

"""How a model is trained in a step, as configured: what of it is trained, what stays frozen, its loss, its updates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import optax

from jaxrl_llm.config import Actor, Config, Critic
from jaxrl_llm.config_roles import chosen_policy_loss, loss_aggregation
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.declare import SCORE, VALUE_HEAD
from jaxrl_llm.models.lora import declare_overlay, join, merge
from jaxrl_llm.models.quantize import declare_quantized, quantize_kernels
from jaxrl_llm.models.transformer import stack_layers, unstack_layers
from jaxrl_llm.sharding import Layout
from jaxrl_llm.steps.objectives import make_actor_loss, make_critic_loss, make_reward_model_loss, make_sft_loss
from jaxrl_llm.steps.optimizer import make_optimizer, make_schedule
from jaxrl_llm.steps.packing import packed_widths
from jaxrl_llm.steps.update import LossFn, Metrics, UpdateFn, make_update, mini_batches
from jaxrl_llm.types import Array, Model, Params, RunState, TrainState


@dataclasses.dataclass(frozen=True)
class Training:
    """How one model is trained in a step: its optimizer, one mini-batch's update, and which mini-batches there are."""

    declare: Callable[[], Any]  # the tree of `Param` that is trained
    frozen: bool  # whether it lies over the state's frozen parameters
    optimizer: optax.GradientTransformation
    update: UpdateFn
    order: Callable[[Array], Array]  # key -> int32 [count, prompts of a mini-batch]
    count: int  # updates a step
    micro_batches: int = 1  # of an update
    group: int = 1  # responses of a line
    packed: Mapping[int, UpdateFn] = dataclasses.field(default_factory=dict)  # slots of a packed line -> that update

    def init(self, params: Params) -> TrainState:
        zero = jnp.int32(0)
        return TrainState(params=params, opt_state=self.optimizer.init(params), updates=zero, skipped=zero)

    def base(self, state: RunState) -> Params | None:
        """The frozen parameters that this model's lie over, if it has any."""
        return state.base if self.frozen else None

    def whole(self, trained: TrainState, state: RunState) -> Params:
        """All parameters of the model: the trained ones over the frozen ones."""
        return join(trained.params, self.base(state))


# What is trained, and what stays frozen

TRAINED_WHOLE = (SCORE,)  # beside a LoRA overlay, in `model.param_dtype`


def overlay(config: Config, declaration: Params) -> Params:
    """What LoRA trains of a model: the overlay, and a reward model's head, which no correction of others could replace.

    Raises:
      UserError: the model has no module of a name in `model.target_modules`.
    """
    m = config.model
    dtype = jnp.dtype(m.param_dtype)
    trained = declare_overlay(declaration, rank=m.lora_rank, target_modules=m.target_modules, dtype=dtype)
    return trained | {name: declaration[name] for name in TRAINED_WHOLE if name in declaration}


def _trained(config: Config, role: Actor | Critic, model: Model) -> tuple[Callable[[], Any], bool]:
    """What is declared of what is trained, and whether it lies over frozen parameters."""
    if isinstance(role, Actor) and config.model.lora_rank:
        return lambda: overlay(config, model.declare()), True
    if isinstance(role, Critic) and role.freeze_trunk:
        return lambda: {VALUE_HEAD: model.declare()[VALUE_HEAD]}, True
    return model.declare, False


def frozen(config: Config, params: Params) -> Params:
    """The actor's first parameters as they are kept beneath what is trained."""
    return quantize_kernels(beneath(params)) if config.model.quantize_base == "int8" else beneath(params)


def beneath(params: Params) -> Params:
    """Of a model's parameters, or their declaration, those over which an overlay lies: without what is trained whole
    beside it."""
    return {name: leaf for name, leaf in params.items() if name not in TRAINED_WHOLE}


def declare_frozen(config: Config, model: Model) -> Params:
    """The declaration of `frozen`'s result."""
    declaration = beneath(model.declare())
    return declare_quantized(declaration) if config.model.quantize_base == "int8" else declaration


def merged(config: Config, params: Params) -> Params:
    """The parameters of an ordinary model: with what a LoRA overlay adds written into the kernels."""
    return merge(params, config.model.lora_alpha / config.model.lora_rank) if config.model.lora_rank else params


def enter(config: Config, params: Params) -> Params:
    return params if config.model.scan_layers or "layers" not in params else unstack_layers(params)


def leave(config: Config, grads: Params) -> Params:
    return grads if config.model.scan_layers or "layers" not in grads else stack_layers(grads)


# Losses and updates


def actor_loss(config: Config, actor: Model, layout: Layout, packed_width: int | None = None) -> LossFn:
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
        packed_width=packed_width,
    )


def critic_loss(config: Config, critic: Model, packed_width: int | None = None) -> LossFn:
    """The critic's loss as configured."""
    c = config.critic
    return make_critic_loss(
        critic,
        cliprange_value=c.cliprange_value,
        aggregation=c.loss_agg_mode,
        scale_factor=float(config.rollout.response_length),
        packed_width=packed_width,
    )


def make_sft(config: Config, actor: Model, layout: Layout, total_steps: int) -> Training:
    """The actor trained on given responses, one to a prompt."""
    loss_of = partial(
        make_sft_loss,
        actor,
        aggregation=config.actor.loss_agg_mode or "token-mean",
        scale_factor=config.actor.loss_scale_factor,
        chunk_tokens=config.model.logprob_chunk * layout.batch_shards,
    )
    return make_training(config, config.actor, actor, lambda w: loss_of(packed_width=w), layout, total_steps, n=1)


def make_reward_training(config: Config, model: Model, layout: Layout, total_steps: int) -> Training:
    """A reward model trained on pairs of responses, two to a prompt.

    Raises:
      UserError: micro-batches would part a pair.
    """
    loss_of = partial(make_reward_model_loss, model, center_coef=config.reward.model.center_coefficient)
    rows, micro = 2 * config.actor.mini_batch_size, config.actor.micro_batch_size
    per_device = micro or rows // layout.batch_shards
    if per_device % 2 or rows % (per_device * layout.batch_shards):
        raise UserError(
            f"config.actor.micro_batch_size = {micro}, config.actor.mini_batch_size = {config.actor.mini_batch_size}: "
            f"each of {layout.batch_shards} shard(s) takes whole pairs, two rows each: rows a micro-batch must be even "
            f"and divide the {rows} rows of a mini-batch"
        )
    return make_training(config, config.actor, model, lambda w: loss_of(packed_width=w), layout, total_steps, n=2)


def make_training(
    config: Config,
    role: Actor | Critic,
    model: Model,
    loss_of: Callable[[int | None], LossFn],
    layout: Layout,
    steps: int,
    n: int | None = None,
) -> Training:
    """How `model` is trained in its role.

    Args:
      loss_of: packed_width -> its loss, see `score_tokens`.
      n: responses to each prompt; None is `rollout.n`.
    """
    optimizer = role.optimizer if isinstance(role, Critic) else config.optimizer
    prompts, size = config.data.train_batch_size, role.mini_batch_size
    count = role.epochs * (prompts // size)
    total = steps * count
    schedule, transform = make_schedule(optimizer, total), make_optimizer(optimizer, total)
    n = n or config.rollout.n
    parts, group = split_rows(size * n, n, role.micro_batch_size, layout)
    # Not metrics of rows: they must not add up over micro-batches.
    constants = {"kl_coef": role.kl_loss_coef} if isinstance(role, Actor) and role.use_kl_loss else {}

    def describe(state: TrainState) -> Metrics:
        found = constants | {"lr": schedule(state.updates)}
        return {name: jnp.asarray(value, jnp.float32) for name, value in found.items()}

    update_of = partial(
        make_update,
        optimizer=transform,
        micro_batches=parts,
        group=group,
        enter=partial(enter, config),
        leave=partial(leave, config),
        constrain_rows=layout.constrain_rows,
        describe=describe,
    )
    order = partial(mini_batches, prompts=prompts, size=size, epochs=role.epochs, shuffle=role.shuffle)
    declare, frozen = _trained(config, role, model)
    return Training(
        declare=declare,
        frozen=frozen,
        optimizer=transform,
        update=update_of(loss_of(None)),
        order=order,
        count=count,
        micro_batches=parts,
        group=group,
        packed={width: update_of(loss_of(width)) for width in widths(config, group)},
    )


def widths(config: Config, group: int) -> tuple[int, ...]:
    """The slots of packed lines of `group` responses, as configured."""
    m = config.model
    return packed_widths(m.packed_widths if m.use_remove_padding else (), group, config.rollout.response_length)


def split_rows(rows: int, n: int, rows_per_device: int, layout: Layout) -> tuple[int, int]:
    """Micro-batches that `rows` make at `rows_per_device` at a time (0: all at once), and the responses that share a
    prompt.

    Those are all n, or as many as let every device have whole groups.
    """
    per_device = rows_per_device or max(rows // layout.batch_shards, 1)
    at_once = per_device * layout.batch_shards
    if rows % at_once:
        raise ValueError(f"{rows} rows do not divide into micro-batches of {at_once} ({per_device} per device)")
    return rows // at_once, math.gcd(n, per_device)

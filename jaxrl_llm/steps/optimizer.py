"""AdamW with a schedule, a warm-up and gradient clipping, as optax composes them."""

from __future__ import annotations

from typing import Any

import jax
import optax

from jaxrl_llm.config import Optimizer


def make_schedule(settings: Optimizer, total_updates: int) -> optax.Schedule:
    """The learning rate after so many optimizer updates: a linear rise from lr / warmup_steps, then constant,
    linear or cosine decay."""
    end = max(settings.decay_steps or total_updates, settings.warmup_steps + 1)
    length, floor = end - settings.warmup_steps, settings.lr * settings.min_lr_ratio
    match settings.schedule:
        case "linear":
            after = optax.linear_schedule(settings.lr, floor, length)
        case "cosine":
            after = optax.cosine_decay_schedule(settings.lr, length, settings.min_lr_ratio)
        case _:
            after = optax.constant_schedule(settings.lr)
    if not settings.warmup_steps:
        return after
    # Update 0 already moves: the rise ends at the full rate on update `warmup_steps`.
    rise = optax.linear_schedule(settings.lr / settings.warmup_steps, settings.lr, max(settings.warmup_steps - 1, 1))
    return optax.join_schedules([rise, after], [settings.warmup_steps])


def make_optimizer(settings: Optimizer, total_updates: int) -> optax.GradientTransformation:
    """Clip to `max_grad_norm`, then AdamW; decay on matrices only."""
    adamw = optax.adamw(
        make_schedule(settings, total_updates),
        b1=settings.b1,
        b2=settings.b2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        mask=_decayed,
    )
    clip = [optax.clip_by_global_norm(settings.max_grad_norm)] if settings.max_grad_norm > 0 else []
    return optax.chain(*clip, adamw)


def _decayed(params: Any) -> Any:
    """True on kernels and embeddings; norms and biases (by name: stacked layers hide their rank) are left alone."""

    def one(path: Any, leaf: Any) -> bool:
        del leaf
        name = str(getattr(path[-1], "key", path[-1]))
        return not (name.endswith("norm") or name in ("bias", "scale"))  # flax calls a norm's weight scale

    return jax.tree_util.tree_map_with_path(one, params)

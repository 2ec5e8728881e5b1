"""The optimizer update: one program for actor, critic and whatever else has a loss over rows.

A mini-batch's loss is a sum over its rows divided by denominators of the whole mini-batch (`Norm`), fixed before the
rows are split. Micro-batches, accumulation and shards therefore add up to one and the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.algorithms.losses import Norm
from jaxrl_llm.models.lora import join
from jaxrl_llm.types import Array, Batch, Params, TrainState

Metrics = dict[str, Array]


class LossFn(Protocol):
    """(params, rows, norm, key) -> (loss, metrics), all sums over the rows divided by the whole mini-batch's norm.

    A metric adds up over micro-batches, unless its name ends in "_max" or "_min".
    """

    def __call__(self, params: Params, rows: Batch, norm: Norm, key: Array) -> tuple[Array, Metrics]: ...


class UpdateFn(Protocol):
    """(state, mini_batch, key, frozen parameters or None) -> (state, metrics)."""

    def __call__(
        self, state: TrainState, batch: Batch, key: Array, frozen: Params | None = None
    ) -> tuple[TrainState, Metrics]: ...


def make_update(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    *,
    micro_batches: int = 1,
    group: int = 0,
    enter: Callable[[Params], Params] = lambda params: params,
    leave: Callable[[Params], Params] = lambda grads: grads,
    constrain_rows: Callable[[Any], Any] = lambda tree: tree,
    describe: Callable[[TrainState], Metrics] = lambda state: {},
) -> UpdateFn:
    """update(state, mini_batch, key, frozen=None) -> (state, metrics): one gradient over a mini-batch, one optimizer
    step.

    The loss is of the state's parameters laid over the frozen ones (`lora.join`), which have no gradient.

    Args:
      loss_fn: see `LossFn`.
      optimizer: its clipping included; gets gradients in the parameters' dtype.
      micro_batches: into how many parts the rows are split, computed one after the other.
      group: responses that share one computation of their prompt, a divisor of the batch's n; 0 is n. Micro-batches are
        made of whole groups, whose number they must divide.
      enter, leave: change the parameters' layout for the loss and the gradient's layout back (unstacked layers).
      constrain_rows: keeps rows spread over the mesh.
      describe: metrics of the state that an update starts from, such as its learning rate.

    An update with a non-finite loss or gradient, or without any token in the loss mask, leaves parameters and optimizer
    state as they were, bit for bit. The former counts in `skipped`; metrics: `grad_norm` (before clipping),
    `skipped_updates`.
    """

    def gradient(params: Params, frozen: Params | None, batch: Batch, key: Array) -> tuple[Params, Array, Metrics]:
        assert batch.loss_mask is not None
        norm = Norm.of(batch.loss_mask)

        def loss_of(params: Params, rows: Batch, norm: Norm, key: Array) -> tuple[Array, Metrics]:
            return loss_fn(join(params, frozen), rows, norm, key)

        value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
        if micro_batches == 1:
            (loss, metrics), grads = value_and_grad(params, batch, norm, key)
            return grads, loss, metrics
        parts = batch.split(micro_batches)

        def accumulate(total: Any, per_part: tuple[Array, Batch]) -> tuple[Any, None]:
            index, rows = per_part
            sums, loss_sum, metric_sum = total
            (loss, metrics), grads = value_and_grad(params, constrain_rows(rows), norm, jax.random.fold_in(key, index))
            return (jax.tree.map(jnp.add, sums, grads), loss_sum + loss, combine_metrics(metric_sum, metrics)), None

        first = jax.tree.map(lambda x: x[0], parts)
        loss_shape, shapes = jax.eval_shape(loss_of, params, first, norm, key)
        sums = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params)
        start = (sums, jnp.zeros((), loss_shape.dtype), {name: _neutral(name, s) for name, s in shapes.items()})
        (grads, loss, metrics), _ = jax.lax.scan(accumulate, start, (jnp.arange(micro_batches), parts))
        return jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params), loss, metrics

    def update(state: TrainState, batch: Batch, key: Array, frozen: Params | None = None) -> tuple[TrainState, Metrics]:
        # A mini-batch picks its prompts from all shards; here its rows are spread again.
        rows = constrain_rows(batch.regroup(group or batch.n))
        entered = None if frozen is None else enter(frozen)
        grads, loss, metrics = gradient(enter(state.params), entered, rows, key)
        grads = leave(grads)
        # In float32 at least: squares of bfloat16 gradients would keep three digits.
        grad_norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads))
        described = describe(state)
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
        # Without any token there is nothing to learn, and yet old moments and weight decay would move the parameters.
        assert batch.loss_mask is not None
        applied = finite & batch.loss_mask.any()
        # Zeros instead of NaN, so that nothing non-finite is computed on the way to being thrown away.
        grads = jax.tree.map(lambda g: jnp.where(finite, g, 0), grads)
        changes, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, changes)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, old)

        state = TrainState(
            params=keep(params, state.params),
            opt_state=keep(opt_state, state.opt_state),
            updates=state.updates + applied,
            skipped=jnp.where(finite, 0, state.skipped + 1),
        )
        return state, {"loss": loss, **metrics, **described, "grad_norm": grad_norm, "skipped_updates": 1.0 - finite}

    return update


def combine_metrics(first: Metrics, second: Metrics) -> Metrics:
    """Metrics of two micro-batches as those of both."""

    def one(name: str) -> Array:
        if name.endswith("_max"):
            return jnp.maximum(first[name], second[name])
        return jnp.minimum(first[name], second[name]) if name.endswith("_min") else first[name] + second[name]

    return {name: one(name) for name in first}


def _neutral(name: str, like: jax.ShapeDtypeStruct) -> Array:
    """What `combine_metrics` leaves another value unchanged by."""
    start = -jnp.inf if name.endswith("_max") else jnp.inf if name.endswith("_min") else 0
    return jnp.full(like.shape, start, like.dtype)


def mini_batches(key: Array, *, prompts: int, size: int, epochs: int, shuffle: bool) -> Array:
    """The prompts of each mini-batch, every epoch in an order of its own.

    Args:
      key: consumed; not used where `shuffle` is False.
      prompts: of the batch.
      size: prompts a mini-batch, a divisor of `prompts`.

    Returns:
      int32 [epochs · prompts / size, size]

    >>> mini_batches(jax.random.key(0), prompts=4, size=2, epochs=1, shuffle=False).tolist()
    [[0, 1], [2, 3]]
    """
    order = jnp.arange(prompts, dtype=jnp.int32)
    epoch_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(epochs))
    orders = jax.vmap(lambda k: jax.random.permutation(k, order) if shuffle else order)(epoch_keys)
    return orders.reshape(-1, size)


def run_updates(
    update: UpdateFn, state: TrainState, batch: Batch, key: Array, indices: Array, frozen: Params | None = None
) -> tuple[TrainState, Metrics]:
    """The updates of one phase, as a scan over the rows of `indices`; metrics are summed up by `summarize`.

    Args:
      batch: with the evidence that the update's loss reads.
      key: consumed.
      indices: int32 [U, g], the prompts of each of U mini-batches.
      frozen: parameters that the state's lie over.

    A scan makes one program of it. The trainer calls the same `update` once per mini-batch instead (see `update_keys`).
    """

    def one(state: TrainState, per_update: tuple[Array, Array]) -> tuple[TrainState, Metrics]:
        prompts, update_key = per_update
        return update(state, batch.select(prompts), update_key, frozen)

    state, metrics = jax.lax.scan(one, state, (indices, update_keys(key, indices.shape[0])))
    return state, summarize(metrics)


def update_keys(key: Array, count: int) -> Array:
    """One key per update of a phase: the phase's folded with the update's index."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))


def summarize(metrics: Metrics, xp: Any = jnp) -> Metrics:
    """Metrics [U] of a phase's updates as one each: extremes of extremes, the count of skipped ones, means of the rest.

    A skipped update's metrics are not numbers one would want in a mean: they count only if every update was skipped.
    `xp` is jax.numpy, or numpy for arrays on the host.
    """
    applied = metrics["skipped_updates"] == 0
    weights = xp.where(applied.any(), applied, True)

    def one(name: str, values: Array) -> Array:
        if name == "skipped_updates":
            return values.sum()
        if name.endswith("_max"):
            return xp.where(weights, values, -xp.inf).max()
        if name.endswith("_min"):
            return xp.where(weights, values, xp.inf).min()
        return xp.where(weights, values, 0).sum() / weights.sum()

    return {name: one(name, values) for name, values in metrics.items()}

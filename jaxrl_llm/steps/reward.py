"""The reward phase's arrays: scores of host functions and of JAX functions, weighed and put on their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import chex
import jax.numpy as jnp

from jaxrl_llm.types import Array, Batch

# (responses [B, R], mask [B, R], record_arrays [B, …]) -> scores [B], or [B, R] for one per token
JaxReward = Callable[[Array, Array, Mapping[str, Array]], Array]


def write_scores(
    batch: Batch,
    scores: Array,
    row_valid: Array,
    *,
    weights: tuple[float, ...],
    jax_rewards: Mapping[int, JaxReward] | None = None,
) -> Batch:
    """Writes `scores`, `row_valid` and `token_level_scores`.

    Args:
      scores: float32 [B, K], one column per reward function; those of `jax_rewards` are filled in here, but for rows
        with NaN, which the function does not score.
      row_valid: bool [B], False where a reward failed; so has one of `jax_rewards` where its score is not finite.
      weights: K factors of the columns.
      jax_rewards: column -> function.

    The weighted sum sits on the last of the response's own tokens; a function that scores per token puts its weighted
    scores where they are. Rows that are not valid, and filler rows, score 0 whatever stands in them.
    """
    rows, width = batch.responses.shape
    chex.assert_shape(scores, (rows, len(weights)))
    chex.assert_shape(row_valid, (rows,))
    row_valid = row_valid & jnp.repeat(batch.prompt_valid, batch.n)
    last = jnp.where(batch.response_mask, jnp.arange(width)[None, :], -1).max(1)
    on_last = jnp.arange(width)[None, :] == last[:, None]
    given = [scores[:, k].astype(jnp.float32) for k in range(len(weights))]
    for k, reward_fn in (jax_rewards or {}).items():
        given[k] = _call(reward_fn, batch, ~jnp.isnan(given[k]))
        row_valid &= jnp.isfinite(given[k]).reshape(rows, -1).all(1)
    columns, token_level = [], jnp.zeros((rows, width), jnp.float32)
    for weight, column in zip(weights, given, strict=True):
        if column.ndim == 2:
            tokens = jnp.where(row_valid[:, None], column, 0)
            column = tokens.sum(1)
        else:
            column = jnp.where(row_valid, column, 0)
            tokens = jnp.where(on_last, column[:, None], 0)
        columns.append(column)
        token_level = token_level + weight * tokens
    return batch.write("reward", scores=jnp.stack(columns, 1), row_valid=row_valid, token_level_scores=token_level)


def _call(reward_fn: JaxReward, batch: Batch, applies: Array) -> Array:
    """The function's scores, float32 [B] or [B, R]; 0 on rows that it does not apply to, and outside the mask."""
    rows = batch.regroup(1)
    found = jnp.asarray(reward_fn(rows.responses, rows.response_mask, rows.record_arrays), jnp.float32)
    if found.shape not in ((batch.num_rows,), batch.responses.shape):
        shapes = f"[{batch.num_rows}] or {list(batch.responses.shape)}"
        raise ValueError(f"reward {reward_fn!r}: expected scores of shape {shapes}, found {list(found.shape)}")
    return jnp.where(applies if found.ndim == 1 else rows.response_mask & applies[:, None], found, 0)

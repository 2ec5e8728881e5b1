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
      scores: float32 [B, K], one column per reward function; those of `jax_rewards` are filled in here.
      row_valid: bool [B], False where a reward failed.
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
    columns, token_level = [], jnp.zeros((rows, width), jnp.float32)
    arrays = batch.regroup(1)
    for k, weight in enumerate(weights):
        column = scores[:, k].astype(jnp.float32)
        if jax_rewards and k in jax_rewards:
            column = jax_rewards[k](arrays.responses, batch.response_mask, arrays.record_arrays).astype(jnp.float32)
        if column.ndim == 2:
            tokens = jnp.where(batch.response_mask & row_valid[:, None], column, 0)
            column = tokens.sum(1)
        else:
            column = jnp.where(row_valid, column, 0)
            tokens = jnp.where(on_last, column[:, None], 0)
        columns.append(column)
        token_level = token_level + weight * tokens
    return batch.write("reward", scores=jnp.stack(columns, 1), row_valid=row_valid, token_level_scores=token_level)

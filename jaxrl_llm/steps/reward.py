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
    greedy: Batch | None = None,
) -> Batch:
    """Writes `scores`, `scores_mask`, `row_valid` and `token_level_scores`.

    Args:
      scores: float32 [B, K], one column per reward function, NaN where a function does not score the row; those of
        `jax_rewards` are filled in here.
      row_valid: bool [B], False where a reward failed; so has one of `jax_rewards` where its score is not finite.
      weights: K factors of the columns.
      jax_rewards: column -> function.
      greedy: the same prompts with one greedy response each, scored; its scores are written as `reward_baselines`, and
        where one has failed the prompt's rows are not valid either.

    The weighted sum sits on the last of the response's own tokens; a function that scores per token puts its weighted
    scores where they are. Rows that are not valid, and filler rows, score 0 whatever stands in them.

    Raises:
      AssertionError: the shapes are not these.
      ValueError: a function of `jax_rewards` returned another shape.
    """
    rows, width = batch.responses.shape
    chex.assert_shape(scores, (rows, len(weights)))
    chex.assert_shape(row_valid, (rows,))
    row_valid = row_valid & jnp.repeat(batch.prompt_valid, batch.n)
    last = jnp.where(batch.response_mask, jnp.arange(width)[None, :], -1).max(1)
    on_last = jnp.arange(width)[None, :] == last[:, None]
    baselines = None
    if greedy is not None:
        greedy.require("token_level_scores", "row_valid", phase="reward")
        assert greedy.token_level_scores is not None and greedy.row_valid is not None
        chex.assert_equal(greedy.num_rows, batch.num_prompts)
        baselines = jnp.repeat(greedy.token_level_scores.sum(1), batch.n)
        row_valid &= jnp.repeat(greedy.row_valid, batch.n)
    applies = ~jnp.isnan(scores)
    given = [jnp.where(applies[:, k], scores[:, k], 0).astype(jnp.float32) for k in range(len(weights))]
    for k, reward_fn in (jax_rewards or {}).items():
        given[k] = _call(reward_fn, batch, applies[:, k])
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
    return batch.write(
        "reward",
        scores=jnp.stack(columns, 1),
        scores_mask=applies,
        row_valid=row_valid,
        token_level_scores=token_level,
        reward_baselines=baselines,
    )


def _call(reward_fn: JaxReward, batch: Batch, applies: Array) -> Array:
    """The function's scores, float32 [B] or [B, R]; 0 on rows that it does not apply to, and outside the mask."""
    rows = batch.regroup(1)
    found = jnp.asarray(reward_fn(rows.responses, rows.response_mask, rows.record_arrays), jnp.float32)
    if found.shape not in ((batch.num_rows,), batch.responses.shape):
        shapes = f"[{batch.num_rows}] or {list(batch.responses.shape)}"
        raise ValueError(f"reward {reward_fn!r}: expected scores of shape {shapes}, found {list(found.shape)}")
    return jnp.where(applies if found.ndim == 1 else rows.response_mask & applies[:, None], found, 0)

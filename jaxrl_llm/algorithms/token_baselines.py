"""Baselines of least variance, one for each prompt and token (optimal token baseline, Li et al. 2026,
https://arxiv.org/abs/2602.07078).

See `advantages` for the conventions that all estimators share.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.masked import group_lead, group_max, group_stats, group_sum, sum_to_go, zero_outside

Array = jax.Array


def optimal_token_baseline(
    rewards: Array,
    mask: Array,
    uid: Array,
    old_log_probs: Array,
    sum_pi_squared: Array,
    rollout_is_weights: Array | None = None,
    *,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> tuple[Array, Array]:
    """A_t = G_t − B_t: G_t is the reward to go, B_t = Σ_g G_t W_t / (Σ_g W_t + ε) over the group's rows at token t.

    W_t = Σ_{j ≤ t} (1 − 2 π_j + Σ_v π_j(v)²) ρ_j² is the accumulated squared norm of the score function, which makes
    B_t the baseline of least variance. Positions are those of the frame: see `tir_optimal_token_baseline` for responses
    that tool output interrupts.

    Args:
      rewards, old_log_probs, sum_pi_squared: float [B, R]
      mask: bool [B, R]
      uid: int [B]
      rollout_is_weights: float [B, R], ρ; None means 1.
      handle_zero_tail: whether the part of a group's longest response that has no sibling is left without a baseline
        (True), or its own return is the baseline and the advantage there 0.
      epsilon: added to the denominator.

    Returns:
      advantages and the rewards to go. Where all rewards to go of a group are one number the advantages are exactly 0.

    >>> rewards, mask, uid = jnp.array([[1.0], [0.0]]), jnp.ones((2, 1), bool), jnp.array([1, 1])
    >>> half = jnp.full((2, 1), 0.5)
    >>> print(optimal_token_baseline(rewards, mask, uid, jnp.log(half), half)[0].round(3))
    [[ 0.5]
     [-0.5]]
    """
    returns = sum_to_go(rewards, mask)
    weights = _path_weights(mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    return _advantages(returns, weights, mask, uid, handle_zero_tail, epsilon), returns


def tir_optimal_token_baseline(
    rewards: Array,
    mask: Array,
    uid: Array,
    old_log_probs: Array,
    sum_pi_squared: Array,
    rollout_is_weights: Array | None = None,
    *,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> tuple[Array, Array]:
    """`optimal_token_baseline` with the k-th token of the mask of one row compared to the k-th of the others,
    whatever tool output stands between (tool-integrated reasoning). Arguments and results as there.

    >>> rewards, mask = jnp.array([[0.0, 1.0], [0.0, 0.0]]), jnp.array([[False, True], [True, False]])
    >>> half = jnp.full((2, 2), 0.5)
    >>> print(tir_optimal_token_baseline(rewards, mask, jnp.array([1, 1]), jnp.log(half), half)[0].round(3))
    [[ 0.   0.5]
     [-0.5  0. ]]
    """
    returns = sum_to_go(rewards, mask)
    weights = _path_weights(mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    mask = mask.astype(bool)
    # A stable sort moves the tokens of the mask to the front; its inverse brings the advantages back.
    order = jnp.argsort(~mask, axis=-1, stable=True)
    front, front_weights, front_mask = (jnp.take_along_axis(x, order, axis=-1) for x in (returns, weights, mask))
    advantages = _advantages(front, front_weights, front_mask, uid, handle_zero_tail, epsilon)
    return jnp.take_along_axis(advantages, jnp.argsort(order, axis=-1, stable=True), axis=-1), returns


def _path_weights(mask: Array, old_log_probs: Array, sum_pi_squared: Array, rollout_is_weights: Array | None) -> Array:
    """W_t, [B, R]; 0 outside the mask."""
    pi, squared = zero_outside(mask, jnp.exp(zero_outside(mask, old_log_probs)[0]), sum_pi_squared)
    weights = zero_outside(mask, 1 - 2 * pi + squared)[0]
    if rollout_is_weights is not None:
        weights = weights * jnp.square(zero_outside(mask, rollout_is_weights)[0])
    return zero_outside(mask, jnp.cumsum(weights, axis=-1))[0]


def _advantages(
    returns: Array, weights: Array, mask: Array, uid: Array, handle_zero_tail: bool, epsilon: float
) -> Array:
    mask = mask.astype(bool)
    # Taken from the mean at each token, so that large returns lose no digits in the difference.
    mean = group_stats(returns, uid, mask).mean
    centered = jnp.where(mask, returns - mean, 0)
    total = group_sum(weights, uid) + epsilon
    advantages = centered - group_sum(centered * weights, uid) / total + mean * epsilon / total
    if handle_zero_tail:
        length = mask.sum(-1).astype(returns.dtype)
        longest, second = group_lead(length, uid, length > 0)
        tail = longest[:, None] & (jnp.arange(mask.shape[-1])[None, :] >= second[:, None])
        advantages = jnp.where(tail, returns, advantages)
    return jnp.where(mask & ~_without_spread(returns, mask, uid)[:, None], advantages, 0)


def _without_spread(returns: Array, mask: Array, uid: Array) -> Array:
    """bool [B]: all returns of the row's group, at any token, are one number, or the group has one row."""
    high = group_max(jnp.where(mask, returns, -jnp.inf).max(-1), uid)
    low = -group_max(jnp.where(mask, -returns, -jnp.inf).max(-1), uid)
    return (high == low) | (group_sum(mask.any(-1).astype(jnp.int32), uid) < 2)

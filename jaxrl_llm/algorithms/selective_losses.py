"""Policy losses that select tokens over a whole mini-batch, which therefore cannot be split into micro-batches.

Calling convention, arguments and metrics as in `policy_losses`, but for the log-ratio: as in its authors' code it is
not clipped to ±20, only kept from overflowing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import Norm, token_mean
from jaxrl_llm.algorithms.log_probs import OVERFLOW_LIMIT, absolute
from jaxrl_llm.algorithms.masked import masked_mean, zero_outside
from jaxrl_llm.algorithms.policy_losses import LossAndMetrics, weigh_and_aggregate

Array = jax.Array


def clip_cov(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    norm: Norm,
    *,
    key: Array,
    aggregation: str = "token-mean",
    scale_factor: float | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    rollout_is_weights: Array | None = None,
) -> LossAndMetrics:
    """Clip-Cov (Cui et al. 2025, https://arxiv.org/abs/2505.22617): PPO's clipped loss, without a few tokens drawn
    from those whose covariance (A − mean A)(log π − mean log π) lies strictly between bounds, and which drive the
    entropy down.

    Args:
      key: PRNG key; consumed.
      clip_cov_ratio: tokens drawn, as a fraction of all; at least one.
      clip_cov_lb, clip_cov_ub: bounds of the covariance.

    Returns:
      `pg_clipfrac` counts the tokens drawn.

    >>> new, mask = jnp.array([[-1.0, -3.0]]), jnp.ones((1, 2), bool)
    >>> advantages = jnp.array([[2.0, -2.0]])
    >>> loss, metrics = clip_cov(new, new, advantages, mask, Norm.of(mask), key=jax.random.key(0))
    >>> float(metrics["pg_clipfrac"])
    0.5
    """
    log_probs, old_log_probs, advantages = zero_outside(mask, log_probs, old_log_probs, advantages)
    log_ratio = jnp.minimum(log_probs - old_log_probs, OVERFLOW_LIMIT)
    ratio = jnp.exp(log_ratio)
    plain, clipped = -advantages * ratio, -advantages * jnp.clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    covariance = _covariance(log_probs, advantages, mask)
    eligible = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & mask.astype(bool) & (clipped <= plain)
    drawn = _highest(jax.random.uniform(key, mask.shape), eligible, _count(clip_cov_ratio, mask))
    metrics = {"pg_clipfrac": token_mean(drawn, mask, norm), "ppo_kl": token_mean(-log_ratio, mask, norm)}
    losses = jnp.where(drawn, 0, jnp.maximum(plain, clipped))
    return weigh_and_aggregate(losses, mask, norm, aggregation, scale_factor, rollout_is_weights), metrics


def kl_cov(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    norm: Norm,
    *,
    aggregation: str = "token-mean",
    scale_factor: float | None = None,
    kl_cov_ratio: float = 2e-4,
    ppo_kl_coef: float = 1.0,
    rollout_is_weights: Array | None = None,
) -> LossAndMetrics:
    """KL-Cov (Cui et al. 2025, https://arxiv.org/abs/2505.22617): −A r, with + coef · |new − old| on the tokens of
    the highest covariance (A − mean A)(log π − mean log π).

    Args:
      kl_cov_ratio: tokens penalized, as a fraction of all; at least one, unless it is 0.
      ppo_kl_coef: coef.

    Returns:
      `ppo_kl` is the mean of |new − old|.

    >>> new, mask = jnp.array([[-1.0, -3.0]]), jnp.ones((1, 2), bool)
    >>> loss, _ = kl_cov(new, new - 0.5, jnp.zeros((1, 2)), mask, Norm.of(mask), ppo_kl_coef=2.0)
    >>> float(loss)  # one token in two
    0.5
    """
    log_probs, old_log_probs, advantages = zero_outside(mask, log_probs, old_log_probs, advantages)
    log_ratio = jnp.minimum(log_probs - old_log_probs, OVERFLOW_LIMIT)
    distance = absolute(log_ratio)
    losses = -advantages * jnp.exp(log_ratio)
    if kl_cov_ratio > 0:
        covariance = _covariance(log_probs, advantages, mask)
        penalized = _highest(covariance, mask.astype(bool), _count(kl_cov_ratio, mask))
        losses = losses + jnp.where(penalized, ppo_kl_coef * distance, 0)
    metrics = {"ppo_kl": token_mean(distance, mask, norm)}
    return weigh_and_aggregate(losses, mask, norm, aggregation, scale_factor, rollout_is_weights), metrics


def top_entropy_mask(entropys: Array, mask: Array, quantile: float) -> Array:
    """The tokens of the highest entropy, the forks of a text (Wang et al. 2025, https://arxiv.org/abs/2506.01939).

    A loss with this mask and the `Norm` of the whole mask is TRL's `top_entropy_quantile`.

    Args:
      entropys: float [B, R], nats.
      mask: bool [B, R], of the whole mini-batch.
      quantile: fraction kept, in (0, 1]; 1 keeps all. Ties at the threshold are kept.

    Returns:
      bool [B, R].

    >>> top_entropy_mask(jnp.array([[0.1, 2.0, 0.3, 9.0]]), jnp.array([[True, True, True, False]]), 0.4).tolist()
    [[False, True, False, False]]
    """
    mask = mask.astype(bool)
    ordered = jnp.sort(jnp.where(mask, entropys, jnp.inf).reshape(-1))
    place = (1 - quantile) * jnp.maximum(mask.sum() - 1, 0)
    low = jnp.floor(place).astype(jnp.int32)
    high = jnp.ceil(place).astype(jnp.int32)
    # Linear interpolation between the neighbours, written so that two infinities of an empty mask do not meet.
    share = (place - low).astype(entropys.dtype)
    threshold = jnp.where(high > low, (1 - share) * ordered[low] + share * ordered[high], ordered[low])
    return mask & (jnp.where(mask, entropys, -jnp.inf) >= threshold)


def _covariance(log_probs: Array, advantages: Array, mask: Array) -> Array:
    log_probs = jax.lax.stop_gradient(log_probs)
    return (advantages - masked_mean(advantages, mask)) * (log_probs - masked_mean(log_probs, mask))


def _count(ratio: float, mask: Array) -> Array:
    return jnp.maximum(jnp.floor(ratio * mask.astype(bool).sum()), 1)


def _highest(x: Array, eligible: Array, count: Array) -> Array:
    """bool: the `count` eligible entries with the highest x; the first of equals."""
    order = jnp.argsort(-jnp.where(eligible, x, -jnp.inf).reshape(-1), stable=True)
    rank = jnp.argsort(order, stable=True).reshape(x.shape)
    return eligible & (rank < count)

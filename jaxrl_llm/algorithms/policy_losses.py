"""Policy losses, token by token.

All have one calling convention (see `losses.PolicyLoss`) and these arguments:

  log_probs, old_log_probs, advantages: float [B, R], new and old in nats.
  mask: bool [B, R], the loss mask.
  norm: denominators of the whole mini-batch.
  aggregation, scale_factor: as in `aggregate`. The default is what the loss's authors use.
  rollout_is_weights: float [B, R], multiplied to each token's loss; None means 1.

They return a scalar and a dict of scalars: `pg_clipfrac` (tokens whose loss the clip changes), `pg_clipfrac_lower`
(those the second bound changes), `ppo_kl` (mean old − new, of d where the loss is), each normalized by `norm`, so
that parts of a mini-batch add up. Throughout d = clip(new − old, ±20), r = exp(d), and A is the advantage.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import Norm, aggregate, token_mean
from jaxrl_llm.algorithms.log_probs import LOG_RATIO_LIMIT
from jaxrl_llm.algorithms.masked import masked_mean, spread, zero_outside

Array = jax.Array
LossAndMetrics = tuple[Array, dict[str, Array]]


def vanilla(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    norm: Norm,
    *,
    aggregation: str = "token-mean",
    scale_factor: float | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
    delta: float | None = None,
    rollout_is_weights: Array | None = None,
) -> LossAndMetrics:
    """PPO (Schulman et al. 2017, https://arxiv.org/abs/1707.06347) with a dual clip (Ye et al. 2020,
    https://arxiv.org/abs/1912.09729) and bounds that may differ (DAPO, https://arxiv.org/abs/2503.14476):

    max(−A r, −A clip(r, 1 − low, 1 + high)), and where A < 0 at most −A c.

    Args:
      clip_ratio_low, clip_ratio_high: how far below and above 1 the ratio may move with effect.
      clip_ratio_c: c > 1.
      delta: r is at most this before anything else (INTELLECT-2's two-sided clip, https://arxiv.org/abs/2505.07291).

    >>> new, old, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.0, -2.0]]), jnp.ones((1, 2), bool)
    >>> loss, metrics = vanilla(new, old, jnp.ones((1, 2)), mask, Norm.of(mask), clip_ratio_high=0.25)
    >>> float(loss), float(metrics["pg_clipfrac"])  # ratios 1 and e, the second clipped to 1.25
    (-1.125, 0.5)
    """
    log_probs, old_log_probs, advantages = zero_outside(mask, log_probs, old_log_probs, advantages)
    log_ratio = _log_ratio(log_probs, old_log_probs)
    ratio = jnp.exp(log_ratio)
    bounded = ratio if delta is None else jnp.minimum(ratio, delta)
    plain, clipped = -advantages * bounded, -advantages * jnp.clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    upper, lower = jnp.maximum(plain, clipped), -advantages * clip_ratio_c
    losses = jnp.where(advantages < 0, jnp.minimum(lower, upper), upper)
    metrics = {
        "pg_clipfrac": token_mean(clipped > plain, mask, norm),
        "pg_clipfrac_lower": token_mean((upper > lower) & (advantages < 0), mask, norm),
        "ppo_kl": token_mean(-log_ratio, mask, norm),
    }
    return weigh_and_aggregate(losses, mask, norm, aggregation, scale_factor, rollout_is_weights), metrics


def gspo(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    norm: Norm,
    *,
    aggregation: str = "seq-mean-token-mean",
    scale_factor: float | None = None,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
    rollout_is_weights: Array | None = None,
) -> LossAndMetrics:
    """GSPO-token (Zheng et al. 2025, https://arxiv.org/abs/2507.18071): one ratio a row, the geometric mean of its
    tokens'.

    r = exp(min(sg(mean_t(new − old)) + new − sg(new), 10)), clipped as in PPO; sg stops the gradient, so that each
    token's gradient flows through its own log-prob.

    >>> new, old, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.0, -1.0]]), jnp.ones((1, 2), bool)
    >>> float(gspo(new, old, jnp.ones((1, 2)), mask, Norm.of(mask))[0])
    -1.0
    """
    log_probs, old_log_probs, advantages = zero_outside(mask, log_probs, old_log_probs, advantages)
    difference = log_probs - old_log_probs
    row = spread(masked_mean(difference, mask, axis=-1), mask)
    ratio = jnp.exp(jnp.minimum(jax.lax.stop_gradient(row) + log_probs - jax.lax.stop_gradient(log_probs), 10.0))
    plain, clipped = -advantages * ratio, -advantages * jnp.clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    metrics = {"pg_clipfrac": token_mean(clipped > plain, mask, norm), "ppo_kl": token_mean(-difference, mask, norm)}
    losses = jnp.maximum(plain, clipped)
    return weigh_and_aggregate(losses, mask, norm, aggregation, scale_factor, rollout_is_weights), metrics


def geo_mean(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    norm: Norm,
    *,
    aggregation: str = "seq-mean-token-mean",
    scale_factor: float | None = None,
    clip_ratio_low: float = 0.4,
    clip_ratio_high: float = 0.4,
    rollout_is_weights: Array | None = None,
) -> LossAndMetrics:
    """GMPO (Zhao et al. 2025, https://arxiv.org/abs/2507.20673): −A r for a row, with r the geometric mean of token
    ratios whose logarithms are clipped to [−low, high] on the side where they would gain, and A the mean advantage.

    The row's loss stands on each of its tokens; importance weights enter as their geometric mean.

    >>> new, old, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.0, -1.0]]), jnp.ones((1, 2), bool)
    >>> float(geo_mean(new, old, jnp.ones((1, 2)), mask, Norm.of(mask))[0])
    -1.0
    """
    log_probs, old_log_probs, advantages = zero_outside(mask, log_probs, old_log_probs, advantages)
    difference = log_probs - old_log_probs
    sign = jnp.sign(advantages)
    within = jnp.clip(difference, -clip_ratio_low, clip_ratio_high)
    pessimistic = sign * jnp.minimum(sign * difference, sign * within)
    losses = -masked_mean(advantages, mask, axis=-1) * jnp.exp(masked_mean(pessimistic, mask, axis=-1))
    if rollout_is_weights is not None:
        weights = jnp.where(mask.astype(bool), rollout_is_weights, 1)
        losses = losses * jnp.exp(masked_mean(jnp.log(weights + 1e-10), mask, axis=-1))
    outside = difference != within
    metrics = {
        "pg_clipfrac": token_mean(outside & (advantages > 0), mask, norm),
        "pg_clipfrac_lower": token_mean(outside & (advantages < 0), mask, norm),
        "ppo_kl": token_mean(-difference, mask, norm),
    }
    return aggregate(spread(losses, mask), mask, aggregation, norm, scale_factor=scale_factor), metrics


def sapo(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    norm: Norm,
    *,
    aggregation: str = "seq-mean-token-mean",
    scale_factor: float | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    rollout_is_weights: Array | None = None,
) -> LossAndMetrics:
    """SAPO (https://arxiv.org/abs/2511.20347): a soft gate in place of the clip, −A · (4/τ) · sigmoid(τ (r − 1)).

    Args:
      tau_pos, tau_neg: τ > 0 where A > 0, and elsewhere: how fast the gradient fades as r leaves 1 (there it is that
        of r).

    >>> new, old, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.0, -1.0]]), jnp.ones((1, 2), bool)
    >>> float(sapo(new, old, jnp.ones((1, 2)), mask, Norm.of(mask))[0])
    -2.0
    """
    log_probs, old_log_probs, advantages = zero_outside(mask, log_probs, old_log_probs, advantages)
    log_ratio = _log_ratio(log_probs, old_log_probs)
    tau = jnp.where(advantages > 0, jnp.asarray(tau_pos, advantages.dtype), jnp.asarray(tau_neg, advantages.dtype))
    losses = -advantages * jax.nn.sigmoid(tau * (jnp.exp(log_ratio) - 1)) * (4 / tau)
    metrics = {"ppo_kl": token_mean(-log_ratio, mask, norm)}
    return weigh_and_aggregate(losses, mask, norm, aggregation, scale_factor, rollout_is_weights), metrics


def cispo(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    norm: Norm,
    *,
    aggregation: str = "token-mean",
    scale_factor: float | None = None,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    rollout_is_weights: Array | None = None,
) -> LossAndMetrics:
    """CISPO (MiniMax-M1, https://arxiv.org/abs/2506.13585): −sg(clip(r, 1 − low, 1 + high)) A log π. Every token
    keeps a gradient.

    >>> new, old, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.0, -1.0]]), jnp.ones((1, 2), bool)
    >>> float(cispo(new, old, jnp.ones((1, 2)), mask, Norm.of(mask))[0])
    1.0
    """
    log_probs, old_log_probs, advantages = zero_outside(mask, log_probs, old_log_probs, advantages)
    log_ratio = _log_ratio(log_probs, old_log_probs)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    losses = -jax.lax.stop_gradient(clipped) * advantages * log_probs
    metrics = {
        "pg_clipfrac": token_mean(ratio != clipped, mask, norm),
        "ppo_kl": token_mean(-log_ratio, mask, norm),
    }
    return weigh_and_aggregate(losses, mask, norm, aggregation, scale_factor, rollout_is_weights), metrics


def gpg(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    norm: Norm,
    *,
    aggregation: str = "token-mean",
    scale_factor: float | None = None,
    rollout_is_weights: Array | None = None,
) -> LossAndMetrics:
    """The plain policy gradient, −A log π (Chu et al. 2025, https://arxiv.org/abs/2504.02546). The old log-probs are
    only measured.

    >>> new, old, mask = jnp.array([[-1.0, -2.0]]), jnp.array([[-1.0, -2.0]]), jnp.ones((1, 2), bool)
    >>> float(gpg(new, old, jnp.ones((1, 2)), mask, Norm.of(mask))[0])
    1.5
    """
    log_probs, old_log_probs, advantages = zero_outside(mask, log_probs, old_log_probs, advantages)
    metrics = {"ppo_kl": token_mean(old_log_probs - log_probs, mask, norm)}
    losses = -advantages * log_probs
    return weigh_and_aggregate(losses, mask, norm, aggregation, scale_factor, rollout_is_weights), metrics


def dppo_tv(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    norm: Norm,
    *,
    aggregation: str = "token-mean",
    scale_factor: float | None = None,
    clip_ratio_low: float = 0.15,
    clip_ratio_high: float = 0.15,
    clip_ratio_c: float = 20.0,
    rollout_is_weights: Array | None = None,
) -> LossAndMetrics:
    """DPPO-Binary-TV (https://arxiv.org/abs/2602.04879): −sg(min(r, c)) A log π, and 0 where the *probability* has
    already moved too far the way the advantage pushes it: π − π_old > high where A > 0, < −low elsewhere.

    Args:
      clip_ratio_low, clip_ratio_high: bounds of the change of probability.
      clip_ratio_c: c.

    >>> new, old, mask = jnp.log(jnp.array([[0.5, 0.9]])), jnp.log(jnp.array([[0.5, 0.5]])), jnp.ones((1, 2), bool)
    >>> float(dppo_tv(new, old, jnp.ones((1, 2)), mask, Norm.of(mask))[1]["pg_clipfrac"])
    0.5
    """
    log_probs, old_log_probs, advantages = zero_outside(mask, log_probs, old_log_probs, advantages)
    moved = jnp.exp(log_probs) - jnp.exp(old_log_probs)
    trusted = jnp.where(advantages > 0, moved <= clip_ratio_high, moved >= -clip_ratio_low)
    losses, metrics = _trust_region(log_probs, old_log_probs, advantages, mask, norm, trusted, clip_ratio_c)
    return weigh_and_aggregate(losses, mask, norm, aggregation, scale_factor, rollout_is_weights), metrics


def dppo_kl(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    norm: Norm,
    *,
    aggregation: str = "token-mean",
    scale_factor: float | None = None,
    clip_ratio_low: float = 0.05,
    clip_ratio_high: float = 0.05,
    clip_ratio_c: float = 20.0,
    rollout_is_weights: Array | None = None,
) -> LossAndMetrics:
    """DPPO-Binary-KL (https://arxiv.org/abs/2602.04879): as `dppo_tv`, too far being KL(old ‖ new) of "this token or
    another", π_old log(π_old / π) + (1 − π_old) log((1 − π_old) / (1 − π)), above the bound.

    Args:
      clip_ratio_low, clip_ratio_high: bounds in nats where the probability falls and rises.
      clip_ratio_c: c.

    >>> new, old, mask = jnp.log(jnp.array([[0.5, 0.9]])), jnp.log(jnp.array([[0.5, 0.5]])), jnp.ones((1, 2), bool)
    >>> float(dppo_kl(new, old, jnp.ones((1, 2)), mask, Norm.of(mask))[1]["pg_clipfrac"])
    0.5
    """
    log_probs, old_log_probs, advantages = zero_outside(mask, log_probs, old_log_probs, advantages)
    kl = _binary_kl(old_log_probs, log_probs)
    rises, falls = log_probs > old_log_probs, log_probs < old_log_probs
    too_far = jnp.where(advantages > 0, rises & (kl > clip_ratio_high), falls & (kl > clip_ratio_low))
    losses, metrics = _trust_region(log_probs, old_log_probs, advantages, mask, norm, ~too_far, clip_ratio_c)
    return weigh_and_aggregate(losses, mask, norm, aggregation, scale_factor, rollout_is_weights), metrics


def dro(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    norm: Norm,
    *,
    aggregation: str = "token-mean",
    scale_factor: float | None = None,
    dro_beta: float = 0.3,
    rollout_is_weights: Array | None = None,
) -> LossAndMetrics:
    """DRO (Richemond et al. 2024, https://arxiv.org/abs/2405.19107): −A log π + (β/2) (new − old)², a pull in place
    of a clip. To the old policy, as in verl; in the paper it is to the reference.

    Args:
      dro_beta: β ≥ 0.

    >>> new, old, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.0, -1.0]]), jnp.ones((1, 2), bool)
    >>> float(dro(new, old, jnp.ones((1, 2)), mask, Norm.of(mask))[0])
    1.0
    """
    log_probs, old_log_probs, advantages = zero_outside(mask, log_probs, old_log_probs, advantages)
    difference = log_probs - old_log_probs
    losses = -advantages * log_probs + 0.5 * dro_beta * jnp.square(difference)
    metrics = {"ppo_kl": token_mean(-difference, mask, norm)}
    return weigh_and_aggregate(losses, mask, norm, aggregation, scale_factor, rollout_is_weights), metrics


def weigh_and_aggregate(
    losses: Array,
    mask: Array,
    norm: Norm,
    aggregation: str,
    scale_factor: float | None,
    rollout_is_weights: Array | None,
) -> Array:
    """The end of every policy loss: importance weights, then `aggregate`.

    >>> mask = jnp.ones((1, 2), bool)
    >>> weights = jnp.array([[1.0, 3.0]])
    >>> float(weigh_and_aggregate(jnp.ones((1, 2)), mask, Norm.of(mask), "token-mean", None, weights))
    2.0
    """
    if rollout_is_weights is not None:
        losses = losses * zero_outside(mask, rollout_is_weights)[0]
    return aggregate(losses, mask, aggregation, norm, scale_factor=scale_factor)


def _log_ratio(log_probs: Array, old_log_probs: Array) -> Array:
    return jnp.clip(log_probs - old_log_probs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _trust_region(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    norm: Norm,
    trusted: Array,
    clip_ratio_c: float,
) -> LossAndMetrics:
    log_ratio = _log_ratio(log_probs, old_log_probs)
    ratio = jnp.exp(log_ratio)
    weight = jnp.where(trusted, jnp.minimum(ratio, clip_ratio_c), 0)
    metrics = {
        "pg_clipfrac": token_mean(~trusted, mask, norm),
        "pg_clipfrac_lower": token_mean(trusted & (ratio > clip_ratio_c), mask, norm),
        "ppo_kl": token_mean(-log_ratio, mask, norm),
    }
    return -jax.lax.stop_gradient(weight) * advantages * log_probs, metrics


def _binary_kl(log_p: Array, log_q: Array) -> Array:
    """KL of Bernoulli(p) from Bernoulli(q); a term whose weight is 0 is 0."""
    other_p, other_q = -jnp.expm1(log_p), -jnp.expm1(log_q)
    others = jnp.where(other_p > 0, other_p * (jnp.log(jnp.where(other_p > 0, other_p, 1)) - jnp.log(other_q)), 0)
    return jnp.exp(log_p) * (log_p - log_q) + others

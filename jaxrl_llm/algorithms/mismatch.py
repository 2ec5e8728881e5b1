"""How far the sampler's probabilities are from the scorer's: metrics with verl's names, scalars without gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.log_probs import LOG_RATIO_LIMIT, OVERFLOW_LIMIT
from jaxrl_llm.algorithms.masked import masked_max, masked_mean, masked_min, masked_sum, masked_var, zero_outside

Array = jax.Array
Metrics = dict[str, Array]


def off_policy_metrics(old_log_probs: Array, rollout_log_probs: Array, mask: Array) -> Metrics:
    """Perplexities of both, and the divergence of the scorer's distribution from the sampler's.

    With d = old − rollout: `kl` mean −d and `k3_kl` mean exp(d) − d − 1 (both estimate KL(rollout ‖ old)),
    `chi2_token` mean exp(2d) − 1, `chi2_seq` the mean over rows of exp(2 Σ d) − 1. `training_ppl`, `rollout_ppl` and
    their logs are means over rows of exp(−mean log-prob); `log_ppl_diff…` and `ppl_ratio` compare them row by row.

    Args:
      old_log_probs, rollout_log_probs: float [B, R], nats.
      mask: bool [B, R]; rows with an empty mask take part in nothing.

    Returns:
      scalars named rollout_corr/….

    >>> log_probs = jnp.log(jnp.array([[0.5, 0.25]]))
    >>> metrics = off_policy_metrics(log_probs, log_probs, jnp.array([[True, False]]))
    >>> float(metrics["rollout_corr/training_ppl"]), float(metrics["rollout_corr/kl"])
    (2.0, 0.0)
    """
    old, rollout = jax.lax.stop_gradient(zero_outside(mask, old_log_probs, rollout_log_probs))
    valid = mask.astype(bool).any(-1)
    training, sampling = -masked_mean(old, mask, axis=-1), -masked_mean(rollout, mask, axis=-1)
    difference = training - sampling
    log_ratio = old - rollout
    token = jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    row = jnp.clip(masked_sum(log_ratio, mask, axis=-1), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    metrics = {
        "training_ppl": masked_mean(_exp(training), valid),
        "training_log_ppl": masked_mean(training, valid),
        "rollout_ppl": masked_mean(_exp(sampling), valid),
        "rollout_log_ppl": masked_mean(sampling, valid),
        "kl": masked_mean(-log_ratio, mask),
        "k3_kl": masked_mean(_exp(log_ratio) - 1 - log_ratio, mask),
        "log_ppl_diff": masked_mean(difference, valid),
        "log_ppl_abs_diff": masked_mean(jnp.abs(difference), valid),
        "log_ppl_diff_max": masked_max(difference, valid),
        "log_ppl_diff_min": masked_min(difference, valid),
        "ppl_ratio": masked_mean(_exp(difference), valid),
        "chi2_token": masked_mean(jnp.expm1(2 * token), mask),
        "chi2_seq": masked_mean(jnp.expm1(2 * row), valid),
    }
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def moments(name: str, x: Array, mask: Array, *, center: float, std_of: Array | None = None) -> Metrics:
    """Mean, deviation and extremes of a statistic, over tokens and (`seq_…`) over the means of rows.

    Args:
      name: the metrics are named rollout_corr/{name}_….
      x: float [B, R]; a statistic of rows stands on each of a row's tokens.
      mask: bool [B, R]
      center: `seq_max_deviation` is the largest distance of a row's mean from it.
      std_of: float [B, R], whose deviation `std` is; None means x.

    >>> metrics = moments("x", jnp.array([[1.0, 3.0]]), jnp.ones((1, 2), bool), center=1.0)
    >>> float(metrics["rollout_corr/x_std"]), float(metrics["rollout_corr/x_seq_max_deviation"])
    (1.0, 1.0)
    """
    rows, valid = masked_mean(x, mask, axis=-1), mask.any(-1)
    metrics = {
        "mean": masked_mean(x, mask),
        "std": jnp.sqrt(masked_var(x if std_of is None else std_of, mask, ddof=0)),
        "max": masked_max(x, mask),
        "min": masked_min(x, mask),
        "seq_mean": masked_mean(rows, valid),
        "seq_std": jnp.sqrt(masked_var(rows, valid)),
        "seq_max": masked_max(rows, valid),
        "seq_min": masked_min(rows, valid),
        "seq_max_deviation": masked_max(jnp.abs(rows - center), valid),
    }
    return {f"rollout_corr/{name}_{key}": value for key, value in metrics.items()}


def fractions(
    name: str, x: Array, mask: Array, lower: float, upper: float, *, by_row: bool, called: str = "fraction"
) -> Metrics:
    """How much of a statistic is out of bounds.

    Args:
      name: the metrics are named rollout_corr/{name}_….
      x: float [B, R]
      mask: bool [B, R]
      lower, upper: bounds.
      by_row: whether `fraction_high` and `fraction_low` count rows, as `seq_fraction_…` do, not tokens.
      called: what stands in place of `fraction` in their names.

    >>> mask = jnp.ones((1, 2), bool)
    >>> metrics = fractions("x", jnp.array([[1.0, 3.0]]), mask, 0.0, 2.5, by_row=False)
    >>> float(metrics["rollout_corr/x_fraction_high"]), float(metrics["rollout_corr/x_seq_fraction_high"])
    (0.5, 0.0)
    """
    rows, valid = masked_mean(x, mask, axis=-1), mask.any(-1)
    values, over = (rows, valid) if by_row else (x, mask)
    metrics = {
        f"{called}_high": masked_mean((values > upper).astype(x.dtype), over),
        f"{called}_low": masked_mean((values < lower).astype(x.dtype), over),
        "seq_fraction_high": masked_mean((rows > upper).astype(x.dtype), valid),
        "seq_fraction_low": masked_mean((rows < lower).astype(x.dtype), valid),
    }
    return {f"rollout_corr/{name}_{key}": value for key, value in metrics.items()}


def _exp(x: Array) -> Array:
    return jnp.exp(jnp.minimum(x, OVERFLOW_LIMIT))

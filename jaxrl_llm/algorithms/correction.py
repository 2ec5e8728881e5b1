"""Rollout correction: what to do about a sampler whose distribution is not quite the scorer's.

With d = old − rollout log-probs, ρ = exp(clip(d, ±20)) weighs the loss of a token (or of all tokens of a row),
truncated or set to 0 outside bounds; tokens or rows too far off are rejected from the loss mask. Nothing here carries
a gradient. Why the mismatch matters: https://fengyao.notion.site/off-policy-rl
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.log_probs import LOG_RATIO_LIMIT
from jaxrl_llm.algorithms.masked import (
    masked_max,
    masked_mean,
    masked_min,
    masked_sum,
    row_sums,
    safe_divide,
    spread,
    zero_outside,
)
from jaxrl_llm.algorithms.mismatch import fractions, moments, off_policy_metrics
from jaxrl_llm.errors import nearest

Array = jax.Array
Metrics = dict[str, Array]

IS_LEVELS = ("token", "sequence")
RS_KINDS = tuple(
    f"{level}_{k}"
    for level, ks in {
        "token": ("k1", "k2", "k3"),
        "seq_sum": ("k1", "k2", "k3"),
        "seq_mean": ("k1", "k2", "k3"),
        "seq_max": ("k2", "k3"),
    }.items()
    for k in ks
)


class Bounds(NamedTuple):
    """What lies below `lower` or above `upper` is out; a missing lower bound is None."""

    lower: float | None
    upper: float


class Correction(NamedTuple):
    """What rollout correction adds to a batch."""

    weights: Array | None  # float [B, R], ρ, 0 outside the mask that was given; None without importance weights
    mask: Array  # bool [B, R], the mask less what was rejected
    metrics: Metrics  # scalars named rollout_corr/…


def rollout_correction(
    old_log_probs: Array,
    rollout_log_probs: Array,
    mask: Array,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> Correction:
    """Importance weights, rejection, and the metrics of the mismatch.

    Args:
      old_log_probs, rollout_log_probs: float [B, R], nats.
      mask: bool [B, R]
      rollout_is: `token`, `sequence` (one weight a row, of the summed log-ratio), or None or "none".
      rollout_is_threshold: see `is_bounds`.
      rollout_is_batch_normalize: divide the weights by their mean over the batch.
      rollout_rs: kinds of RS_KINDS joined by commas, or None or "none"; what one of them rejects is rejected.
      rollout_rs_threshold: see `rs_bounds`.

    Raises:
      ValueError: an unknown level or kind, or a threshold that is no threshold.

    >>> old, rollout = jnp.log(jnp.array([[0.5, 0.3]])), jnp.log(jnp.array([[0.5, 0.1]]))
    >>> correction = rollout_correction(old, rollout, jnp.ones((1, 2), bool), rollout_is="token")
    >>> correction.weights.tolist(), correction.mask.tolist()
    ([[1.0, 2.0]], [[True, True]])
    """
    mask = mask.astype(bool)
    log_ratio = jax.lax.stop_gradient(zero_outside(mask, old_log_probs)[0] - zero_outside(mask, rollout_log_probs)[0])
    metrics = off_policy_metrics(old_log_probs, rollout_log_probs, mask)
    weights, kept = None, mask
    if rollout_is not in (None, "none"):
        bounds = is_bounds(rollout_is_threshold)
        weights, found = importance_weights(log_ratio, mask, rollout_is, bounds, rollout_is_batch_normalize)
        metrics |= found
    if rollout_rs not in (None, "none"):
        kept, found = reject(log_ratio, mask, rs_bounds(rollout_rs, rollout_rs_threshold))
        metrics |= found
    return Correction(weights, kept, metrics)


def importance_weights(
    log_ratio: Array, mask: Array, level: str, bounds: Bounds, batch_normalize: bool = False
) -> tuple[Array, Metrics]:
    """ρ of each token, or of each row on all its tokens, truncated at the upper bound, or set to 0 outside both.

    Args:
      log_ratio: float [B, R], old − rollout.
      mask: bool [B, R]
      level: `token` or `sequence`.
      bounds: of the weights; without a lower bound they are truncated from above.
      batch_normalize: divide by the mean over the batch's tokens (`token`) or rows (`sequence`).

    Returns:
      float [B, R] and metrics: of the weights before that division; the `…fraction…` are of ρ before truncation.

    Raises:
      ValueError: the level is unknown.

    >>> weights, _ = importance_weights(jnp.zeros((1, 2)), jnp.array([[True, False]]), "token", Bounds(None, 2.0))
    >>> weights.tolist()
    [[1.0, 0.0]]
    """
    if level not in IS_LEVELS:
        raise ValueError(f"rollout_is {level!r} is unknown; {nearest(level, IS_LEVELS)}")
    by_row = level == "sequence"
    (log_ratio,) = zero_outside(mask, log_ratio)
    log_ratio = spread(log_ratio.sum(-1), mask) if by_row else log_ratio
    (raw,) = zero_outside(mask, jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)))
    lower = 1 / bounds.upper if bounds.lower is None else bounds.lower
    outside = (raw < lower) | (raw > bounds.upper)
    weights = jnp.minimum(raw, bounds.upper) if bounds.lower is None else jnp.where(outside, 0, raw)

    metrics = moments("rollout_is", weights, mask, center=1.0)
    metrics |= fractions("rollout_is", raw, mask, lower, bounds.upper, by_row=by_row, called="ratio_fraction")
    mean_square = masked_mean(jnp.square(weights), mask)
    metrics["rollout_corr/rollout_is_eff_sample_size"] = safe_divide(
        jnp.square(masked_mean(weights, mask)), mean_square
    )
    if by_row:  # the extremes before truncation
        metrics["rollout_corr/rollout_is_max"] = masked_max(raw, mask)
        metrics["rollout_corr/rollout_is_min"] = masked_min(raw, mask)
    if bounds.lower is not None:
        metrics["rollout_corr/rollout_is_oob_ratio"] = masked_mean(outside.astype(raw.dtype), mask)
    if batch_normalize:
        rows = masked_mean(weights, mask, axis=-1)
        mean = masked_mean(rows, mask.any(-1)) if by_row else masked_mean(weights, mask)
        factor = jnp.where(mean > 1e-8, mean, 1)
        weights = weights / factor
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = factor
    return weights, metrics


def reject(log_ratio: Array, mask: Array, rules: dict[str, Bounds]) -> tuple[Array, Metrics]:
    """The mask less the tokens (`token_…`) and rows (`seq_…`) whose divergence is out of bounds.

    With d = clip(old − rollout, ±20) a token's statistic is k1 = −d, k2 = d²/2 or k3 = exp(d) − 1 − d; a row's is the
    sum, mean or maximum of it. Bounds of k1 are ratios, exp(k1).

    Args:
      log_ratio: float [B, R], old − rollout.
      mask: bool [B, R]
      rules: kind -> bounds, see `rs_bounds`.

    >>> log_ratio, mask = jnp.array([[0.0, 3.0], [0.1, 0.1]]), jnp.ones((2, 2), bool)
    >>> reject(log_ratio, mask, {"token_k1": Bounds(0.5, 2.0)})[0].tolist()
    [[True, False], [True, True]]
    >>> reject(log_ratio, mask, {"seq_mean_k3": Bounds(None, 0.1)})[0].tolist()
    [[False, False], [True, True]]
    """
    kept, metrics = mask, {}
    for kind, bounds in rules.items():
        level, _, k = kind.rpartition("_")
        statistic = _statistic(log_ratio, mask, level, k)
        lower, upper = _log(bounds) if k == "k1" else (0.0, bounds.upper)
        inside = (statistic >= lower) & (statistic <= upper)
        name = f"rollout_rs_{kind}"
        metrics |= moments(name, statistic, mask, center=0.0, std_of=jnp.clip(statistic, lower, upper))
        metrics |= fractions(name, statistic, mask, lower, upper, by_row=level != "token")
        metrics |= _rejected(name, mask, mask & inside)
        kept = kept & inside
    return kept, metrics | _rejected("rollout_rs", mask, kept)


def is_bounds(threshold: float | str) -> Bounds:
    """A number or its text: truncate weights from above. "low_high": set weights outside to 0.

    Raises:
      ValueError: no number, not above 0, or low above high.

    >>> is_bounds(2.0), is_bounds("0.5_2")
    (Bounds(lower=None, upper=2.0), Bounds(lower=0.5, upper=2.0))
    """
    return _bounds("rollout_is_threshold", str(threshold))


def rs_bounds(rollout_rs: str, threshold: float | str | None) -> dict[str, Bounds]:
    """The bounds of each kind of rejection, in the order given.

    Args:
      rollout_rs: kinds of RS_KINDS joined by commas.
      threshold: one bound for all, or as many, joined by commas. For k1 a bound is "low_high", ratios, or a number,
        which is the upper one of [1/number, number]; for k2 and k3 a number, in nats.

    Raises:
      ValueError: an unknown kind, no threshold, or a wrong number or kind of them.

    >>> rs_bounds("token_k1,seq_mean_k3", "0.5_2,0.1")
    {'token_k1': Bounds(lower=0.5, upper=2.0), 'seq_mean_k3': Bounds(lower=None, upper=0.1)}
    >>> rs_bounds("token_k1", 4)
    {'token_k1': Bounds(lower=0.25, upper=4.0)}
    """
    kinds = [kind.strip() for kind in rollout_rs.split(",") if kind.strip()]
    if not kinds:
        raise ValueError(f"rollout_rs {rollout_rs!r} names no kind; {nearest(rollout_rs, RS_KINDS)}")
    for kind in kinds:
        if kind not in RS_KINDS:
            raise ValueError(f"rollout_rs {kind!r} is unknown; {nearest(kind, RS_KINDS)}")
    if threshold is None:
        raise ValueError(f"rollout_rs {rollout_rs!r} needs rollout_rs_threshold, which is None")
    texts = [text.strip() for text in str(threshold).split(",") if text.strip()]
    if len(texts) not in (1, len(kinds)):
        found = f"{len(texts)} bounds for {len(kinds)} kinds of rollout_rs"
        raise ValueError(f"rollout_rs_threshold {threshold!r}: {found}")
    texts = texts * len(kinds) if len(texts) == 1 else texts
    return {kind: _rs_bound(kind, text) for kind, text in zip(kinds, texts, strict=True)}


def _rs_bound(kind: str, text: str) -> Bounds:
    bounds = _bounds("rollout_rs_threshold", text)
    if kind.endswith("k1"):
        return bounds if bounds.lower is not None else _bounds("rollout_rs_threshold", f"{1 / bounds.upper}_{text}")
    if bounds.lower is not None:
        raise ValueError(f"rollout_rs_threshold {text!r}: {kind} is never negative and takes an upper bound alone")
    return bounds


def _bounds(name: str, text: str) -> Bounds:
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ValueError(f'{name} {text!r}: expected a number above 0 or "low_high"')
    if min(numbers) <= 0 or numbers != sorted(numbers):
        raise ValueError(f"{name} {text!r}: bounds must be above 0 and low at most high")
    return Bounds(lower=numbers[0] if len(numbers) == 2 else None, upper=numbers[-1])


def _log(bounds: Bounds) -> tuple[float, float]:
    assert bounds.lower is not None
    return math.log(bounds.lower), math.log(bounds.upper)


def _statistic(log_ratio: Array, mask: Array, level: str, k: str) -> Array:
    """[B, R]: of each token, or of each row on all its tokens."""
    d = jnp.clip(zero_outside(mask, log_ratio)[0], -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match k:
        case "k1":
            tokens = -d
        case "k2":
            tokens = 0.5 * jnp.square(d)
        case _:
            tokens = jnp.expm1(d) - d
    match level:
        case "token":
            return zero_outside(mask, tokens)[0]
        case "seq_sum":
            return spread(masked_sum(tokens, mask, axis=-1), mask)
        case "seq_mean":
            return spread(masked_mean(tokens, mask, axis=-1), mask)
        case _:
            return spread(masked_max(tokens, mask, axis=-1), mask)


def _rejected(name: str, mask: Array, kept: Array) -> Metrics:
    out = (mask & ~kept).astype(jnp.float32)
    hit, valid = row_sums(out, mask)
    return {
        f"rollout_corr/{name}_masked_fraction": masked_mean(out, mask),
        f"rollout_corr/{name}_seq_masked_fraction": masked_mean((hit > 0).astype(jnp.float32), valid),
    }

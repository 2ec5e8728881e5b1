"""What each metric means. Names are verl's, then TRL's.

Everything on arrays is pure and may run inside a jit; invalid rows (failed reward, filler) are in no statistic, and a
statistic of nothing is 0. What counts seconds runs on the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.masked import (
    masked_max,
    masked_mean,
    masked_min,
    masked_sum,
    masked_var,
    safe_divide,
    zero_outside,
)
from jaxrl_llm.types import FINISH_LENGTH, Batch

Array = jax.Array
Metrics = dict[str, Array]

EXPLAINED_VARIANCE_EPSILON = 1e-5


def data_metrics(batch: Batch, *, use_critic: bool, reward_names: Sequence[str] = ()) -> Metrics:
    """The statistics of a finished batch, as device scalars.

    Args:
      batch: with the evidence of every phase up to `adv`.
      use_critic: whether values are described as well.
      reward_names: one for each column of `scores`.
    """
    batch.require("scores", "scores_mask", "row_valid", "token_level_scores", phase="metrics")
    batch.require("token_level_rewards", "loss_mask", "advantages", "returns", phase="metrics")
    if use_critic:
        batch.require("values", phase="metrics")
    valid, scores, scored = _given(batch.row_valid), _given(batch.scores), _given(batch.scores_mask)
    mask = batch.response_mask & valid[:, None]
    prompt_length = jnp.repeat(batch.prompt_mask.sum(-1, dtype=jnp.int32), batch.n)
    computed = jnp.repeat(batch.prompt_valid, batch.n)  # rows that cost something, whatever became of their reward
    metrics = sequence_metrics(
        token_level_scores=_given(batch.token_level_scores),
        token_level_rewards=_given(batch.token_level_rewards),
        advantages=_given(batch.advantages),
        returns=_given(batch.returns),
        values=batch.values if use_critic else None,
        mask=mask,
        row_valid=valid,
    )
    metrics |= length_metrics(prompt_length, batch.response_length, valid, batch.prompts.shape[1], batch.response_width)
    metrics |= ending_metrics(batch.response_length, batch.finish_reason, valid)
    metrics |= length_bias_metrics(batch.response_length, _given(batch.advantages), mask)
    row_scores = masked_sum(_given(batch.token_level_scores), mask, axis=-1)
    metrics |= group_metrics(row_scores.reshape(-1, batch.n), valid.reshape(-1, batch.n))
    for k, name in enumerate(reward_names):
        own = valid & scored[:, k]  # the rows that this function scores
        metrics[f"rewards/{name}/mean"] = masked_mean(scores[:, k], own)
        metrics[f"rewards/{name}/std"] = jnp.sqrt(masked_var(scores[:, k], own))
    # Over the tokens that are learned from, as when the update measures them itself.
    learned = _given(batch.loss_mask)
    if batch.entropys is not None:
        metrics["actor/entropy"] = masked_mean(batch.entropys, learned)
    if batch.sum_pi_squared is not None and batch.old_log_probs is not None:
        metrics |= variance_power(_given(batch.advantages), batch.old_log_probs, batch.sum_pi_squared, mask)
    if batch.old_log_probs is not None and batch.rollout_log_probs is not None:
        metrics |= prob_diff_metrics(batch.old_log_probs, batch.rollout_log_probs, learned)
    failed = (computed & ~valid).sum()
    metrics["reward/failed_ratio"] = safe_divide(failed.astype(jnp.float32), computed.sum().astype(jnp.float32))
    metrics["perf/response_tokens"] = jnp.where(computed, batch.response_length, 0).sum()
    metrics["perf/total_num_tokens"] = jnp.where(computed, prompt_length + batch.response_length, 0).sum()
    return metrics


def sequence_metrics(
    *,
    token_level_scores: Array,
    token_level_rewards: Array,
    advantages: Array,
    returns: Array,
    values: Array | None,
    mask: Array,
    row_valid: Array,
) -> Metrics:
    """mean, max and min of the rows' scores and rewards (Σ over the mask), the tokens' advantages, returns and values.

    `critic/vf_explained_var` = 1 − var(returns − values) / (var(returns) + 1e-5) over the tokens, ddof 1.

    Args:
      token_level_scores, token_level_rewards, advantages, returns, values: float [B, R]
      mask: bool [B, R], the response's own tokens in valid rows; a row without any counts as aborted.
      row_valid: bool [B]
    """
    told = mask.any(-1)
    metrics = {
        **_summary("critic/score", masked_sum(token_level_scores, mask, axis=-1), told),
        **_summary("critic/rewards", masked_sum(token_level_rewards, mask, axis=-1), told),
        **_summary("critic/advantages", advantages, mask),
        **_summary("critic/returns", returns, mask),
        "response/aborted_ratio": masked_mean((~told).astype(jnp.float32), row_valid),
    }
    if values is not None:
        metrics |= _summary("critic/values", values, mask)
        residual = masked_var(returns - values, mask)
        explained = 1.0 - residual / (masked_var(returns, mask) + EXPLAINED_VARIANCE_EPSILON)
        metrics["critic/vf_explained_var"] = explained
    return metrics


def length_metrics(
    prompt_length: Array, response_length: Array, row_valid: Array, prompt_width: int, response_width: int
) -> Metrics:
    """mean, max, min of lengths in tokens; `clip_ratio` is the share of rows that fill their frame.

    Args:
      prompt_length, response_length: int [B], the latter with tool output; `_non_aborted` leaves out its zeros.
      row_valid: bool [B]
      prompt_width, response_width: tokens, of the frames.
    """

    def lengths(name: str, length: Array, mask: Array, width: int) -> Metrics:
        full = masked_mean((length == width).astype(jnp.float32), mask)
        return {**_summary(name, length.astype(jnp.float32), mask), f"{name}/clip_ratio": full}

    begun = row_valid & (response_length > 0)
    return {
        **lengths("prompt_length", prompt_length, row_valid, prompt_width),
        **lengths("response_length", response_length, row_valid, response_width),
        **lengths("response_length_non_aborted", response_length, begun, response_width),
    }


def ending_metrics(response_length: Array, finish_reason: Array, row_valid: Array) -> Metrics:
    """`response/truncated_ratio`: rows that ended by length; `response_length_terminated`: lengths of the others.

    A response may end by itself on the last slot of its frame: it counts in `response_length/clip_ratio`, not here.

    Args:
      response_length, finish_reason: int [B]
      row_valid: bool [B]
    """
    truncated = finish_reason == FINISH_LENGTH
    return {
        "response/truncated_ratio": masked_mean(truncated.astype(jnp.float32), row_valid),
        **_summary("response_length_terminated", response_length.astype(jnp.float32), row_valid & ~truncated),
    }


def length_bias_metrics(response_length: Array, advantages: Array, mask: Array) -> Metrics:
    """Whether long responses are taught otherwise than short ones: the mean length of rows whose mean advantage is
    positive, of those where it is negative, and Pearson's correlation of length and advantage over both together. (Rows
    of groups whose rewards are all equal teach nothing, and would only dilute it.)

    Args:
      response_length: int [B]
      advantages: float [B, R]
      mask: bool [B, R]

    >>> mask = jnp.array([[True, False], [True, True]])
    >>> metrics = length_bias_metrics(jnp.array([1, 2]), jnp.array([[1.0, 0.0], [-1.0, -1.0]]), mask)
    >>> [float(value) for value in metrics.values()]
    [1.0, 2.0, -1.0]
    """
    rows, length = mask.any(-1), response_length.astype(jnp.float32)
    advantage = masked_mean(advantages, mask, axis=-1)
    return {
        "response_length_positive_advantage/mean": masked_mean(length, rows & (advantage > 0)),
        "response_length_negative_advantage/mean": masked_mean(length, rows & (advantage < 0)),
        "response_length/advantage_corr": _correlation(length, advantage, rows & (advantage != 0)),
    }


def group_metrics(scores: Array, valid: Array) -> Metrics:
    """`reward_std`: mean of the groups' standard deviations; `frac_reward_zero_std`: groups of equal scores.

    Args:
      scores: float [G, n]
      valid: bool [G, n]

    >>> metrics = group_metrics(jnp.array([[1.0, 1.0], [0.0, 1.0]]), jnp.ones((2, 2), bool))
    >>> float(metrics["frac_reward_zero_std"]), round(float(metrics["reward_std"]), 4)
    (0.5, 0.3536)
    """
    groups = valid.any(-1)
    equal = masked_max(scores, valid, axis=-1) == masked_min(scores, valid, axis=-1)
    deviation = jnp.sqrt(masked_var(scores, valid, axis=-1))
    return {
        "reward_std": masked_mean(jnp.where(equal, 0.0, deviation), groups),
        "frac_reward_zero_std": masked_mean(equal.astype(jnp.float32), groups),
    }


def prob_diff_metrics(old_log_probs: Array, rollout_log_probs: Array, mask: Array) -> Metrics:
    """How far the sampler's probabilities are from the scorer's: |Δp| over the tokens, and their correlation.

    Args:
      old_log_probs, rollout_log_probs: float [B, R]
      mask: bool [B, R]
    """
    old, rollout = (jnp.exp(x) for x in zero_outside(mask, old_log_probs, rollout_log_probs))
    difference = jnp.abs(old - rollout)
    name = "training/rollout_probs_diff"
    return {
        f"{name}_valid": mask.any().astype(jnp.int32),
        f"{name}_max": masked_max(difference, mask),
        f"{name}_mean": masked_mean(difference, mask),
        f"{name}_std": jnp.sqrt(masked_var(difference, mask)),
        "training/rollout_actor_probs_pearson_corr": _correlation(old, rollout, mask),
    }


def variance_power(advantages: Array, old_log_probs: Array, sum_pi_squared: Array, mask: Array) -> Metrics:
    """The total power E[Ā² W] of the policy gradient, from each row's W = Σ_t (1 − 2π_t + Σ_v π²) and mean advantage Ā.

    Args:
      advantages, old_log_probs, sum_pi_squared: float [B, R]
      mask: bool [B, R]; rows without tokens are left out.
    """
    rows = mask.any(-1)
    (log_probs,) = zero_outside(mask, old_log_probs)
    w = masked_sum(1.0 - 2.0 * jnp.exp(log_probs) + sum_pi_squared, mask, axis=-1)
    a_squared = jnp.square(masked_mean(advantages, mask, axis=-1))
    return {
        "variance_proxy/proxy2_total_power": masked_mean(a_squared * w, rows),
        "variance_proxy/expected_a_squared": masked_mean(a_squared, rows),
        "variance_proxy/expected_w": masked_mean(w, rows),
        "variance_proxy/rows": rows.sum(),
    }


def variance_proxy(metrics: Mapping[str, Any], xp: Any = jnp) -> dict[str, Any]:
    """Signal ‖g‖² of the policy gradient; noise of its mean over N rows, (power − signal) / (N − 1), at least 0.

    Args:
      metrics: of a step. Nothing comes of them unless they hold `variance_power` and the gradient's norm.
      xp: jax.numpy, or numpy on the host.

    >>> found = {"variance_proxy/proxy2_total_power": 9.0, "variance_proxy/rows": 3, "actor/grad_norm": 1.0}
    >>> {name: float(value) for name, value in variance_proxy(found).items()}
    {'variance_proxy/proxy1_signal_strength': 1.0, 'variance_proxy/proxy3_pure_noise': 4.0}
    """
    if "variance_proxy/rows" not in metrics or "actor/grad_norm" not in metrics:
        return {}
    signal, power = metrics["actor/grad_norm"] ** 2, metrics["variance_proxy/proxy2_total_power"]
    others = metrics["variance_proxy/rows"] - 1
    noise = xp.where(others > 0, (power - signal) / xp.maximum(others, 1), 0.0)
    return {
        "variance_proxy/proxy1_signal_strength": signal,
        "variance_proxy/proxy3_pure_noise": xp.maximum(noise, 0.0),
    }


# What the names begin with of metrics that differ from run to run of the same seed: clocks and machines.
CLOCKS = (
    "timing",
    "perf/time_per_step",
    "perf/throughput",
    "perf/tokens_per_sec",
    "perf/mfu",
    "perf/per_device_tflops_per_sec",
    "perf/max_memory",
    "perf/cpu_memory",
)

# What a phase's cost is divided by: the tokens it writes, or all that it reads.
_PER_RESPONSE_TOKEN = ("gen",)
_PER_TOKEN = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
_NOT_TRAINING = ("testing", "save_checkpoint")


def timing_metrics(
    timing: Mapping[str, float], *, total_tokens: int, response_tokens: int, n_devices: int
) -> dict[str, float]:
    """Seconds per phase, milliseconds per token, tokens per second of all devices; what a step of training takes and
    gets done.

    `perf/time_per_step` is the step without `testing` and `save_checkpoint`, which few steps have: so steps compare.
    `perf/throughput` is tokens per second of that and per device.

    Args:
      timing: seconds by phase; `step` is the whole.
      total_tokens: prompts (once per row) and responses; `perf/total_num_tokens` of `data_metrics`.
      response_tokens: `perf/response_tokens` of `data_metrics`.

    >>> metrics = timing_metrics({"gen": 2.0, "step": 4.0}, total_tokens=100, response_tokens=50, n_devices=1)
    >>> metrics["timing_per_token_ms/gen"], metrics["perf/throughput"]
    (40.0, 25.0)
    """
    metrics = {f"timing_s/{phase}": seconds for phase, seconds in timing.items()}
    for phases, tokens in ((_PER_RESPONSE_TOKEN, response_tokens), (_PER_TOKEN, total_tokens)):
        for phase in phases:
            if phase in timing and tokens:
                metrics[f"timing_per_token_ms/{phase}"] = 1000 * timing[phase] / tokens
                if phase != "adv" and timing[phase]:  # which no model has a part in
                    metrics[f"perf/tokens_per_sec/{phase}"] = tokens / timing[phase]
    if "step" in timing:
        seconds = timing["step"] - sum(timing.get(phase, 0.0) for phase in _NOT_TRAINING)
        metrics["perf/time_per_step"] = seconds
        metrics["perf/throughput"] = total_tokens / (seconds * n_devices) if seconds > 0 else 0.0
    return metrics


def extras_metrics(extras: Sequence[Mapping[str, Any] | None]) -> dict[str, float]:
    """Mean of every finite number that reward functions returned beside the score, over the rows that have it.

    >>> extras_metrics([{"parsed": True, "text": "a"}, {"parsed": False}, None])
    {'reward_extra/parsed/mean': 0.5}
    """
    found: dict[str, list[float]] = {}
    for row in extras:
        for name, value in (row or {}).items():
            if (number := finite_number(value)) is not None:
                found.setdefault(name, []).append(number)
    return {f"reward_extra/{name}/mean": sum(values) / len(values) for name, values in found.items()}


def finite_number(value: Any) -> float | None:
    """What a reward function returned, as a number that can be counted; None of a text, NaN, or an integer that no
    float holds.

    >>> finite_number(True), finite_number("7"), finite_number(10**400)
    (1.0, None, None)
    """
    if not isinstance(value, bool | int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _summary(name: str, x: Array, mask: Array) -> Metrics:
    return {
        f"{name}/mean": masked_mean(x, mask),
        f"{name}/max": masked_max(x, mask),
        f"{name}/min": masked_min(x, mask),
    }


def _correlation(x: Array, y: Array, mask: Array) -> Array:
    """Pearson's, over the mask; 0 where one of them is constant."""
    dx, dy = zero_outside(mask, x - masked_mean(x, mask), y - masked_mean(y, mask))
    return safe_divide((dx * dy).sum(), jnp.sqrt(jnp.square(dx).sum() * jnp.square(dy).sum()))


def _given(evidence: Array | None) -> Array:
    assert evidence is not None  # `Batch.require` has said so with a message
    return evidence

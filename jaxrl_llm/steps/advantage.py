"""From scores to advantages: KL in the reward, rollout correction, the estimator."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxrl_llm.algorithms.advantages import AdvantageInputs, Estimator, adaptive_kl_update, kl_in_reward
from jaxrl_llm.algorithms.correction import rollout_correction
from jaxrl_llm.algorithms.masked import masked_mean, masked_var
from jaxrl_llm.algorithms.shaping import overlong_penalty
from jaxrl_llm.config import Algorithm, KLControl, OverlongBuffer
from jaxrl_llm.steps.update import Metrics
from jaxrl_llm.types import FINISH_LENGTH, Array, Batch


def compute_advantages(
    batch: Batch,
    kl_coef: Array,
    *,
    estimator: Estimator,
    settings: Algorithm,
    options: dict[str, Any],
    overlong: OverlongBuffer | None = None,
) -> tuple[Batch, Array, Metrics]:
    """Writes `token_level_rewards`, `rollout_is_weights`, `loss_mask`, `advantages`, `returns`.

    Args:
      kl_coef: float32 [], of the KL in the reward.
      options: the estimator's keyword arguments.
      overlong: how overlong responses are punished; None is not at all.

    Returns:
      the batch, the KL coefficient for the next step, and metrics.
    """
    batch.require("token_level_scores", "row_valid", *_fields(estimator), phase="adv")
    assert batch.token_level_scores is not None and batch.row_valid is not None
    mask = batch.response_mask & batch.row_valid[:, None]
    metrics: Metrics = {}
    rewards = jnp.where(mask, batch.token_level_scores, 0)
    if overlong is not None and overlong.enable:
        width = batch.response_width
        penalty = overlong_penalty(
            batch.response_length, limit=width, buffer=overlong.len, factor=overlong.penalty_factor
        )
        last = jnp.where(mask, jnp.arange(width)[None, :], -1).max(1)
        rewards = rewards + jnp.where(jnp.arange(width)[None, :] == last[:, None], penalty[:, None], 0)
        metrics["reward/overlong_penalty/mean"] = masked_mean(penalty, mask.any(1))
        metrics["reward/overlong_ratio"] = masked_mean((penalty < 0).astype(jnp.float32), mask.any(1))
    if settings.use_kl_in_reward:
        batch.require("old_log_probs", "ref_log_prob", phase="adv")
        assert batch.old_log_probs is not None and batch.ref_log_prob is not None
        rewards, current_kl = kl_in_reward(
            rewards, batch.old_log_probs, batch.ref_log_prob, mask, coef=kl_coef, kind=settings.kl_penalty
        )
        metrics |= {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": kl_coef}
        kl_coef = _next_kl_coef(settings.kl_ctrl, kl_coef, current_kl, mask)

    if settings.whiten_rewards:
        # The scale alone (as TRL): a shift would reward length. Nothing to go by where all rewards are one number.
        variance = masked_var(rewards, mask)
        rewards = rewards / jnp.sqrt(jnp.where(variance > 0, variance, 1))

    weights, loss_mask = None, mask
    if settings.mask_truncated:
        loss_mask = loss_mask & (batch.finish_reason != FINISH_LENGTH)[:, None]
    correction = settings.rollout_correction
    if correction.rollout_is != "none" or correction.rollout_rs != "none":
        batch.require("old_log_probs", "rollout_log_probs", phase="adv")
        assert batch.old_log_probs is not None and batch.rollout_log_probs is not None
        weights, loss_mask, mismatch = rollout_correction(
            batch.old_log_probs,
            batch.rollout_log_probs,
            loss_mask,
            rollout_is=correction.rollout_is,
            rollout_is_threshold=correction.rollout_is_threshold,
            rollout_is_batch_normalize=correction.rollout_is_batch_normalize,
            rollout_rs=correction.rollout_rs,
            rollout_rs_threshold=correction.rollout_rs_threshold,
        )
        metrics |= mismatch

    advantages, returns = estimator(
        AdvantageInputs(
            rewards=rewards,
            mask=mask,
            uid=batch.uid,
            values=batch.values,
            scores=batch.scores,
            reward_baselines=batch.reward_baselines,
            old_log_probs=batch.old_log_probs,
            sum_pi_squared=batch.sum_pi_squared,
            rollout_is_weights=weights,
        ),
        **options,
    )
    batch = batch.write(
        "adv",
        token_level_rewards=rewards,
        rollout_is_weights=weights,
        loss_mask=loss_mask,
        advantages=advantages,
        returns=returns,
    )
    return batch, kl_coef, metrics


def _fields(estimator: Estimator) -> tuple[str, ...]:
    return tuple(name for name in estimator.needs if name != "rollout_is_weights")


def _next_kl_coef(control: KLControl, coef: Array, current_kl: Array, mask: Array) -> Array:
    if control.type == "fixed":
        return coef
    rows = mask.any(1).sum().astype(jnp.float32)
    moved = adaptive_kl_update(coef, current_kl, target=control.target_kl, horizon=control.horizon, n_rows=rows)
    # One KL that is not finite must not stay in the coefficient for the rest of the run.
    return jnp.where(jnp.isfinite(moved), moved, coef)

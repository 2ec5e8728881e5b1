"""The losses of actor, critic and reward model over rows, for `make_update`: a forward pass, then functions of
`algorithms.losses`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.log_probs import kl_penalty
from jaxrl_llm.algorithms.losses import Norm, aggregate, bradley_terry, top_entropy_mask, value_loss
from jaxrl_llm.algorithms.masked import masked_max, masked_sum, safe_divide, zero_outside
from jaxrl_llm.steps.scoring import score_responses, score_tokens, score_values
from jaxrl_llm.steps.update import LossFn, Metrics
from jaxrl_llm.types import Array, Batch, Model, Params


def make_actor_loss(
    model: Model,
    policy_loss: Callable[..., tuple[Array, Metrics]],
    *,
    aggregation: str,
    scale_factor: float,
    temperature: float,
    chunk_tokens: int,
    entropy_coeff: float = 0.0,
    kl_loss_coef: float | None = None,
    kl_loss_type: str = "low_var_kl",
    top_entropy_quantile: float = 1.0,
    packed_width: int | None = None,
) -> LossFn:
    """policy_loss − entropy_coeff · agg(H) + kl_loss_coef · agg(kl(new, ref)).

    Args:
      policy_loss: (log_probs, old_log_probs, advantages, mask, norm, *, rollout_is_weights, key) -> (loss, metrics).
      aggregation, scale_factor: of entropy and KL; the policy loss brings its own.
      kl_loss_coef: None leaves the KL out, and with it the need for `ref_log_prob`.
      top_entropy_quantile: below 1 the policy loss is of the tokens of `top_entropy_mask` alone, over the denominators
        of all; entropy and KL are of all. The rows must then be the whole mini-batch.
      packed_width: see `score_tokens`.

    A batch without `old_log_probs` says that this is the first and only update on it: old is then new, held constant.
    """
    agg = partial(aggregate, mode=aggregation, scale_factor=scale_factor)

    def loss_fn(params: Params, rows: Batch, norm: Norm, key: Array) -> tuple[Array, Metrics]:
        rows.require("advantages", "loss_mask", phase="update_actor")
        assert rows.advantages is not None and rows.loss_mask is not None
        first_and_only = rows.old_log_probs is None
        stats = score_tokens(
            model,
            params,
            rows,
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            with_entropy=entropy_coeff != 0 or first_and_only or top_entropy_quantile < 1,
            entropy_gradient=entropy_coeff != 0,
            packed_width=packed_width,
        )
        new, mask = stats.log_probs, rows.loss_mask
        old = jax.lax.stop_gradient(new) if rows.old_log_probs is None else rows.old_log_probs
        chosen = mask
        if top_entropy_quantile < 1:
            assert stats.entropys is not None
            chosen = top_entropy_mask(jax.lax.stop_gradient(stats.entropys), mask, top_entropy_quantile)
        loss, metrics = policy_loss(
            new,
            old,
            rows.advantages,
            chosen,
            norm,
            rollout_is_weights=rows.rollout_is_weights,
            key=key,
        )
        metrics = {"pg_loss": loss, **metrics}
        if stats.entropys is not None:
            entropy = agg(stats.entropys, mask, norm=norm)
            metrics["entropy"] = entropy
            if entropy_coeff != 0:
                loss = loss - entropy_coeff * entropy
        if kl_loss_coef is not None:
            rows.require("ref_log_prob", phase="update_actor")
            assert rows.ref_log_prob is not None
            policy, reference = zero_outside(mask, new, rows.ref_log_prob)
            kl = agg(kl_penalty(policy, reference, kl_loss_type), mask, norm=norm)
            loss = loss + kl_loss_coef * kl
            metrics["kl_loss"] = kl
        if first_and_only and rows.rollout_log_probs is not None:
            metrics |= _mismatch(new, rows.rollout_log_probs, mask, norm)
        return loss, metrics

    return loss_fn


def _mismatch(log_probs: Array, rollout_log_probs: Array, mask: Array, norm: Norm) -> Metrics:
    """How far the sampler's probabilities are from the scorer's, where no pass of its own could have told."""
    difference = jnp.abs(jnp.exp(jax.lax.stop_gradient(log_probs)) - jnp.exp(rollout_log_probs))
    return {
        "training/rollout_probs_diff_mean": safe_divide(masked_sum(difference, mask), norm.tokens),
        "training/rollout_probs_diff_max": masked_max(difference, mask),
    }


def make_sft_loss(
    model: Model, *, aggregation: str, scale_factor: float, chunk_tokens: int, packed_width: int | None = None
) -> LossFn:
    """Cross-entropy of given responses, agg(−log π), in nats. `packed_width`: see `score_tokens`."""
    score = partial(score_tokens, model, temperature=1.0, chunk_tokens=chunk_tokens, packed_width=packed_width)

    def loss_fn(params: Params, rows: Batch, norm: Norm, key: Array) -> tuple[Array, Metrics]:
        del key
        rows.require("loss_mask", phase="update_actor")
        assert rows.loss_mask is not None
        stats = score(params, rows, with_entropy=False)
        loss = aggregate(-stats.log_probs, rows.loss_mask, aggregation, norm, scale_factor=scale_factor)
        return loss, {}

    return loss_fn


def make_reward_model_loss(model: Model, *, center_coef: float, packed_width: int | None = None) -> LossFn:
    """`bradley_terry` of pairs: each prompt has two responses, the better one first. A pair counts if both of its rows
    have a token in the loss mask, or is filler. `packed_width`: see `score_tokens`."""

    def loss_fn(params: Params, rows: Batch, norm: Norm, key: Array) -> tuple[Array, Metrics]:
        del key
        rows.require("loss_mask", phase="update_actor")
        assert rows.loss_mask is not None
        chex.assert_equal(rows.n, 2)  # a micro-batch has whole pairs
        scores = score_responses(model, params, rows, packed_width=packed_width).reshape(-1, 2)
        counts = rows.loss_mask.any(-1).reshape(-1, 2).all(-1)
        return bradley_terry(scores[:, 0], scores[:, 1], counts, norm.sequences / 2, center_coef=center_coef)

    return loss_fn


def make_critic_loss(
    model: Model, *, cliprange_value: float, aggregation: str, scale_factor: float, packed_width: int | None = None
) -> LossFn:
    """½ · agg(max((v − R)², (clip(v, V ± cliprange_value) − R)²)) with V the values before the update.
    `packed_width`: see `score_tokens`."""

    def loss_fn(params: Params, rows: Batch, norm: Norm, key: Array) -> tuple[Array, Metrics]:
        del key
        rows.require("values", "returns", "loss_mask", phase="update_critic")
        new = score_values(model, params, rows, packed_width=packed_width)
        assert rows.values is not None and rows.returns is not None and rows.loss_mask is not None
        loss, metrics = value_loss(
            new,
            rows.values,
            rows.returns,
            rows.loss_mask,
            norm,
            clip=cliprange_value,
            aggregation=aggregation,
            scale_factor=scale_factor,
        )
        return loss, {"vf_loss": loss, **metrics}

    return loss_fn

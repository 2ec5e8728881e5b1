"""From a case to calls of jaxrl_llm: one adapter per `fn`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import metrics
from jaxrl_llm.algorithms import masked
from jaxrl_llm.algorithms.advantages import ESTIMATORS, AdvantageInputs, Estimator, adaptive_kl_update, kl_in_reward
from jaxrl_llm.algorithms.aggregation import Norm, aggregate
from jaxrl_llm.algorithms.correction import rollout_correction
from jaxrl_llm.algorithms.log_probs import entropy, kl_penalty, sum_pi_squared, token_log_probs
from jaxrl_llm.algorithms.losses import POLICY_LOSSES, value_loss
from tests.golden.cases import Adapter, Case

Arrays = dict[str, jax.Array]

# Names of the same thing: theirs -> jaxrl_llm's.
EVIDENCE = {"index": "uid"}
LOSS_METRICS = {"clipfrac": "pg_clipfrac", "clipfrac_lower": "pg_clipfrac_lower", "approx_kl": "ppo_kl"}
ALWAYS_ZERO = {"clipfrac", "clipfrac_lower"}  # of losses that do not clip
CORRECTION_METRICS = {"off.": "rollout_corr/", "is.": "rollout_corr/rollout_is_", "rs.": "rollout_corr/rollout_rs_"}
ROW_LOSSES = ("gspo", "sapo", "geo_mean")  # these cases aggregate them by rows, whatever agg_mode says


def estimator(case: Case, inputs: Arrays) -> dict[str, Any]:
    entry = ESTIMATORS[case.fn.removesuffix("_vectorized")]
    options = dict(case.kwargs)
    if case.fn.startswith("grpo") and case.fn != "grpo_passk":
        options["scale"] = "group" if options.pop("norm_by_std", True) else "none"
    if not options.pop("use_is", True):
        inputs = {name: value for name, value in inputs.items() if name != "rollout_is_weights"}
    evidence = {EVIDENCE.get(name, name): value for name, value in inputs.items() if name != "components"}
    if case.fn == "gdpo":
        weights = options.get("weights")
        options["weights"] = None if weights is None else tuple(weights)
        components = inputs.get("components")
        if components is None:
            evidence["scores"] = masked.masked_sum(inputs["rewards"], inputs["mask"], axis=-1)[:, None]
        else:
            evidence["scores"] = components.T
            evidence["rewards"] = jnp.zeros(inputs["mask"].shape, components.dtype)
    advantages, returns = _jitted(entry)(AdvantageInputs(**evidence), **options)
    return {"advantages": advantages, "returns": returns}


@cache
def _jitted(entry: Estimator) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Compiled once for all cases of a shape, the numbers among the options being arguments."""
    chosen = tuple(name for name, default in entry.options.items() if isinstance(default, str | bool))
    return jax.jit(entry, static_argnames=chosen)


def masked_stats(case: Case, inputs: Arrays) -> dict[str, Any]:
    x, mask = inputs["x"], inputs["mask"]
    return {
        "sum": masked.masked_sum(x, mask),
        "mean": masked.masked_mean(x, mask),
        "row_sum": masked.masked_sum(x, mask, axis=-1),
        "row_mean": masked.masked_mean(x, mask, axis=-1),
        "var_biased": masked.masked_var(x, mask, ddof=0),
        "var_unbiased": masked.masked_var(x, mask),
        "whiten": masked.masked_whiten(x, mask),
        "whiten_keep_mean": masked.masked_whiten(x, mask, shift_mean=False),
    }


def agg_loss(case: Case, inputs: Arrays) -> dict[str, Any]:
    mode, mask, kwargs = case.kwargs["mode"], inputs["mask"], case.kwargs

    def loss(x: jax.Array) -> jax.Array:
        return shard_factor(kwargs) * aggregate(
            x, mask, mode, norm_of(kwargs, mask), scale_factor=kwargs.get("loss_scale_factor")
        )

    value, grad = jax.value_and_grad(loss)(inputs["x"])
    return {"loss": value, "grad_x": grad}


def norm_of(kwargs: dict[str, Any], mask: jax.Array) -> Norm:
    """The denominators a case asks for: those it states for the whole mini-batch, or its own.

    Raises:
      ValueError: it is one of several shards and states none.
    """
    own = Norm.of(mask)
    if kwargs.get("dp_size", 1) > 1 and "batch_num_tokens" not in kwargs:
        raise ValueError("a shard cannot know the denominators of the mini-batch")
    tokens, sequences = kwargs.get("batch_num_tokens"), kwargs.get("global_batch_size")
    return Norm(
        tokens=own.tokens if tokens is None else jnp.float32(tokens),
        sequences=own.sequences if sequences is None else jnp.float32(sequences),
    )


def shard_factor(kwargs: dict[str, Any]) -> int:
    """Their results carry the number of shards, over which a mean is taken later; sums do not."""
    return kwargs.get("dp_size", 1)


def policy_loss(case: Case, inputs: Arrays) -> dict[str, Any]:
    kwargs, name, mask = case.kwargs, case.kwargs["loss_mode"], inputs["mask"]
    entry = POLICY_LOSSES[name]
    settings = kwargs | (kwargs["rollout_correction"] if name == "bypass_mode" else {})
    options = {key: value for key, value in settings.items() if key in entry.options and value is not None}
    options["aggregation"] = "seq-mean-token-mean" if name in ROW_LOSSES else kwargs["agg_mode"]
    if "is_weights" in inputs and kwargs["use_is"]:
        options["rollout_is_weights"] = inputs["is_weights"]
    counted, corrected = mask, {}
    if name == "bypass_mode":
        options |= {key: settings[key] for key in ("rollout_is", "rollout_rs")}
        corrections = {key: value for key, value in settings.items() if key.startswith(("rollout_is", "rollout_rs"))}
        found = rollout_correction(inputs["log_prob"], inputs["old_log_prob"], mask, **corrections)
        counted, corrected = found.mask, found.metrics
    norm = norm_of(kwargs, counted)
    if name == "geo_mean":
        norm = norm._replace(sequences=jnp.float32(kwargs.get("global_batch_size", mask.shape[0])))
    key = jax.random.key(0)

    def loss(log_probs: jax.Array) -> jax.Array:
        value, _ = entry(log_probs, inputs["old_log_prob"], inputs["advantages"], mask, norm, key=key, **options)
        return shard_factor(kwargs) * value

    value, grad = jax.value_and_grad(loss)(inputs["log_prob"])
    # Their metrics are means over the tokens at hand, ours shares of the whole mini-batch: here that is the same mask.
    _, shares = entry(
        inputs["log_prob"], inputs["old_log_prob"], inputs["advantages"], mask, Norm.of(counted), key=key, **options
    )
    scalars = {"loss": value, **dict.fromkeys(ALWAYS_ZERO, 0.0), **correction_scalars(corrected)}
    scalars |= {theirs: shares[ours] for theirs, ours in LOSS_METRICS.items() if ours in shares}
    return {"scalars": scalars, "grad_log_prob": grad}


def kl(case: Case, inputs: Arrays) -> dict[str, Any]:
    kind, ref = case.kwargs["kind"], inputs["ref_logprob"]
    grad = jax.grad(lambda log_probs: kl_penalty(log_probs, ref, kind).sum())(inputs["logprob"])
    return {"kl": kl_penalty(inputs["logprob"], ref, kind), "grad_logprob": grad}


def apply_kl(case: Case, inputs: Arrays) -> dict[str, Any]:
    kwargs, coef, mask = case.kwargs, case.kwargs["kl_coef"], inputs["mask"]
    rewards, current = kl_in_reward(
        inputs["scores"], inputs["old_log_probs"], inputs["ref_log_prob"], mask, coef=coef, kind=kwargs["kind"]
    )
    after = coef
    if kwargs["controller"] == "adaptive":
        after = adaptive_kl_update(
            coef, current, target=kwargs["target_kl"], horizon=kwargs["horizon"], n_rows=mask.any(-1).sum()
        )
    return {
        "token_level_rewards": rewards,
        "scalars": {"current_kl": current, "coef_used": coef, "coef_after": after},
    }


def value(case: Case, inputs: Arrays) -> dict[str, Any]:
    kwargs, mask = case.kwargs, inputs["mask"]

    def loss(predicted: jax.Array, norm: Norm) -> tuple[jax.Array, dict[str, jax.Array]]:
        total, shares = value_loss(
            predicted,
            inputs["values"],
            inputs["returns"],
            mask,
            norm,
            clip=kwargs["cliprange_value"],
            aggregation=kwargs["agg_mode"],
            scale_factor=kwargs.get("loss_scale_factor"),
        )
        return shard_factor(kwargs) * total, shares

    (total, _), grad = jax.value_and_grad(loss, has_aux=True)(inputs["vpreds"], norm_of(kwargs, mask))
    _, shares = loss(inputs["vpreds"], Norm.of(mask))
    return {"scalars": {"loss": total, "clipfrac": shares["vf_clipfrac"]}, "grad_vpreds": grad}


def entropy_logprob(case: Case, inputs: Arrays) -> dict[str, Any]:
    return _entropy_logprob(inputs["logits"], inputs["labels"], inputs["mask"], case.kwargs["temperature"])


@jax.jit
def _entropy_logprob(logits: jax.Array, labels: jax.Array, mask: jax.Array, temperature: float) -> dict[str, jax.Array]:
    def entropy_loss(logits: jax.Array) -> jax.Array:
        return aggregate(entropy(logits, temperature), mask, "token-mean", Norm.of(mask))

    def log_prob_sum(logits: jax.Array) -> jax.Array:
        return masked.masked_sum(token_log_probs(logits, labels, temperature), mask)

    return {
        "logprob": token_log_probs(logits, labels, temperature),
        "entropy": entropy(logits, temperature),
        "sum_pi_squared": sum_pi_squared(logits, temperature),
        "entropy_loss": entropy_loss(logits),
        "grad_entropy_loss": jax.grad(entropy_loss)(logits),
        "grad_masked_logprob_sum": jax.grad(log_prob_sum)(logits),
    }


def entropy_loss(case: Case, inputs: Arrays) -> dict[str, Any]:
    mask = inputs["mask"]
    return {"entropy_loss": aggregate(entropy(inputs["logits"]), mask, case.kwargs["agg_mode"], Norm.of(mask))}


def correction(case: Case, inputs: Arrays) -> dict[str, Any]:
    options = {key: value for key, value in case.kwargs.items() if key != "mask_all_zero"}
    mask = jnp.zeros_like(inputs["mask"]) if case.kwargs.get("mask_all_zero") else inputs["mask"]
    found = rollout_correction(inputs["old_log_prob"], inputs["rollout_log_prob"], mask, **options)
    outputs = {"mask": found.mask, "scalars": correction_scalars(found.metrics)}
    return outputs if found.weights is None else outputs | {"weights": found.weights}


def correction_scalars(found: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The metrics under the cases' names."""
    names: dict[str, jax.Array] = {}
    for theirs, ours in reversed(CORRECTION_METRICS.items()):
        names |= {theirs + name.removeprefix(ours): value for name, value in found.items() if name.startswith(ours)}
    return names


def response_mask(case: Case, inputs: Arrays) -> dict[str, Any]:
    """The rule that the rollout applies token by token: what comes after the first stop token is out."""
    stopped = jnp.cumsum(inputs["responses"] == case.kwargs["eos"], axis=-1)
    before = jnp.pad(stopped, ((0, 0), (1, 0)))[:, :-1]
    return {"mask": (before == 0).astype(jnp.int32)}


def data_metrics(case: Case, inputs: Arrays) -> dict[str, Any]:
    kwargs, mask, told = case.kwargs, inputs["response_mask"], inputs["attention_mask"]
    width, valid = kwargs["prompt_width"], jnp.ones(mask.shape[0], bool)
    found = metrics.sequence_metrics(
        token_level_scores=inputs["token_level_scores"],
        token_level_rewards=inputs["token_level_rewards"],
        advantages=inputs["advantages"],
        returns=inputs["returns"],
        values=inputs["values"] if kwargs["use_critic"] else None,
        mask=mask,
        row_valid=valid,
    )
    found |= metrics.length_metrics(
        told[:, :width].sum(-1), told[:, width:].sum(-1), valid, width, kwargs["response_width"]
    )
    return {"scalars": {name.removeprefix("critic/").replace("/", "."): value for name, value in found.items()}}


def timing(case: Case, inputs: Arrays) -> dict[str, Any]:
    told, seconds = inputs["attention_mask"], case.kwargs["timing"]
    width = told.shape[1] - inputs["response_mask"].shape[1]
    total, answered = int(told.sum()), int(told[:, width:].sum())
    found = metrics.timing_metrics(
        seconds, total_tokens=total, response_tokens=answered, n_devices=case.kwargs["n_devices"]
    )
    scalars: dict[str, Any] = {
        "total_tokens": total,
        "step_seconds": found["perf/time_per_step"],
        "tokens_per_second_per_device": found["perf/throughput"],
    }
    for theirs, ours in {"ms_per_token.": "timing_per_token_ms/", "seconds.": "timing_s/"}.items():
        scalars |= {theirs + name.removeprefix(ours): value for name, value in found.items() if name.startswith(ours)}
    return {"scalars": scalars}


def variance_proxy(case: Case, inputs: Arrays) -> dict[str, Any]:
    evidence = (inputs[name] for name in ("advantages", "old_log_probs", "sum_pi_squared", "response_mask"))
    found = metrics.variance_power(*evidence)
    norm = jnp.asarray(case.kwargs["grad_norm"], inputs["advantages"].dtype)
    found |= metrics.variance_proxy(found | {"actor/grad_norm": norm})
    del found["variance_proxy/rows"]
    return {"scalars": {"var." + name.removeprefix("variance_proxy/"): value for name, value in found.items()}}


def prob_diff_metrics(case: Case, inputs: Arrays) -> dict[str, Any]:
    found = metrics.prob_diff_metrics(inputs["old_log_prob"], inputs["rollout_log_prob"], inputs["mask"])
    return {"scalars": {name.removeprefix("training/rollout_"): value for name, value in found.items()}}


ADAPTERS: dict[str, Adapter] = {
    **dict.fromkeys((*ESTIMATORS, "grpo_vectorized", "rloo_vectorized"), estimator),
    "masked_stats": masked_stats,
    "agg_loss": agg_loss,
    "policy_loss": policy_loss,
    "kl_penalty": kl,
    "apply_kl_penalty": apply_kl,
    "value_loss": value,
    "entropy_logprob": entropy_logprob,
    "entropy_loss": entropy_loss,
    "rollout_correction": correction,
    "response_mask": response_mask,
    "data_metrics": data_metrics,
    "timing_throughput": timing,
    "variance_proxy": variance_proxy,
    "prob_diff_metrics": prob_diff_metrics,
}

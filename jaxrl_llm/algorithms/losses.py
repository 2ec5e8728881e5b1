"""The losses that a trainer chooses from: policy losses by name, those of critic and reward model, and shared parts.

The policy losses themselves are in `policy_losses` and `selective_losses`, aggregation in `aggregation`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import AGGREGATIONS, Norm, aggregate, token_mean
from jaxrl_llm.algorithms.correction import rollout_correction
from jaxrl_llm.algorithms.masked import masked_sum, safe_divide, zero_outside
from jaxrl_llm.algorithms.policy_losses import (
    LossAndMetrics,
    cispo,
    dppo_kl,
    dppo_tv,
    dro,
    geo_mean,
    gpg,
    gspo,
    sapo,
    vanilla,
)
from jaxrl_llm.algorithms.selective_losses import clip_cov, kl_cov, top_entropy_mask
from jaxrl_llm.errors import nearest

__all__ = [
    "AGGREGATIONS",
    "POLICY_LOSSES",
    "Norm",
    "PolicyLoss",
    "aggregate",
    "bradley_terry",
    "bypass_mode",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "gpg",
    "gspo",
    "kl_cov",
    "sapo",
    "token_mean",
    "top_entropy_mask",
    "value_loss",
    "vanilla",
]

Array = jax.Array
BYPASS_LOSSES = ("ppo_clip", "reinforce")


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, so that it can be a static argument
class PolicyLoss:
    """A policy loss and what a trainer must know of it.

    fn(log_probs, old_log_probs, advantages, mask, norm, *, rollout_is_weights=None, **options) -> (loss, metrics)
    """

    fn: Callable[..., LossAndMetrics]
    options: Mapping[str, Any]  # keyword options and their defaults
    needs_whole_minibatch: bool = False  # it selects over the mini-batch, which therefore cannot be split
    draws: bool = False  # it takes a `key`
    weighs: bool = True  # it takes `rollout_is_weights`

    def __call__(
        self,
        log_probs: Array,
        old_log_probs: Array,
        advantages: Array,
        mask: Array,
        norm: Norm,
        *,
        rollout_is_weights: Array | None = None,
        key: Array | None = None,
        **options: Any,
    ) -> LossAndMetrics:
        """The loss under one calling convention; key and weights are passed on if the loss takes them.

        Raises:
          ValueError: there are weights, and the loss takes none.
        """
        if rollout_is_weights is not None and not self.weighs:
            raise ValueError(f"policy loss {self.fn.__name__!r} takes no rollout_is_weights")
        taken = {"key": key} if self.draws else {}
        if self.weighs:
            taken["rollout_is_weights"] = rollout_is_weights
        return self.fn(log_probs, old_log_probs, advantages, mask, norm, **taken, **options)

    @classmethod
    def of(cls, fn: Callable[..., LossAndMetrics], *, needs_whole_minibatch: bool = False) -> PolicyLoss:
        """Reads the options from the signature of a plain function, a user's own included.

        What no signature can say, that it selects over the whole mini-batch, a function says by an attribute
        `needs_whole_minibatch = True`.

        >>> PolicyLoss.of(vanilla).options["clip_ratio_low"], PolicyLoss.of(clip_cov).draws
        (0.2, True)
        """
        keywords = {p.name: p.default for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY}
        options = {k: v for k, v in keywords.items() if k not in ("key", "rollout_is_weights")}
        return cls(
            fn=fn,
            options=options,
            needs_whole_minibatch=needs_whole_minibatch or getattr(fn, "needs_whole_minibatch", False),
            draws="key" in keywords,
            weighs="rollout_is_weights" in keywords,
        )


def bypass_mode(
    log_probs: Array,
    old_log_probs: Array,
    advantages: Array,
    mask: Array,
    norm: Norm,
    *,
    aggregation: str = "token-mean",
    scale_factor: float | None = None,
    loss_type: str = "ppo_clip",
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
    rollout_is: str | None = "sequence",
    rollout_is_threshold: float | str = 2.0,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> LossAndMetrics:
    """For old log-probs that are the sampler's own: rejection and importance weights of new against old, every time.

    `ppo_clip`: `vanilla` on the tokens kept; its ratio is the importance weight. `reinforce`: −sg(ρ) A log π on them.
    Rejected tokens stay in the denominators, which are fixed before the mini-batch is split.

    Args:
      loss_type: `ppo_clip` or `reinforce`.
      clip_ratio_low, clip_ratio_high, clip_ratio_c: of `ppo_clip`.
      rollout_is, rollout_is_threshold: of `reinforce`; these and the next as in `correction.rollout_correction`.

    Raises:
      ValueError: the loss type is unknown.

    >>> new, old, mask = jnp.array([[-1.0, -1.0]]), jnp.array([[-1.0, -9.0]]), jnp.ones((1, 2), bool)
    >>> limits = {"rollout_rs": "token_k2", "rollout_rs_threshold": 1.0}
    >>> loss, metrics = bypass_mode(new, old, jnp.ones((1, 2)), mask, Norm.of(mask), **limits)
    >>> float(loss), float(metrics["rollout_rs_masked_fraction"])
    (-0.5, 0.5)
    """
    if loss_type not in BYPASS_LOSSES:
        raise ValueError(f"bypass_mode loss_type {loss_type!r} is unknown; {nearest(loss_type, BYPASS_LOSSES)}")
    correction = rollout_correction(
        log_probs,
        old_log_probs,
        mask,
        rollout_is=rollout_is,
        rollout_is_threshold=rollout_is_threshold,
        rollout_rs=rollout_rs,
        rollout_rs_threshold=rollout_rs_threshold,
    )
    kept = correction.mask
    common: dict[str, Any] = {"aggregation": aggregation, "scale_factor": scale_factor}
    if loss_type == "ppo_clip":
        common |= {"clip_ratio_low": clip_ratio_low, "clip_ratio_high": clip_ratio_high, "clip_ratio_c": clip_ratio_c}
        loss, metrics = vanilla(log_probs, old_log_probs, advantages, kept, norm, **common)
    else:
        common |= {"rollout_is_weights": correction.weights}
        loss, metrics = gpg(log_probs, old_log_probs, advantages, kept, norm, **common)
    return loss, metrics | {"rollout_rs_masked_fraction": token_mean(~kept, mask, norm)}


def value_loss(
    values: Array,
    old_values: Array,
    returns: Array,
    mask: Array,
    norm: Norm,
    *,
    clip: float,
    aggregation: str = "token-mean",
    scale_factor: float | None = None,
) -> LossAndMetrics:
    """½ · agg(max((v − R)², (clip(v, V − ε, V + ε) − R)²)): a step of the value beyond ε of the old has no effect.

    Args:
      values: float [B, R], new, v.
      old_values, returns: float [B, R], V and R.
      mask: bool [B, R]
      norm: of the whole mini-batch.
      clip: ε ≥ 0, in units of the value.
      aggregation, scale_factor: as in `aggregate`.

    Returns:
      A scalar, and the metrics `vf_clipfrac`, `vpred_mean`, normalized by `norm`.

    >>> new, old, returns, mask = jnp.array([[3.0]]), jnp.array([[1.0]]), jnp.array([[4.0]]), jnp.ones((1, 1), bool)
    >>> loss, metrics = value_loss(new, old, returns, mask, Norm.of(mask), clip=0.5)
    >>> float(loss), float(metrics["vf_clipfrac"])
    (3.125, 1.0)
    """
    values, old_values, returns = zero_outside(mask, values, old_values, returns)
    plain = jnp.square(values - returns)
    clipped = jnp.square(jnp.clip(values, old_values - clip, old_values + clip) - returns)
    metrics = {"vf_clipfrac": token_mean(clipped > plain, mask, norm), "vpred_mean": token_mean(values, mask, norm)}
    losses = jnp.maximum(plain, clipped)
    return 0.5 * aggregate(losses, mask, aggregation, norm, scale_factor=scale_factor), metrics


def bradley_terry(
    chosen: Array, rejected: Array, mask: Array, pairs: Array | float, *, center_coef: float = 0.0
) -> LossAndMetrics:
    """Σ (−log σ(c − r) + center_coef · (c + r)²) / pairs: a reward model's loss on pairs of a better and a worse text.

    Bradley & Terry 1952, as a loss of scores in Ouyang et al. 2022 (https://arxiv.org/abs/2203.02155). It knows scores
    up to a constant; the second term draws them to 0 (Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244).

    Args:
      chosen, rejected: float [G], the scores c and r.
      mask: bool [G], the pairs that count.
      pairs: how many do in the whole mini-batch, fixed before it is split.
      center_coef: at least 0.

    Returns:
      A scalar, and the metrics `accuracy` (share of pairs with c > r), `margin` (c − r), `chosen` and `rejected` (mean
      scores), normalized by `pairs`.

    >>> c, r, mask = jnp.array([2.0, 0.0]), jnp.array([0.0, 1.0]), jnp.array([True, True])
    >>> loss, metrics = bradley_terry(c, r, mask, 2.0)
    >>> round(float(loss), 4), float(metrics["accuracy"]), float(metrics["margin"])  # (0.1269 + 1.3133) / 2
    (0.7201, 0.5, 0.5)
    """
    chosen, rejected = zero_outside(mask, chosen, rejected)
    margin = chosen - rejected
    losses = jax.nn.softplus(-margin)
    if center_coef:
        losses = losses + center_coef * jnp.square(chosen + rejected)

    def mean(x: Array) -> Array:
        return safe_divide(masked_sum(x, mask), jnp.asarray(pairs, losses.dtype))

    measured = {"accuracy": (margin > 0).astype(losses.dtype), "margin": margin, "chosen": chosen, "rejected": rejected}
    return mean(losses), {name: mean(jax.lax.stop_gradient(x)) for name, x in measured.items()}


POLICY_LOSSES: dict[str, PolicyLoss] = {
    fn.__name__: PolicyLoss.of(fn)
    for fn in (vanilla, gspo, geo_mean, sapo, cispo, gpg, dppo_tv, dppo_kl, dro, bypass_mode)
} | {fn.__name__: PolicyLoss.of(fn, needs_whole_minibatch=True) for fn in (clip_cov, kl_cov)}

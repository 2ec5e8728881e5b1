"""Advantage estimators, and the KL divergence in the reward.

Every estimator is a plain function `(rewards, mask, …evidence, *, …options) -> (advantages, returns)`, both [B, R]
and 0 outside the mask. Its signature is all there is to declare: a parameter without a default is evidence that it
needs, one with the default None is evidence that it can use, keyword-only parameters are its options. `Estimator.of`
reads this, and gives them all the one calling convention that a trainer wants.

Group estimators compare the responses to one prompt (`uid`). Rows with an empty mask take part in no statistic; a group
whose rewards are all equal, and a group of one, give exactly 0. A row's score is s = Σ_t reward · mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.group_advantages import (
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from jaxrl_llm.algorithms.log_probs import kl_penalty
from jaxrl_llm.algorithms.masked import masked_mean, masked_whiten, spread, sum_to_go, zero_outside
from jaxrl_llm.algorithms.token_baselines import optimal_token_baseline, tir_optimal_token_baseline
from jaxrl_llm.errors import nearest

Array = jax.Array
Advantages = tuple[Array, Array]


class AdvantageInputs(NamedTuple):
    """All the evidence that an estimator may ask for; shapes as in `types.Batch`."""

    rewards: Array  # float [B, R], token_level_rewards
    mask: Array  # bool [B, R], response_mask of the valid rows
    uid: Array | None = None  # int [B]
    values: Array | None = None  # float [B, R]
    scores: Array | None = None  # float [B, K]
    reward_baselines: Array | None = None  # float [B]
    old_log_probs: Array | None = None  # float [B, R]
    sum_pi_squared: Array | None = None  # float [B, R]
    rollout_is_weights: Array | None = None  # float [B, R]


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, so that it can be a static argument
class Estimator:
    """An estimator under the one calling convention: `estimator(evidence, **options) -> (advantages, returns)`."""

    fn: Callable[..., Advantages]
    needs: tuple[str, ...]  # fields of AdvantageInputs beside rewards and mask
    uses: tuple[str, ...]  # fields taken if they are there
    options: Mapping[str, Any]  # keyword options and their defaults

    @property
    def group(self) -> bool:
        """Whether it compares the responses to one prompt, so that n > 1 is needed."""
        return "uid" in self.needs

    def __call__(self, evidence: AdvantageInputs, **options: Any) -> Advantages:
        taken = {name: getattr(evidence, name) for name in (*self.needs, *self.uses)}
        for name in self.needs:
            if taken[name] is None:
                raise ValueError(f"estimator {self.fn.__name__!r} needs {name!r}, which is None")
        return self.fn(rewards=evidence.rewards, mask=evidence.mask, **taken, **options)

    @classmethod
    def of(cls, fn: Callable[..., Advantages]) -> Estimator:
        """Reads evidence and options from the signature of a plain function, a user's own included.

        Raises:
          TypeError: a positional parameter is no field of AdvantageInputs.

        >>> Estimator.of(rloo).needs, Estimator.of(rloo).group
        (('uid',), True)
        >>> dict(Estimator.of(grpo).options)
        {'scale': 'group', 'epsilon': 1e-06}
        """
        parameters = inspect.signature(fn).parameters.values()
        options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        evidence = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        for p in evidence:
            if p.name not in AdvantageInputs._fields:
                valid = nearest(p.name, AdvantageInputs._fields)
                raise TypeError(f"estimator {fn.__name__!r}: parameter {p.name!r} is no evidence; {valid}")
        named = [p for p in evidence if p.name not in ("rewards", "mask")]
        needs = tuple(p.name for p in named if p.default is p.empty)
        uses = tuple(p.name for p in named if p.default is not p.empty)
        return cls(fn=fn, needs=needs, uses=uses, options=options)


def gae(
    rewards: Array,
    mask: Array,
    values: Array,
    *,
    gamma: float | Array = 1.0,
    lam: float | Array = 1.0,
    whiten: bool = True,
) -> Advantages:
    """Generalized advantage estimation over the tokens of the mask (Schulman et al. 2016,
    https://arxiv.org/abs/1506.02438).

    δ_t = r_t + γ V_{t+1} − V_t,  A_t = δ_t + γ λ A_{t+1},  return_t = A_t + V_t, where t + 1 is the next token *of the
    mask*: masked positions (tool output, padding) pass value and accumulator through. V after the last token is 0.

    Args:
      rewards, values: float [B, R]
      mask: bool [B, R]
      gamma: discount per token.
      lam: λ; 1 makes A the return minus the value, 0 the one-step error δ.
      whiten: whether the advantages are whitened over the whole mask (the returns never are).

    >>> rewards, values = jnp.array([[0.0, 9.0, 1.0]]), jnp.array([[0.25, 9.0, 0.5]])
    >>> advantages, returns = gae(rewards, jnp.array([[True, False, True]]), values, whiten=False)
    >>> print(advantages, returns)
    [[0.75 0.   0.5 ]] [[1. 0. 1.]]
    """
    rewards, values = zero_outside(mask, rewards, values)

    def backwards(carry: Advantages, at_t: tuple[Array, Array, Array]) -> tuple[Advantages, Array]:
        (next_value, next_advantage), (reward, value, real) = carry, at_t
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        kept = (jnp.where(real, value, next_value), jnp.where(real, advantage, next_advantage))
        return kept, advantage

    start = jnp.zeros_like(rewards[:, 0])
    columns = (rewards.T, values.T, mask.astype(bool).T)
    _, advantages = jax.lax.scan(backwards, (start, start), columns, reverse=True)
    advantages, returns = zero_outside(mask, advantages.T, advantages.T + values)
    return (masked_whiten(advantages, mask) if whiten else advantages), returns


def reinforce_plus_plus(rewards: Array, mask: Array, *, gamma: float | Array = 1.0) -> Advantages:
    """The discounted reward to go over the mask, whitened over the batch (Hu et al. 2025,
    https://arxiv.org/abs/2501.03262).

    Args:
      rewards: float [B, R]
      mask: bool [B, R]
      gamma: discount per token of the mask.

    >>> advantages, returns = reinforce_plus_plus(jnp.array([[0.0, 1.0]]), jnp.ones((1, 2), bool), gamma=0.5)
    >>> print(advantages.round(3), returns)
    [[-0.707  0.707]] [[0.5 1. ]]
    """
    returns = sum_to_go(rewards, mask, gamma)
    return masked_whiten(returns, mask), returns


def remax(rewards: Array, mask: Array, reward_baselines: Array) -> Advantages:
    """Reward to go − reward of the greedy response to the same prompt (Li et al. 2023,
    https://arxiv.org/abs/2310.10505).

    Args:
      rewards: float [B, R]
      mask: bool [B, R]
      reward_baselines: float [B], the greedy response's score.

    >>> remax(jnp.array([[0.0, 1.0]]), jnp.ones((1, 2), bool), jnp.array([0.25]))[0].tolist()
    [[0.75, 0.75]]
    """
    returns = sum_to_go(rewards, mask)
    return returns - spread(reward_baselines, mask), returns


def kl_in_reward(
    token_level_scores: Array,
    old_log_probs: Array,
    ref_log_prob: Array,
    mask: Array,
    *,
    coef: float | Array,
    kind: str,
) -> tuple[Array, Array]:
    """Token-level rewards, scores − coef · kl(old, ref), and the mean KL per token (the mean over rows of row means).

    Args:
      token_level_scores, old_log_probs, ref_log_prob: float [B, R]
      mask: bool [B, R]
      coef: beta, a scalar.
      kind: as in `kl_penalty`.

    Returns:
      token_level_rewards float [B, R] and a scalar, nats.

    >>> scores, old, ref = jnp.array([[0.0, 1.0]]), jnp.array([[-1.0, -1.0]]), jnp.array([[-2.0, -1.0]])
    >>> rewards, kl = kl_in_reward(scores, old, ref, jnp.ones((1, 2), bool), coef=0.5, kind="k1")
    >>> rewards.tolist(), float(kl)
    ([[-0.5, 1.0]], 0.5)
    """
    old_log_probs, ref_log_prob = zero_outside(mask, old_log_probs, ref_log_prob)
    (kl,) = zero_outside(mask, kl_penalty(old_log_probs, ref_log_prob, kind))
    row_means = masked_mean(kl, mask, axis=-1)
    return token_level_scores - coef * kl, masked_mean(row_means, mask.astype(bool).any(-1))


def adaptive_kl_update(
    coef: float | Array, current_kl: float | Array, *, target: float, horizon: float, n_rows: float | Array
) -> Array:
    """The proportional controller coef · (1 + clip(kl / target − 1, ±0.2) · n_rows / horizon)
    (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593).

    Args:
      coef, current_kl: scalars; the KL in nats per token.
      target: the KL to hold.
      horizon: rows over which the coefficient may move by a factor 1.2.
      n_rows: rows of this batch.

    >>> float(adaptive_kl_update(1.0, 0.5, target=0.1, horizon=100.0, n_rows=50))
    1.100000023841858
    """
    error = jnp.clip(jnp.asarray(current_kl) / target - 1, -0.2, 0.2)
    return coef * (1 + error * n_rows / horizon)


ESTIMATORS: dict[str, Estimator] = {
    fn.__name__: Estimator.of(fn)
    for fn in (
        gae,
        grpo,
        rloo,
        reinforce_plus_plus,
        reinforce_plus_plus_baseline,
        remax,
        opo,
        gpg,
        grpo_passk,
        gdpo,
        optimal_token_baseline,
        tir_optimal_token_baseline,
    )
}

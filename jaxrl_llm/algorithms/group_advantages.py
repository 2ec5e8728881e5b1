"""Advantages that compare the responses to one prompt: one number for a row, the same on each of its tokens.

See `advantages` for the conventions that all estimators share.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.masked import (
    group_lead,
    group_stats,
    group_sum,
    masked_var,
    masked_whiten,
    row_sums,
    safe_divide,
    spread,
    zero_outside,
)
from jaxrl_llm.errors import nearest

Array = jax.Array


def grpo(
    rewards: Array, mask: Array, uid: Array, *, scale: str = "group", epsilon: float = 1e-6
) -> tuple[Array, Array]:
    """Group-relative: (s − mean_g) / (std + ε) (Shao et al. 2024, https://arxiv.org/abs/2402.03300).

    Args:
      rewards: float [B, R]
      mask: bool [B, R]
      uid: int [B]
      scale: `group`: std (ddof 1) of the group; `batch`: of all valid rows; `none`: no division, Dr.GRPO (Liu et al.
        2025, https://arxiv.org/abs/2503.20783).
      epsilon: added to the std.

    Raises:
      ValueError: the scale is unknown.

    >>> rewards, mask = jnp.array([[1.0], [0.0], [7.0]]), jnp.ones((3, 1), bool)
    >>> grpo(rewards, mask, jnp.array([4, 4, 9]), scale="none")[0].tolist()
    [[0.5], [-0.5], [0.0]]
    """
    s, valid = row_sums(rewards, mask)
    stats = group_stats(s, uid, valid)
    centered = jnp.where(stats.flat, 0, s - stats.mean)
    match scale:
        case "group":
            centered = centered / (stats.std + epsilon)
        case "batch":
            variance = masked_var(s, valid)
            # Where the variance is 0 every centered score is; sqrt must not see it, or its slope is infinite.
            centered = centered / (jnp.sqrt(jnp.where(variance > 0, variance, 1)) + epsilon)
        case "none":
            pass
        case _:
            raise ValueError(f"grpo scale {scale!r} is unknown; {nearest(scale, ('group', 'batch', 'none'))}")
    return _on_tokens(centered, mask)


def rloo(rewards: Array, mask: Array, uid: Array) -> tuple[Array, Array]:
    """Leave one out: s − mean of the others' s (Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740).

    Args:
      rewards: float [B, R]
      mask: bool [B, R]
      uid: int [B]

    >>> rloo(jnp.array([[3.0], [0.0], [0.0]]), jnp.ones((3, 1), bool), jnp.array([1, 1, 1]))[0].tolist()
    [[3.0], [-1.5], [-1.5]]
    """
    s, valid = row_sums(rewards, mask)
    stats = group_stats(s, uid, valid)
    # s − (n·mean − s)/(n − 1) = (s − mean) · n/(n − 1)
    others = safe_divide(stats.count, jnp.maximum(stats.count - 1, 0))
    return _on_tokens(jnp.where(stats.flat, 0, (s - stats.mean) * others), mask)


def reinforce_plus_plus_baseline(rewards: Array, mask: Array, uid: Array) -> tuple[Array, Array]:
    """s − mean_g on every token, whitened over all tokens of the batch (Hu et al. 2025,
    https://arxiv.org/abs/2501.03262).

    A group with equal rewards enters the whitening as exactly 0, and leaves it shifted by the batch's mean like all.

    Args:
      rewards: float [B, R]
      mask: bool [B, R]
      uid: int [B]

    >>> rewards, mask = jnp.array([[1.0], [0.0]]), jnp.ones((2, 1), bool)
    >>> print(reinforce_plus_plus_baseline(rewards, mask, jnp.array([1, 1]))[0].round(3))
    [[ 0.707]
     [-0.707]]
    """
    s, valid = row_sums(rewards, mask)
    stats = group_stats(s, uid, valid)
    return _whitened(jnp.where(stats.flat, 0, s - stats.mean), mask, stats.count)


def opo(rewards: Array, mask: Array, uid: Array) -> tuple[Array, Array]:
    """s − Σ_g length · s / Σ_g length: the length-weighted baseline (Hao et al. 2025,
    https://arxiv.org/abs/2505.23585).

    Args:
      rewards: float [B, R]
      mask: bool [B, R]
      uid: int [B]

    >>> rewards = jnp.array([[3.0, 0.0], [0.0, 0.0]])
    >>> opo(rewards, jnp.array([[True, True], [True, False]]), jnp.array([1, 1]))[0].tolist()
    [[1.0, 1.0], [-2.0, 0.0]]
    """
    s, valid = row_sums(rewards, mask)
    length = mask.astype(bool).sum(-1).astype(s.dtype)
    baseline = safe_divide(group_sum(length * s, uid), group_sum(length, uid))
    return _on_tokens(jnp.where(group_stats(s, uid, valid).flat, 0, s - baseline), mask)


def gpg(rewards: Array, mask: Array, uid: Array, *, f_norm: float = 1.0) -> tuple[Array, Array]:
    """α (s − mean_g) / f_norm, α = rows / rows whose score is not 0 (Chu et al. 2025,
    https://arxiv.org/abs/2504.02546).

    α makes up for the rows that carry no signal.

    Args:
      rewards: float [B, R]
      mask: bool [B, R]
      uid: int [B]
      f_norm: a constant divisor.

    >>> gpg(jnp.array([[1.0], [0.0]]), jnp.ones((2, 1), bool), jnp.array([1, 1]))[0].tolist()
    [[1.0], [-1.0]]
    """
    s, valid = row_sums(rewards, mask)
    stats = group_stats(s, uid, valid)
    alpha = valid.sum().astype(s.dtype) / jnp.maximum((s != 0).sum(), 1).astype(s.dtype)
    return _on_tokens(jnp.where(stats.flat, 0, alpha * (s - stats.mean) / f_norm), mask)


def grpo_passk(
    rewards: Array, mask: Array, uid: Array, *, norm_by_std: bool = True, epsilon: float = 1e-6
) -> tuple[Array, Array]:
    """For pass@k: the best response of a group gets max − second, over (std + ε), all others 0
    (https://arxiv.org/abs/2503.19595). Two rows that share the maximum leave nothing to gain: 0.

    Args:
      rewards: float [B, R]
      mask: bool [B, R]
      uid: int [B]
      norm_by_std: whether to divide by the group's std (ddof 1) + ε.
      epsilon: added to the std.

    >>> rewards, mask = jnp.array([[3.0], [1.0], [0.0]]), jnp.ones((3, 1), bool)
    >>> grpo_passk(rewards, mask, jnp.array([1, 1, 1]), norm_by_std=False)[0].tolist()
    [[2.0], [0.0], [0.0]]
    """
    s, valid = row_sums(rewards, mask)
    stats = group_stats(s, uid, valid)
    leads, second = group_lead(s, uid, valid)
    leads &= ~stats.flat
    gain = jnp.where(leads, s - jnp.where(leads, second, 0), 0)
    return _on_tokens(gain / (stats.std + epsilon) if norm_by_std else gain, mask)


def gdpo(
    rewards: Array,
    mask: Array,
    uid: Array,
    scores: Array,
    *,
    weights: tuple[float, ...] | None = None,
    norm_by_std: bool = True,
    epsilon: float = 1e-6,
) -> tuple[Array, Array]:
    """Several rewards, each normalized within its group by itself, then weighed, summed and whitened over all tokens of
    the batch, so that no reward drowns another (https://arxiv.org/abs/2601.05242). `rewards` is not read.

    Args:
      rewards: float [B, R]
      mask: bool [B, R]
      uid: int [B]
      scores: float [B, K], one column a reward function.
      weights: K numbers; None means all 1.
      norm_by_std: whether each is divided by its group's std (ddof 1) + ε.
      epsilon: added to the std.

    Raises:
      ValueError: the number of weights is not K.

    >>> scores, mask = jnp.array([[1.0, 0.0], [0.0, 0.0]]), jnp.ones((2, 1), bool)
    >>> print(gdpo(jnp.zeros((2, 1)), mask, jnp.array([1, 1]), scores)[0].round(3))
    [[ 0.707]
     [-0.707]]
    """
    if weights is not None and len(weights) != scores.shape[1]:
        raise ValueError(f"gdpo: {len(weights)} weights for {scores.shape[1]} rewards")
    valid = jnp.broadcast_to(mask.astype(bool).any(-1, keepdims=True), scores.shape)
    (scores,) = zero_outside(valid, scores)
    stats = group_stats(scores, uid, valid)
    each = jnp.where(stats.flat, 0, scores - stats.mean)
    each = each / (stats.std + epsilon) if norm_by_std else each
    each = each if weights is None else each * jnp.asarray(weights, each.dtype)[None, :]
    return _whitened(each.sum(-1), mask, stats.count[:, 0])


def _whitened(row: Array, mask: Array, count: Array) -> tuple[Array, Array]:
    """The row's number on its tokens, whitened over them all; a group of one has nothing to compare and keeps 0."""
    tokens = jnp.where((count < 2)[:, None], 0, masked_whiten(spread(row, mask), mask))
    return tokens, tokens


def _on_tokens(row: Array, mask: Array) -> tuple[Array, Array]:
    tokens = spread(row, mask)
    return tokens, tokens

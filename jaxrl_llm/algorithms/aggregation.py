"""How per-token losses become one number: a sum over a denominator.

The denominator is that of the whole mini-batch, fixed before it is split (`Norm`): losses and metrics of micro-batches,
shards or accumulation steps add up to those of the mini-batch, and so do their gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.masked import masked_sum, safe_divide, zero_outside
from jaxrl_llm.errors import nearest

Array = jax.Array

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


class Norm(NamedTuple):
    """The denominators of a whole mini-batch, float32 scalars."""

    tokens: Array  # tokens in the mask
    sequences: Array  # rows with any token in the mask

    @classmethod
    def of(cls, mask: Array) -> Norm:
        """Counts of a mask [B, R].

        >>> norm = Norm.of(jnp.array([[True, True], [False, False]]))
        >>> float(norm.tokens), float(norm.sequences)
        (2.0, 1.0)
        """
        mask = mask.astype(bool)
        return cls(tokens=mask.sum().astype(jnp.float32), sequences=mask.any(-1).sum().astype(jnp.float32))


def aggregate(x: Array, mask: Array, mode: str, norm: Norm, *, scale_factor: float | None = None) -> Array:
    """One number from per-token losses. With N tokens and S sequences of the whole mini-batch (`norm`):

    `token-mean`: Σ x / N. `token-sum`: Σ x. `seq-mean-token-sum`: Σ_rows Σ_t x / S. `seq-mean-token-mean`: Σ_rows
    (mean_t x) / S. `seq-mean-token-sum-norm`: Σ x / (S · scale_factor), the constant denominator of Dr.GRPO
    (https://arxiv.org/abs/2503.20783). An empty denominator gives 0.

    Args:
      x: float [B, R], rows of a mini-batch or of a part of it.
      mask: bool [B, R]
      mode: one of AGGREGATIONS.
      norm: of the whole mini-batch.
      scale_factor: in tokens; None means R.

    Raises:
      ValueError: the mode is unknown.

    >>> x, mask = jnp.array([[1.0, 2.0], [4.0, 9.0]]), jnp.array([[True, True], [True, False]])
    >>> [round(float(aggregate(x, mask, mode, Norm.of(mask))), 3) for mode in AGGREGATIONS]
    [2.333, 7.0, 3.5, 2.75, 1.75]
    """
    (x,) = zero_outside(mask, x)
    match mode:
        case "token-mean":
            return safe_divide(x.sum(), norm.tokens)
        case "token-sum":
            return x.sum()
        case "seq-mean-token-sum":
            return safe_divide(x.sum(), norm.sequences)
        case "seq-mean-token-mean":
            row_means = safe_divide(x.sum(-1), mask.astype(bool).sum(-1).astype(x.dtype))
            return safe_divide(row_means.sum(), norm.sequences)
        case "seq-mean-token-sum-norm":
            return safe_divide(x.sum(), norm.sequences * (x.shape[-1] if scale_factor is None else scale_factor))
        case _:
            raise ValueError(f"aggregation {mode!r} is unknown; {nearest(mode, AGGREGATIONS)}")


def token_mean(x: Array, mask: Array, norm: Norm) -> Array:
    """What these rows add to the mini-batch's mean over tokens: a metric, without gradient.

    Args:
      x: float or bool [B, R]
      mask: bool [B, R]
      norm: of the whole mini-batch.

    >>> mask = jnp.ones((1, 2), bool)
    >>> float(token_mean(jnp.array([[True, False]]), mask, Norm.of(mask)))
    0.5
    """
    x = jax.lax.stop_gradient(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    return safe_divide(masked_sum(x, mask), norm.tokens)

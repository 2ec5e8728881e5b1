"""Statistics over the entries that a mask selects, over all of an array, along an axis, or within groups of rows.

One rule everywhere: inputs are selected with `where` *before* any arithmetic, so that what lies outside the mask, NaN
and infinity included, reaches neither a value nor a gradient. An empty selection gives 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
Axis = int | tuple[int, ...] | None

WHITEN_EPSILON = 1e-8


def zero_outside(mask: Array, *arrays: Array) -> tuple[Array, ...]:
    """Each array with its entries outside `mask` replaced by 0: the selection every formula here begins with.

    Args:
      mask: bool, or 0/1 of any dtype; the arrays' shape.
      arrays: floating.

    >>> zero_outside(jnp.array([True, False]), jnp.array([3.0, jnp.nan]))[0].tolist()
    [3.0, 0.0]
    """
    selected = mask.astype(bool)
    return tuple(jnp.where(selected, x, jnp.zeros_like(x)) for x in arrays)


def safe_divide(numerator: Array, denominator: Array) -> Array:
    """numerator / denominator, and 0 (with a zero gradient) where the denominator is 0.

    >>> safe_divide(jnp.array([1.0, 0.0]), jnp.array([2.0, 0.0])).tolist()
    [0.5, 0.0]
    """
    empty = denominator == 0
    return jnp.where(empty, 0, numerator / jnp.where(empty, 1, denominator))


def masked_sum(x: Array, mask: Array, axis: Axis = None) -> Array:
    """Σ x over the mask.

    Args:
      x: floating, any shape.
      mask: bool or 0/1, x's shape.
      axis: axes summed; None for all.

    >>> float(masked_sum(jnp.array([1.0, jnp.inf]), jnp.array([True, False])))
    1.0
    """
    return zero_outside(mask, x)[0].sum(axis)


def masked_mean(x: Array, mask: Array, axis: Axis = None) -> Array:
    """Σ x / n over the n entries of the mask; 0 where n is 0.

    >>> masked_mean(jnp.array([[1.0, 3.0], [5.0, 9.0]]), jnp.array([[True, True], [False, False]]), axis=1).tolist()
    [2.0, 0.0]
    """
    return safe_divide(masked_sum(x, mask, axis), _count(mask, x.dtype, axis))


def masked_var(x: Array, mask: Array, axis: Axis = None, *, ddof: int = 1) -> Array:
    """Σ (x − mean)² / (n − ddof) over the n entries of the mask, in two passes; 0 where n ≤ ddof.

    >>> float(masked_var(jnp.array([1.0, 3.0, 50.0]), jnp.array([True, True, False])))
    2.0
    >>> float(masked_var(jnp.array([1.0, 3.0]), jnp.array([True, False])))
    0.0
    """
    (x,) = zero_outside(mask, x)
    mean = safe_divide(x.sum(axis, keepdims=True), _count(mask, x.dtype, axis, keepdims=True))
    squares = masked_sum(jnp.square(x - jnp.broadcast_to(mean, x.shape)), mask, axis)
    return safe_divide(squares, jnp.maximum(_count(mask, x.dtype, axis) - ddof, 0))


def masked_min(x: Array, mask: Array, axis: Axis = None) -> Array:
    """The least entry of the mask; 0 where it is empty.

    >>> float(masked_min(jnp.array([4.0, 3.0, -1.0]), jnp.array([True, True, False])))
    3.0
    """
    low = jnp.min(x, axis, initial=jnp.inf, where=mask.astype(bool))
    return jnp.where(mask.astype(bool).any(axis), low, 0)


def masked_max(x: Array, mask: Array, axis: Axis = None) -> Array:
    """The greatest entry of the mask; 0 where it is empty.

    >>> float(masked_max(jnp.array([-4.0, -3.0, 1.0]), jnp.array([True, True, False])))
    -3.0
    """
    return -masked_min(-x, mask, axis)


def masked_whiten(x: Array, mask: Array, shift_mean: bool = True) -> Array:
    """(x − mean) / sqrt(var + 1e-8) over the mask, var with ddof 1; 0 outside it.

    Equal entries have spread exactly 0 (tested by max == min: a rounded deviation would be blown up by 1e4), and fewer
    than two entries give zeros.

    Args:
      x: floating, any shape.
      mask: bool or 0/1, x's shape.
      shift_mean: False adds the mean back, so that only the scale changes.

    >>> print(masked_whiten(jnp.array([1.0, 3.0, 50.0]), jnp.array([True, True, False])).round(3))
    [-0.707  0.707  0.   ]
    >>> masked_whiten(jnp.array([0.1, 0.1]), jnp.array([True, True])).tolist()
    [0.0, 0.0]
    """
    (x,) = zero_outside(mask, x)
    mean = masked_mean(x, mask)
    flat = masked_max(x, mask) == masked_min(x, mask)
    white = jnp.where(flat, 0, (x - mean) * jax.lax.rsqrt(masked_var(x, mask) + WHITEN_EPSILON))
    if not shift_mean:
        white = jnp.where(_count(mask, x.dtype) < 2, 0, white + mean)
    return zero_outside(mask, white)[0]


@jax.jit  # traced once, however many statistics of a program are by group
def group_ids(uid: Array) -> Array:
    """Dense group numbers below B, int32 [B], for any integer ids in any order.

    Args:
      uid: integer [B]; equal ids are one group.

    >>> group_ids(jnp.array([900, -4, 900])).tolist()
    [1, 0, 1]
    """
    _, dense = jnp.unique(uid, size=uid.shape[0], return_inverse=True)
    return dense.reshape(uid.shape).astype(jnp.int32)


class GroupStats(NamedTuple):
    """Statistics of each row's group, all of them [B, …] like the values they are of."""

    count: Array  # valid rows in the group
    mean: Array
    std: Array  # ddof 1; 0 for fewer than two rows
    flat: Array  # bool: all values of the group are equal, or fewer than two rows are valid


def group_sum(x: Array, uid: Array) -> Array:
    """Each row's sum over its group, [B, …].

    Args:
      x: [B, …]
      uid: integer [B]

    >>> group_sum(jnp.array([1.0, 2.0, 4.0]), jnp.array([7, 5, 7])).tolist()
    [5.0, 2.0, 5.0]
    """
    dense = group_ids(uid)
    return jax.ops.segment_sum(x, dense, num_segments=uid.shape[0])[dense]


def group_max(x: Array, uid: Array) -> Array:
    """Each row's maximum over its group, [B, …].

    >>> group_max(jnp.array([1.0, 2.0, 4.0]), jnp.array([7, 5, 7])).tolist()
    [4.0, 2.0, 4.0]
    """
    dense = group_ids(uid)
    return jax.ops.segment_max(x, dense, num_segments=uid.shape[0])[dense]


def group_stats(x: Array, uid: Array, valid: Array) -> GroupStats:
    """Count, mean, standard deviation and flatness of each row's group, over its valid rows.

    Args:
      x: floating [B, …]; rows outside `valid` may hold anything.
      uid: integer [B]
      valid: bool [B], or x's shape.

    >>> x, uid, valid = jnp.array([1.0, 2.0, 3.0, 9.0]), jnp.array([5, 8, 5, 5]), jnp.array([True, True, True, False])
    >>> stats = group_stats(x, uid, valid)
    >>> stats.mean.tolist(), stats.count.tolist(), stats.flat.tolist()
    ([2.0, 2.0, 2.0, 2.0], [2.0, 1.0, 2.0, 2.0], [False, True, False, False])
    """
    valid = jnp.broadcast_to(valid.reshape(valid.shape + (1,) * (x.ndim - valid.ndim)), x.shape).astype(bool)
    (x,) = zero_outside(valid, x)
    count = group_sum(valid.astype(x.dtype), uid)
    mean = safe_divide(group_sum(x, uid), count)
    squares = group_sum(zero_outside(valid, jnp.square(x - mean))[0], uid)
    high = group_max(jnp.where(valid, x, -jnp.inf), uid)
    low = -group_max(jnp.where(valid, -x, -jnp.inf), uid)
    variance = safe_divide(squares, jnp.maximum(count - 1, 0))
    # sqrt has an infinite slope at 0, so it is given 1 there and the result is put right afterwards.
    std = jnp.where(variance > 0, jnp.sqrt(jnp.where(variance > 0, variance, 1)), 0)
    return GroupStats(count=count, mean=mean, std=std, flat=(high == low) | (count < 2))


def group_lead(x: Array, uid: Array, valid: Array) -> tuple[Array, Array]:
    """Which valid row holds its group's maximum alone, bool [B], and the group's second value, [B].

    The second value counts repetitions; it is −inf in a group with fewer than two valid rows.

    Args:
      x: floating [B]; rows outside `valid` may hold anything.
      uid: integer [B]
      valid: bool [B]

    >>> leads, second = group_lead(jnp.array([3.0, 1.0, 5.0, 5.0]), jnp.array([0, 0, 1, 1]), jnp.ones(4, bool))
    >>> leads.tolist(), second.tolist()
    ([True, False, False, False], [1.0, 1.0, 5.0, 5.0])
    """
    x = jnp.where(valid, x, -jnp.inf)
    high = group_max(x, uid)
    at_top = valid & (x == high)
    shared = group_sum(at_top.astype(jnp.int32), uid) > 1
    below = group_max(jnp.where(at_top, -jnp.inf, x), uid)
    return at_top & ~shared, jnp.where(shared, high, below)


def sum_to_go(x: Array, mask: Array, gamma: float | Array = 1.0) -> Array:
    """Discounted sums from each token of the mask to the last: y_t = x_t + γ y_{t+1}, t + 1 the next token of the mask.

    Args:
      x: floating [B, R]
      mask: bool [B, R]
      gamma: discount per token of the mask; masked positions pass the sum through.

    Returns:
      floating [B, R], 0 outside the mask.

    >>> sum_to_go(jnp.array([[1.0, 9.0, 2.0]]), jnp.array([[True, False, True]]), 0.5).tolist()
    [[2.0, 0.0, 2.0]]
    """
    (x,) = zero_outside(mask, x)

    def backwards(total: Array, at_t: tuple[Array, Array]) -> tuple[Array, Array]:
        value, real = at_t
        total = jnp.where(real, value + gamma * total, total)
        return total, total

    _, totals = jax.lax.scan(backwards, jnp.zeros_like(x[:, 0]), (x.T, mask.astype(bool).T), reverse=True)
    return zero_outside(mask, totals.T)[0]


def row_sums(x: Array, mask: Array) -> tuple[Array, Array]:
    """Each row's sum over its mask, [B], and which rows have any token, bool [B].

    >>> sums, valid = row_sums(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[True, True], [False, False]]))
    >>> sums.tolist(), valid.tolist()
    ([3.0, 0.0], [True, False])
    """
    return masked_sum(x, mask, axis=-1), mask.astype(bool).any(-1)


def spread(row: Array, mask: Array) -> Array:
    """A row's number [B] on each of its tokens, [B, R], and 0 outside the mask.

    >>> spread(jnp.array([2.0]), jnp.array([[True, False]])).tolist()
    [[2.0, 0.0]]
    """
    return jnp.where(mask.astype(bool), row[:, None], jnp.zeros_like(row)[:, None])


def _count(mask: Array, dtype: Any, axis: Axis = None, *, keepdims: bool = False) -> Array:
    return mask.astype(bool).sum(axis, keepdims=keepdims).astype(dtype)

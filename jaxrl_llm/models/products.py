"""The product of activations and a kernel, with a backward pass that compilers make fast programs of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.types import Array


def matmul(x: Array, kernel: Array, dtype: Any = None) -> Array:
    """x [..., D] @ kernel [D, F], of one dtype; the result in `dtype`, theirs if that is None.

    The kernel's gradient is xᵀ g or (gᵀ x)ᵀ, whichever turns the narrower of the two around: on a CPU that is a copy,
    with all the element-wise work in it that the array comes of. Differentiation by itself would always choose the
    second.
    """
    return _matmul(dtype, x, kernel)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(dtype: Any, x: Array, kernel: Array) -> Array:
    # The plain product, which `jax.checkpoint`'s policies know as one that is worth keeping (model.remat = "dots").
    return _dot(x, kernel, [x.ndim - 1], [0], dtype)


def _forward(dtype: Any, x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _dot(x, kernel, [x.ndim - 1], [0], dtype), (x, kernel)


def _backward(dtype: Any, kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    del dtype
    x, kernel = kept
    g = g.astype(x.dtype)
    of_kernel = _over_rows(x, g) if x.shape[-1] <= g.shape[-1] else _over_rows(g, x).T
    return _dot(g, kernel, [g.ndim - 1], [1]), of_kernel


_matmul.defvjp(_forward, _backward)


@jax.custom_vjp
def matmul_rows(x: Array, table: Array) -> Array:
    """x [..., D] @ tableᵀ, table [V, D], of one dtype; float32 at least."""
    return _by_rows(x, table)


def _by_rows(x: Array, table: Array) -> Array:
    return _dot(x, table, [x.ndim - 1], [1], jnp.promote_types(x.dtype, jnp.float32))


def _forward_rows(x: Array, table: Array) -> tuple[Array, tuple[Array, Array]]:
    return _by_rows(x, table), (x, table)


def _backward_rows(kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, table = kept
    g = g.astype(x.dtype)
    # [D, V] turned around is less work than g [T, V] turned around where there are more tokens than the model is wide.
    of_table = _over_rows(x, g).T if math.prod(x.shape[:-1]) > x.shape[-1] else _over_rows(g, x)
    return _dot(g, table, [g.ndim - 1], [0]), of_table


matmul_rows.defvjp(_forward_rows, _backward_rows)


def _over_rows(x: Array, g: Array) -> Array:
    """xᵀ g [D, F], of x [..., D] and g [..., F]."""
    rows = list(range(x.ndim - 1))
    if not _in_bfloat16_on_a_cpu(x):
        return _dot(x, g, rows, rows)
    # The fast products want x turned around. Turned around as a whole XLA would make it part of the product, which
    # would then be another one, of float32; not so in two halves.
    middle = x.shape[-1] // 2
    turned = jnp.concatenate([jnp.moveaxis(half, -1, 0) for half in (x[..., :middle], x[..., middle:])])
    return _dot(turned, g, [axis + 1 for axis in rows], rows)


def _dot(x: Array, y: Array, over: Sequence[int], over_y: Sequence[int], dtype: Any = None) -> Array:
    """Σ over these axes of x and of y, in `dtype`, theirs if that is None."""
    dtype = x.dtype if dtype is None else dtype
    summed = jnp.float32 if _in_bfloat16_on_a_cpu(x) else dtype
    return jax.lax.dot_general(x, y, ((over, over_y), ((), ())), preferred_element_type=summed).astype(dtype)


def _in_bfloat16_on_a_cpu(x: Array) -> bool:
    """There products of bfloat16 are several times as fast as those of float32 (AMX), but only of rows with float32
    results: of others XLA makes products of float32. Rounded to bfloat16 afterwards, the numbers are the same."""
    return x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"

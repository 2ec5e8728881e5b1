"""The product of activations and a kernel, with a backward pass that compilers make fast programs of."""

from __future__ import annotations

import math
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
    return jnp.matmul(x, kernel, preferred_element_type=dtype)


def _forward(dtype: Any, x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    # The plain product, which `jax.checkpoint`'s policies know as one that is worth keeping (model.remat = "dots").
    return jnp.matmul(x, kernel, preferred_element_type=dtype), (x, kernel)


def _backward(dtype: Any, kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    del dtype
    x, kernel = kept
    g = g.astype(x.dtype)
    rows = tuple(range(x.ndim - 1))
    both = (rows, rows), ((), ())
    narrow = x.shape[-1] <= g.shape[-1]
    of_kernel = jax.lax.dot_general(x, g, both) if narrow else jax.lax.dot_general(g, x, both).T
    return jax.lax.dot_general(g, kernel, (((g.ndim - 1,), (1,)), ((), ()))), of_kernel


_matmul.defvjp(_forward, _backward)


@jax.custom_vjp
def matmul_rows(x: Array, table: Array) -> Array:
    """x [..., D] @ tableᵀ, table [V, D], of one dtype; float32 at least."""
    return _by_rows(x, table)


def _by_rows(x: Array, table: Array) -> Array:
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    return jax.lax.dot_general(x, table, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=accumulate)


def _forward_rows(x: Array, table: Array) -> tuple[Array, tuple[Array, Array]]:
    return _by_rows(x, table), (x, table)


def _backward_rows(kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, table = kept
    rows = tuple(range(x.ndim - 1))
    g = g.astype(x.dtype)
    # [D, V] turned around is less work than g [T, V] turned around where there are more tokens than the model is wide.
    if math.prod(x.shape[:-1]) > x.shape[-1]:
        of_table = jax.lax.dot_general(x, g, ((rows, rows), ((), ()))).T
    else:
        of_table = jax.lax.dot_general(g, x, ((rows, rows), ((), ())))
    return jax.lax.dot_general(g, table, (((g.ndim - 1,), (0,)), ((), ()))), of_table


matmul_rows.defvjp(_forward_rows, _backward_rows)

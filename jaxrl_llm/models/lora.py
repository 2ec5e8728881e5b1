"""Low-rank adaptation: W + (alpha / rank) · A B with W frozen (Hu et al. 2021, arXiv:2106.09685).

The overlay is a tree of its own, the only one that is trained, such as
`{"layers": {"q": {"lora_a": [L, in, r], "lora_b": [L, r, out]}}}`. `join` lays it over the frozen parameters; each
layer then adds (alpha / rank) · (x A) B to what its kernel gives, so that no product of a kernel's size is ever kept.
`merge` writes the products into the kernels, once: for the sampler, and for whoever wants an ordinary model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import UserError, nearest
from jaxrl_llm.types import Array, Param, Params

# The names that PEFT and verl know the projections by -> ours. A router and experts are left as they are.
MODULES = {f"{name}_proj": name for name in ("q", "k", "v", "o", "gate", "up", "down")}
ALL = "all-linear"
A, B = "lora_a", "lora_b"


def declare_overlay(declaration: Params, *, rank: int, target_modules: Sequence[str], dtype: Any) -> Params:
    """The overlay's tree of `Param`: A from U(−1/√in, 1/√in) as PEFT has it, B zero, so that training starts from W.

    Args:
      declaration: of the whole model, `Model.declare()`.
      target_modules: names such as "q_proj", or "all-linear".

    Raises:
      UserError: a name that is none, or that the model does not have.
    """
    present = {name: leaf for name, leaf in MODULES.items() if leaf in declaration["layers"]}
    for name in target_modules:
        if name != ALL and name not in present:
            raise UserError(f"config.model.target_modules: {name!r}: {nearest(name, [*present, ALL])}")
    chosen = present if ALL in target_modules else {name: present[name] for name in target_modules}

    def one(kernel: Param) -> dict[str, Param]:
        layers, inputs, outputs = kernel.shape
        _, axis_in, axis_out = kernel.axes
        return {
            A: Param((layers, inputs, rank), dtype, ("layers", axis_in, None), _uniform),
            B: Param((layers, rank, outputs), dtype, ("layers", None, axis_out), _zeros),
        }

    return {"layers": {leaf: one(declaration["layers"][leaf]["kernel"]) for leaf in chosen.values()}}


def join(trained: Params, frozen: Params | None) -> Params:
    """Two trees of parameters as one: nested dicts, and tuples of unstacked layers, whose leaves exclude each other.

    >>> join({"layers": {"q": {"lora_a": 1}}}, {"embed": 2, "layers": {"q": {"kernel": 3}}})
    {'embed': 2, 'layers': {'q': {'kernel': 3, 'lora_a': 1}}}
    """
    if frozen is None:
        return trained
    if isinstance(frozen, tuple):
        return tuple(join(a, b) for a, b in zip(trained, frozen, strict=True))
    if not isinstance(frozen, Mapping) or not isinstance(trained, Mapping):
        raise ValueError("a parameter is both trained and frozen")
    return dict(frozen) | {name: join(x, frozen[name]) if name in frozen else x for name, x in trained.items()}


def merge(params: Params, scale: float) -> Params:
    """The parameters with W + scale · A B in place of W, A and B; summed in at least float32, rounded to W's dtype.

    A kernel that is quantized cannot take it in and keeps its A and B. Without an overlay nothing changes.
    """
    if isinstance(params, tuple):
        return tuple(merge(layer, scale) for layer in params)
    if not isinstance(params, Mapping):
        return params
    if A in params and not jnp.issubdtype(params["kernel"].dtype, jnp.integer):
        kernel, a, b = params["kernel"], params[A], params[B]
        high = jnp.promote_types(kernel.dtype, jnp.float32)
        whole = kernel.astype(high) + scale * (a.astype(high) @ b.astype(high))
        return {name: x for name, x in params.items() if name not in (A, B)} | {"kernel": whole.astype(kernel.dtype)}
    return {name: merge(x, scale) for name, x in params.items()}


def count(tree: Any) -> int:
    """How many numbers a tree of arrays, or of `Param`, holds."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Param))
    return sum(leaf.size if hasattr(leaf, "size") else _size(leaf.shape) for leaf in leaves)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for axis in shape:
        size *= axis
    return size


def _uniform(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    bound = shape[-2] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound).astype(dtype)


def _zeros(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    del key
    return jnp.zeros(shape, dtype)

"""Frozen kernels in 8 bits: W ≈ scale · Q with one scale an output, so that a frozen model takes a quarter of float32.

Only what lies beneath a LoRA overlay is quantized, never what is trained; embeddings, heads, norms, routers and experts
stay as they are. (QLoRA, Dettmers et al. 2023, arXiv:2305.14314, does the same in 4 bits.)
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxrl_llm.models.lora import MODULES
from jaxrl_llm.types import Array, Param, Params

LEVELS = 127


def declare_quantized(declaration: Params) -> Params:
    """The declaration of `quantize_kernels`' result. (Its initializers are never used.)"""

    def one(layer: dict[str, Param]) -> dict[str, Param]:
        kernel = layer["kernel"]
        (layers, _, outputs), (stack, _, axis) = kernel.shape, kernel.axes
        scale = Param((layers, outputs), jnp.float32, (stack, axis), kernel.init)
        return layer | {"kernel": Param(kernel.shape, jnp.int8, kernel.axes, kernel.init), "scale": scale}

    return _each(declaration, one)


def quantize_kernels(params: Params) -> Params:
    """Each projection's kernel [L, in, out] as int8 with `scale` float32 [L, out] beside it: the largest entry of a
    column over 127, so that no entry is off by more than half of it.

    >>> layer = {"kernel": jnp.array([[[1.27, 0.0], [-0.634, 0.0]]])}
    >>> found = quantize_kernels({"layers": {"q": layer}})["layers"]["q"]
    >>> found["kernel"].tolist(), [round(x, 4) for x in found["scale"][0].tolist()]
    ([[[127, 0], [-63, 0]]], [0.01, 0.0])
    """

    def one(layer: dict[str, Array]) -> dict[str, Array]:
        kernel = layer["kernel"].astype(jnp.float32)
        scale = jnp.abs(kernel).max(1) / LEVELS
        levels = jnp.round(kernel / jnp.where(scale > 0, scale, 1)[:, None, :])
        return layer | {"kernel": levels.astype(jnp.int8), "scale": scale}

    return _each(params, one)


def _each(params: Params, one: Any) -> Params:
    layers = params["layers"]
    changed = {name: one(layers[name]) for name in MODULES.values() if name in layers}
    return {**params, "layers": {**layers, **changed}}

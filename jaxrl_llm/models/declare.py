"""The parameters of the transformer: shape, dtype, logical axes and initializer of each leaf, stated here alone.

Parameters are nested dicts with the layers stacked on a leading axis; `layers` may also be a tuple of one dict per
layer (`unstack_layers`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.architecture import TransformerConfig
from jaxrl_llm.types import Array, Model, Param, Params

VALUE_HEAD = "value_head"
SCORE = "score"  # of a reward model, by the name that Hugging Face gives it


def _normal(scale: float) -> Callable[[Array, tuple[int, ...], Any], Array]:
    return lambda key, shape, dtype: (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def _ones(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    del key
    return jnp.ones(shape, dtype)


def _zeros(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    del key
    return jnp.zeros(shape, dtype)


def declare(config: TransformerConfig, dtype: Any, value_head: bool, score_head: bool = False) -> dict[str, Any]:
    """The tree of `Param` of a model; with a value head in place of a language-model head if `value_head`, or with a
    reward model's head if `score_head`."""
    layers, width = config.num_layers, config.width
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def dense(inputs: int, outputs: int, axes: tuple[str, str], bias: bool) -> dict[str, Param]:
        kernel = Param((layers, inputs, outputs), dtype, ("layers", *axes), _normal(0.02))
        if not bias:
            return {"kernel": kernel}
        return {"kernel": kernel, "bias": Param((layers, outputs), dtype, ("layers", axes[1]), _zeros)}

    def norm(*shape: int, axis: str | None = None) -> Param:
        return Param(shape, dtype, ("layers", axis)[2 - len(shape) :], _zeros if config.norm_plus_one else _ones)

    layer: dict[str, Any] = {
        "q": dense(width, q_width, ("embed", "heads"), config.qkv_bias),
        "k": dense(width, kv_width, ("embed", "kv_heads"), config.qkv_bias),
        "v": dense(width, kv_width, ("embed", "kv_heads"), config.qkv_bias),
        "o": dense(q_width, width, ("heads", "embed"), config.output_bias),
    }
    if config.moe is None:
        layer |= {
            "gate": dense(width, config.mlp_width, ("embed", "mlp"), config.mlp_bias),
            "up": dense(width, config.mlp_width, ("embed", "mlp"), config.mlp_bias),
            "down": dense(config.mlp_width, width, ("mlp", "embed"), config.mlp_bias),
        }
    else:
        # Cut by expert, not within one: a mesh axis can cut an array but once.
        lead, inner, axes = (layers, config.moe.num_experts), config.moe.width, ("layers", "expert")
        into = Param((*lead, width, inner), dtype, (*axes, "embed", None), _normal(0.02))
        out_of = Param((*lead, inner, width), dtype, (*axes, None, "embed"), _normal(0.02))
        layer["router"] = {
            "kernel": Param((layers, width, lead[1]), dtype, ("layers", "embed", None), _normal(0.02)),
        }
        layer["experts"] = {"gate": into, "up": into, "down": out_of}
    if config.pre_norms:
        layer |= {"attn_norm": norm(layers, width), "mlp_norm": norm(layers, width)}
    if config.post_norms:
        layer |= {"attn_post_norm": norm(layers, width), "mlp_post_norm": norm(layers, width)}
    if config.qk_norm == "head":
        layer |= {"q_norm": norm(layers, config.head_dim), "k_norm": norm(layers, config.head_dim)}
    elif config.qk_norm == "width":
        layer |= {"q_norm": norm(layers, q_width, axis="heads"), "k_norm": norm(layers, kv_width, axis="kv_heads")}
    tree: dict[str, Any] = {
        "embed": Param((config.vocab_size, width), dtype, ("vocab", "embed"), _normal(0.02)),
        "layers": layer,
        "final_norm": norm(width),
    }
    if value_head:
        # Zero: a fresh critic predicts 0 everywhere, whatever the width of the model below it.
        tree[VALUE_HEAD] = {
            "kernel": Param((width,), dtype, (None,), _zeros),
            "bias": Param((), dtype, (), _zeros),
        }
    elif score_head:
        # Without a bias, which a difference of scores cannot teach and which no folder has a place for.
        tree[SCORE] = Param((1, width), dtype, (None, None), _normal(0.02))
    elif not config.tie_embeddings:
        tree["lm_head"] = Param((width, config.vocab_size), dtype, ("embed", "vocab"), _normal(0.02))
    return tree


def init_params(model: Model, key: Array) -> Params:
    """Fresh parameters: each leaf from its declared initializer, with a key of its own."""
    return init_declared(model.declare(), key)


def init_declared(declaration: Params, key: Array) -> Params:
    """`init_params` of a tree of `Param`."""
    declared, structure = jax.tree.flatten(declaration, is_leaf=lambda x: isinstance(x, Param))
    keys = jax.random.split(key, len(declared))
    return structure.unflatten([p.init(k, p.shape, p.dtype) for p, k in zip(declared, keys, strict=True)])


def unstack_layers(params: Params) -> Params:
    """The same parameters with `layers` as a tuple of one tree per layer: an unrolled forward pass."""
    layers = params["layers"]
    depth = jax.tree.leaves(layers)[0].shape[0]
    return {**params, "layers": tuple(jax.tree.map(lambda x, i=i: x[i], layers) for i in range(depth))}


def stack_layers(params: Params) -> Params:
    """The inverse of `unstack_layers`."""
    return {**params, "layers": jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])}

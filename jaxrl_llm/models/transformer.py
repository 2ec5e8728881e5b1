"""The one transformer: what it declares, how it computes, and its heads. Families (families.py) are tables of settings.

Parameters are nested dicts with the layers stacked on a leading axis; `layers` may also be a tuple of one dict per
layer (`unstack_layers`), which the forward pass then unrolls.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.attention import attend, attend_blocks, attend_cached
from jaxrl_llm.types import Array, KVCache, Model, Param, Params

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": jax.nn.silu}
REMAT_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
Constrain = Callable[[Array, tuple[str | None, ...]], Array]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its scaling."""

    theta: float = 10_000.0
    kind: str = "default"  # default | linear | llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_positions: int = 8192  # llama3


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """What distinguishes one decoder-only transformer from another."""

    vocab_size: int  # rows of the embedding
    real_vocab_size: int  # ids the tokenizer knows; rows past it are never sampled and never counted
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    max_positions: int
    rope: RopeConfig = RopeConfig()
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"


def _keep(x: Array, axes: tuple[str | None, ...]) -> Array:
    del axes
    return x


def make_transformer(
    config: TransformerConfig,
    *,
    param_dtype: Any = jnp.float32,
    compute_dtype: Any = jnp.float32,
    remat: str = "none",
    value_head: bool = False,
    constrain: Constrain = _keep,
) -> Model:
    """The model of a config: with a language-model head, or with a value head in its place.

    Args:
      remat: what the backward pass recomputes: "none", "dots" (all but matrix products), "full" (each layer whole).
      constrain: (x, logical axes) -> x, keeps activations in their layout on a mesh; see sharding.py.
    """
    heads = {"value": partial(_value, config)} if value_head else {"logits": partial(_logits, config)}
    return Model(
        declare=partial(_declare, config, param_dtype, value_head),
        forward=partial(_forward, config, compute_dtype, remat, constrain),
        heads=heads,
        init_cache=partial(_init_cache, config, compute_dtype),
        vocab_size=config.vocab_size,
    )


# Declaration


def _normal(scale: float) -> Callable[[Array, tuple[int, ...], Any], Array]:
    return lambda key, shape, dtype: (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def _ones(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    del key
    return jnp.ones(shape, dtype)


def _zeros(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    del key
    return jnp.zeros(shape, dtype)


def _declare(config: TransformerConfig, dtype: Any, value_head: bool) -> dict[str, Any]:
    layers, width = config.num_layers, config.width
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def dense(inputs: int, outputs: int, axes: tuple[str, str], bias: bool) -> dict[str, Param]:
        kernel = Param((layers, inputs, outputs), dtype, ("layers", *axes), _normal(0.02))
        if not bias:
            return {"kernel": kernel}
        return {"kernel": kernel, "bias": Param((layers, outputs), dtype, ("layers", axes[1]), _zeros)}

    def norm(*lead: int) -> Param:
        return Param((*lead, width), dtype, ("layers",) * len(lead) + (None,), _ones)

    tree: dict[str, Any] = {
        "embed": Param((config.vocab_size, width), dtype, ("vocab", "embed"), _normal(0.02)),
        "layers": {
            "attn_norm": norm(layers),
            "q": dense(width, q_width, ("embed", "heads"), config.attention_bias),
            "k": dense(width, kv_width, ("embed", "kv_heads"), config.attention_bias),
            "v": dense(width, kv_width, ("embed", "kv_heads"), config.attention_bias),
            "o": dense(q_width, width, ("heads", "embed"), config.attention_bias),
            "mlp_norm": norm(layers),
            "gate": dense(width, config.mlp_width, ("embed", "mlp"), config.mlp_bias),
            "up": dense(width, config.mlp_width, ("embed", "mlp"), config.mlp_bias),
            "down": dense(config.mlp_width, width, ("mlp", "embed"), config.mlp_bias),
        },
        "final_norm": norm(),
    }
    if value_head:
        # Zero: a fresh critic predicts 0 everywhere, whatever the width of the model below it.
        tree["value_head"] = {
            "kernel": Param((width,), dtype, (None,), _zeros),
            "bias": Param((), dtype, (), _zeros),
        }
    elif not config.tie_embeddings:
        tree["lm_head"] = Param((width, config.vocab_size), dtype, ("embed", "vocab"), _normal(0.02))
    return tree


def init_params(model: Model, key: Array) -> Params:
    """Fresh parameters: each leaf from its declared initializer, with a key of its own."""
    declared, structure = jax.tree.flatten(model.declare(), is_leaf=lambda x: isinstance(x, Param))
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


# Forward


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """float32 [head_dim / 2], radians per position. Scalings as Hugging Face names them."""
    frequencies = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        # Long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
        turns = rope.original_max_positions * frequencies / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = np.clip(blend, 0, 1)
        frequencies = (1 - blend) * frequencies / rope.factor + blend * frequencies
    elif rope.kind != "default":
        raise ValueError(f"rope.kind: expected default, linear or llama3, found {rope.kind!r}")
    return frequencies.astype(np.float32)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the two halves of each head [B, T, H, D] by the angles of its position; cos, sin [B, T, 1, D/2]."""
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    high = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scaled = high * jax.lax.rsqrt(jnp.mean(high * high, -1, keepdims=True) + eps)
    return scaled.astype(x.dtype) * weight.astype(x.dtype)[(None,) * (x.ndim - 1)]


def _dense(x: Array, layer: dict[str, Array]) -> Array:
    out = x @ layer["kernel"].astype(x.dtype)
    return out + layer["bias"].astype(x.dtype)[None, None, :] if "bias" in layer else out


def _forward(
    config: TransformerConfig,
    compute_dtype: Any,
    remat: str,
    constrain: Constrain,
    params: Params,
    tokens: Array,
    positions: Array,
    segment_ids: Array,
    *,
    prefix_ids: Array | None = None,
    blocks: tuple[int, int] | None = None,
    cache: KVCache | None = None,
) -> tuple[Array, KVCache | None]:
    chex.assert_rank(tokens, 2)
    chex.assert_equal_shape([tokens, positions, segment_ids])
    # Looked up in whole rows: cut along `embed`, every device would look up a part of every row's tokens.
    table = constrain(params["embed"], ("vocab", None))
    x = constrain(table[tokens].astype(compute_dtype), ("batch", None, None))
    angle_dtype = jnp.promote_types(compute_dtype, jnp.float32)
    frequencies = rope_frequencies(config.rope, config.head_dim).astype(angle_dtype)
    angles = positions[:, :, None, None].astype(angle_dtype) * frequencies[None, None, None, :]
    rope = (jnp.cos(angles), jnp.sin(angles))
    block = partial(_block, config, constrain)
    layers = params["layers"]
    if cache is None:
        x = _run_layers(block, layers, x, rope, (positions, segment_ids, prefix_ids), blocks, remat)
    else:
        x, cache = _run_cached(block, layers, x, rope, (positions, segment_ids), cache)
    return _rms_norm(x, params["final_norm"], config.norm_eps), cache


def _block(
    config: TransformerConfig,
    constrain: Constrain,
    layer: Params,
    x: Array,
    rope: tuple[Array, Array],
    attention: Callable[[Array, Array, Array], tuple[Array, Any]],
) -> tuple[Array, Any]:
    """One layer; `attention(q, k, v)` returns its result and whatever it wants handed on (the cache)."""
    batch, length, _ = x.shape

    def heads(name: str, count: int) -> Array:
        return _dense(normed, layer[name]).reshape(batch, length, count, config.head_dim)

    normed = _rms_norm(x, layer["attn_norm"], config.norm_eps)
    q = _rotate(heads("q", config.num_heads), *rope)
    k = _rotate(heads("k", config.num_kv_heads), *rope)
    mixed, carried = attention(q, k, heads("v", config.num_kv_heads))
    x = x + _dense(mixed.reshape(batch, length, -1), layer["o"])
    normed = _rms_norm(x, layer["mlp_norm"], config.norm_eps)
    gate = ACTIVATIONS[config.activation](_dense(normed, layer["gate"]))
    x = x + _dense(gate * _dense(normed, layer["up"]), layer["down"])
    return constrain(x, ("batch", None, None)), carried


def _run_layers(
    block: Callable[..., tuple[Array, Any]],
    layers: Params,
    x: Array,
    rope: tuple[Array, Array],
    where: tuple[Array, Array, Array | None],
    blocks: tuple[int, int] | None,
    remat: str,
) -> Array:
    positions, segments, prefixes = where

    def run(layer: Params, x: Array) -> Array:
        def attention(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            scale = q.shape[-1] ** -0.5
            if blocks is not None:
                return attend_blocks(q, k, v, positions, segments, blocks=blocks, scale=scale), None
            out, _ = attend(q, k, v, positions, positions, segments, segments, scale=scale, q_prefix=prefixes)
            return out, None

        return block(layer, x, rope, attention)[0]

    if remat != "none":
        # Inside a scan common subexpressions cannot be merged across the loop, so the barrier would only cost.
        run = jax.checkpoint(run, policy=REMAT_POLICIES[remat], prevent_cse=isinstance(layers, tuple))
    if isinstance(layers, tuple):
        for layer in layers:
            x = run(layer, x)
        return x
    return jax.lax.scan(lambda x, layer: (run(layer, x), None), x, layers)[0]


def _run_cached(
    block: Callable[..., tuple[Array, Any]],
    layers: Params,
    x: Array,
    rope: tuple[Array, Array],
    where: tuple[Array, Array],
    cache: KVCache,
) -> tuple[Array, KVCache]:
    positions, mask = where
    rows, width = cache.k.shape[1:3]
    groups = cache.prompt_length.shape[0]
    start = jnp.repeat(cache.prompt_length, rows // groups)
    # A slot past the end is dropped: that is where padding goes.
    slots = jnp.where(mask > 0, positions - start[:, None], width)
    filled = cache.length + mask.sum(1, dtype=jnp.int32)

    def run(
        index: Array | int, layer: Params, prompt_k: Array, prompt_v: Array, carry: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        x, all_k, all_v = carry

        def attention(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
            new_k, new_v = _write_slots(all_k, index, slots, k), _write_slots(all_v, index, slots, v)
            prompt = (prompt_k, prompt_v, cache.prompt_length)
            own = (new_k[index], new_v[index], filled)
            return attend_cached(q, prompt, own, positions, mask, scale=q.shape[-1] ** -0.5), (new_k, new_v)

        x, (all_k, all_v) = block(layer, x, rope, attention)
        return x, all_k, all_v

    carry = (x, cache.k, cache.v)
    if isinstance(layers, tuple):
        for i, layer in enumerate(layers):
            carry = run(i, layer, cache.prompt_k[i], cache.prompt_v[i], carry)
    else:
        xs = (jnp.arange(cache.k.shape[0]), layers, cache.prompt_k, cache.prompt_v)
        carry, _ = jax.lax.scan(lambda c, per_layer: (run(*per_layer, c), None), carry, xs)
    x, k, v = carry
    return x, cache.replace(k=k, v=v, length=filled)


def _write_slots(cache: Array, index: Array | int, slots: Array, new: Array) -> Array:
    """cache [L, B, R, KV, H] with new [B, T, KV, H] in layer `index` at slots [B, T]; a slot past the end is dropped.

    `cache.at[index, rows, slots].set(new)`, but with rows as a batch axis of the scatter: what is spread over a mesh by
    rows then stays where it is, while indices of rows would have every device gather them all.
    """
    where = jnp.stack([jnp.full(slots.shape, index, slots.dtype), slots], -1)
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3),
        inserted_window_dims=(0, 2),
        scatter_dims_to_operand_dims=(0, 2),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(0,),
    )
    return jax.lax.scatter(cache, where, new, numbers, mode="drop")


def _init_cache(config: TransformerConfig, compute_dtype: Any, rows: int, width: int) -> KVCache:
    def empty(groups: int, slots: int) -> Array:
        return jnp.zeros((config.num_layers, groups, slots, config.num_kv_heads, config.head_dim), compute_dtype)

    return KVCache(
        prompt_k=empty(rows, 0),
        prompt_v=empty(rows, 0),
        prompt_length=jnp.zeros(rows, jnp.int32),
        k=empty(rows, width),
        v=empty(rows, width),
        length=jnp.zeros(rows, jnp.int32),
    )


# Heads


def _logits(config: TransformerConfig, params: Params, hidden: Array) -> Array:
    """At least float32 [..., V]; rows of the embedding that the tokenizer does not know are −inf."""
    accumulate = jnp.promote_types(hidden.dtype, jnp.float32)
    table = params["embed"] if config.tie_embeddings else params["lm_head"]
    subscripts = "...d,vd->...v" if config.tie_embeddings else "...d,dv->...v"
    logits = jnp.einsum(subscripts, hidden, table.astype(hidden.dtype), preferred_element_type=accumulate)
    if config.real_vocab_size == config.vocab_size:
        return logits
    known = (jnp.arange(config.vocab_size) < config.real_vocab_size)[(None,) * (hidden.ndim - 1)]
    return jnp.where(known, logits, -jnp.inf)


def _value(config: TransformerConfig, params: Params, hidden: Array) -> Array:
    """At least float32 [...]"""
    del config
    head = params["value_head"]
    accumulate = jnp.promote_types(hidden.dtype, jnp.float32)
    value = jnp.einsum("...d,d->...", hidden, head["kernel"].astype(hidden.dtype), preferred_element_type=accumulate)
    return value + head["bias"].astype(accumulate)

"""The one transformer: how it computes, and its heads. Families (families.py) are tables of settings (architecture.py);
the parameters are declared in declare.py.

`params["layers"]` is a tree with the layers stacked on a leading axis, which the forward pass scans, or a tuple of one
tree per layer (`unstack_layers`), which it unrolls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.models.architecture import ACTIVATIONS, LayerKind, TransformerConfig, layer_kinds, stack_kinds
from jaxrl_llm.models.attention import attend, attend_blocks, attend_cached, attend_packed
from jaxrl_llm.models.cache import KVCache
from jaxrl_llm.models.declare import SCORE, VALUE_HEAD, declare, init_params, stack_layers, unstack_layers
from jaxrl_llm.models.moe import moe
from jaxrl_llm.models.products import matmul, matmul_rows
from jaxrl_llm.models.rope import RopeConfig, rope_tables, rotate
from jaxrl_llm.types import Array, Model, Packed, Params

__all__ = ["RopeConfig", "TransformerConfig", "init_params", "make_transformer", "stack_layers", "unstack_layers"]

REMAT_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
Constrain = Callable[[Array, tuple[str | None, ...]], Array]


def _keep(x: Array, axes: tuple[str | None, ...]) -> Array:
    del axes
    return x


@dataclasses.dataclass(frozen=True)
class _Stream:
    """The residual stream [B, T, D], whose tokens may be cut over a mesh (see sharding.py), and the ways between it and
    products, which take and give whole rows. Each way states both of its ends: gradients go it backwards."""

    constrain: Constrain
    cut: bool

    def keep(self, x: Array) -> Array:
        return self.constrain(x, ("batch", "length" if self.cut else None, None))

    def gather(self, x: Array) -> Array:
        return self.constrain(self.keep(x), ("batch", None, None))

    def scatter(self, x: Array) -> Array:
        return self.keep(self.constrain(x, ("batch", None, None)))


def make_transformer(
    config: TransformerConfig,
    *,
    param_dtype: Any = jnp.float32,
    compute_dtype: Any = jnp.float32,
    remat: str = "none",
    value_head: bool = False,
    score_head: bool = False,
    constrain: Constrain = _keep,
) -> Model:
    """The model of a config: with a language-model head, or in its place a critic's value head or a reward model's.

    Args:
      remat: what the backward pass recomputes: "none", "dots" (all but matrix products), "full" (each layer whole).
      constrain: (x, logical axes) -> x, keeps activations in their layout on a mesh; see sharding.py.
    """
    head = {"value": _value} if value_head else {"score": _score} if score_head else {"logits": _logits}
    heads = {name: partial(function, config) for name, function in head.items()}
    return Model(
        declare=partial(declare, config, param_dtype, value_head, score_head),
        forward=partial(_forward, config, compute_dtype, remat, constrain),
        heads=heads,
        init_cache=partial(_init_cache, config, compute_dtype),
        vocab_size=config.vocab_size,
    )


# Forward


def _rms_norm(config: TransformerConfig, x: Array, weight: Array) -> Array:
    """x / √(mean x² + eps) · weight over the last axis, in at least float32 and rounded once."""
    high = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scaled = high * jax.lax.rsqrt(jnp.mean(high * high, -1, keepdims=True) + config.norm_eps)
    weight = weight.astype(high.dtype)[(None,) * (x.ndim - 1)]
    return (scaled * (1 + weight if config.norm_plus_one else weight)).astype(x.dtype)


def _dense(config: TransformerConfig, x: Array, layer: dict[str, Array]) -> Array:
    """x W + b; with an overlay + lora_scale · (x A) B (lora.py); W is scale · Q where it is quantized (quantize.py)."""
    out = matmul(x, layer["kernel"].astype(x.dtype))
    if "scale" in layer:
        out = out * layer["scale"].astype(x.dtype)[None, None, :]
    if "lora_a" in layer:
        overlay = matmul(matmul(x, layer["lora_a"].astype(x.dtype)), layer["lora_b"].astype(x.dtype))
        out = out + config.lora_scale * overlay
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
    blocks: tuple[int, int] | Packed | None = None,
    cache: KVCache | None = None,
) -> tuple[Array, KVCache | None]:
    chex.assert_rank(tokens, 2)
    chex.assert_equal_shape([tokens, positions, segment_ids])
    # Small and wanted everywhere: not to be cut as the activations are that come of it.
    tokens, positions, segment_ids = (constrain(x, ("batch", None)) for x in (tokens, positions, segment_ids))
    # With a cache nothing is kept for a backward pass, and while sampling there is one token to a row.
    stream = _Stream(constrain, cut=cache is None)
    # Looked up in whole rows: cut along `embed`, every device would look up a part of every row's tokens.
    table = constrain(params["embed"], ("vocab", None))
    x = stream.scatter(table[tokens].astype(compute_dtype))
    if config.embed_scale != 1:
        x = x * jnp.asarray(config.embed_scale, compute_dtype)  # rounded to it, as the models were trained
    limit = tokens.shape[1] if cache is None else cache.prompt_width + cache.width
    high = jnp.promote_types(compute_dtype, jnp.float32)
    rope = rope_tables(config.ropes, config.head_dim, positions, high, limit=limit)
    block = partial(_block, config, stream, rope)
    layers = params["layers"]
    kinds = layer_kinds(config)
    if not isinstance(layers, tuple):
        kinds = stack_kinds(kinds)
    if cache is None:
        x = _run_layers(block, layers, kinds, x, (positions, segment_ids, prefix_ids), blocks, remat)
    else:
        x, cache = _run_cached(block, layers, kinds, x, (positions, segment_ids), cache)
    return stream.gather(_rms_norm(config, x, params["final_norm"])), cache


def _block(
    config: TransformerConfig,
    stream: _Stream,
    rope: tuple[Array, Array],
    layer: Params,
    kind: LayerKind,
    x: Array,
    attention: Callable[..., tuple[Array, Any]],
) -> tuple[Array, Any]:
    """One layer; `attention(q, k, v, …)` returns its result and whatever it wants handed on (the cache)."""
    batch, length, _ = x.shape
    cos, sin = rope if kind.rope is None else (rope[0][kind.rope], rope[1][kind.rope])

    dense = partial(_dense, config)

    def norm(x: Array, name: str) -> Array:
        return _rms_norm(config, x, layer[name]) if name in layer else x

    def heads(name: str, count: int) -> Array:
        x = dense(normed, layer[name])
        if config.qk_norm == "width":
            x = norm(x, f"{name}_norm")
        x = x.reshape(batch, length, count, config.head_dim)
        return norm(x, f"{name}_norm") if config.qk_norm == "head" else x

    normed = stream.gather(norm(x, "attn_norm"))
    q, k = (rotate(heads(*of), cos, sin) for of in (("q", config.num_heads), ("k", config.num_kv_heads)))
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    how = {"scale": scale, "window": kind.window, "softcap": config.attention_softcap}
    mixed, carried = attention(q, k, heads("v", config.num_kv_heads), **how)
    mixed = stream.scatter(dense(mixed.reshape(batch, length, -1), layer["o"]))
    x = x + norm(mixed, "attn_post_norm")
    normed = stream.gather(norm(x, "mlp_norm"))
    activation = ACTIVATIONS[config.activation]
    if config.moe is None:
        gate = activation(dense(normed, layer["gate"]))
        mixed = dense(gate * dense(normed, layer["up"]), layer["down"])
    else:
        mixed = moe(config.moe, activation, stream.constrain, layer["experts"], normed, dense(normed, layer["router"]))
    x = x + norm(stream.scatter(mixed), "mlp_post_norm")
    return stream.keep(x), carried


def _run_layers(
    block: Callable[..., tuple[Array, Any]],
    layers: Params,
    kinds: Any,
    x: Array,
    where: tuple[Array, Array, Array | None],
    blocks: tuple[int, int] | Packed | None,
    remat: str,
) -> Array:
    positions, segments, prefixes = where

    def attention(q: Array, k: Array, v: Array, **how: Any) -> tuple[Array, None]:
        if isinstance(blocks, Packed):
            return attend_packed(q, k, v, positions, segments, packed=blocks, **how), None
        if blocks is not None:
            return attend_blocks(q, k, v, positions, segments, blocks=blocks, **how), None
        return attend(q, k, v, positions, positions, segments, segments, q_prefix=prefixes, **how)[0], None

    def run(layer: Params, kind: LayerKind, x: Array) -> Array:
        return block(layer, kind, x, attention)[0]

    if remat != "none":
        # Inside a scan common subexpressions cannot be merged across the loop, so the barrier would only cost.
        run = jax.checkpoint(run, policy=REMAT_POLICIES[remat], prevent_cse=isinstance(layers, tuple))
    if isinstance(layers, tuple):
        for layer, kind in zip(layers, kinds, strict=True):
            x = run(layer, kind, x)
        return x
    return jax.lax.scan(lambda x, per_layer: (run(*per_layer, x), None), x, (layers, kinds))[0]


def _run_cached(
    block: Callable[..., tuple[Array, Any]],
    layers: Params,
    kinds: Any,
    x: Array,
    where: tuple[Array, Array],
    cache: KVCache,
) -> tuple[Array, KVCache]:
    positions, mask = where
    filled = cache.length + mask.sum(1, dtype=jnp.int32)
    write = _writer(cache, mask)

    def run(
        index: Array | None,
        layer: Params,
        kind: LayerKind,
        prompt: tuple[Array, Array],
        x: Array,
        all_k: Array,
        all_v: Array,
    ) -> tuple[Array, Array, Array]:
        """One layer, whose own keys and values are at `index` of all_k, all_v, or are these (None)."""

        def attention(q: Array, k: Array, v: Array, **how: Any) -> tuple[Array, tuple[Array, Array]]:
            new_k, new_v = write(all_k, index, k, -1), write(all_v, index, v, -2)
            own = (new_k, new_v) if index is None else (new_k[index], new_v[index])
            return attend_cached(q, cache, prompt, (*own, filled), positions, mask, **how), (new_k, new_v)

        x, (all_k, all_v) = block(layer, kind, x, attention)
        return x, all_k, all_v

    if isinstance(layers, tuple):
        # Each layer's arrays by themselves: products read them where they lie, without a copy.
        apart = [_apart(part, len(layers)) for part in (cache.prompt_k, cache.prompt_v, cache.k, cache.v)]
        own_k, own_v = [], []
        for layer, kind, prompt_k, prompt_v, k, v in zip(layers, kinds, *apart, strict=True):
            x, k, v = run(None, layer, kind, (prompt_k, prompt_v), x, k, v)
            own_k, own_v = [*own_k, k], [*own_v, v]
        k, v = tuple(own_k), tuple(own_v)
    else:

        def scanned(carry: tuple[Array, Array, Array], per_layer: Any) -> tuple[tuple[Array, Array, Array], None]:
            index, layer, kind, prompt = per_layer
            return run(index, layer, kind, prompt, *carry), None

        xs = (jnp.arange(cache.k.shape[0]), layers, kinds, (cache.prompt_k, cache.prompt_v))
        (x, k, v), _ = jax.lax.scan(scanned, (x, cache.k, cache.v), xs)
    slot = None if cache.slot is None else cache.slot + 1
    return x, cache.replace(k=k, v=v, length=filled, slot=slot)


def _apart(stacked_or_not: Any, layers: int) -> tuple[Array, ...]:
    if isinstance(stacked_or_not, tuple):
        return stacked_or_not
    return tuple(stacked_or_not[i] for i in range(layers))


def _writer(cache: KVCache, mask: Array) -> Callable[[Array, Array | None, Array, int], Array]:
    """(cache [L, B, …], layer, new [B, T, KV, H], axis of the slots) -> cache with the tokens under the mask in it; or
    ([B, …], None, …) -> one layer's."""
    if cache.slot is not None:
        chex.assert_axis_dimension(mask, 1, 1)
        slot = cache.slot

        def in_step(leaf: Array, index: Array | None, new: Array, axis: int) -> Array:
            # What a row that has ended gets here lies past its length, where nobody looks.
            token = jnp.expand_dims(new[:, 0], axis)
            start = [jnp.int32(0)] * token.ndim
            start[axis] = slot
            if index is None:
                return jax.lax.dynamic_update_slice(leaf, token, start)
            return jax.lax.dynamic_update_slice(leaf, token[None], [index.astype(jnp.int32), *start])

        return in_step
    # Past the end: dropped. That is where padding goes.
    slots = jnp.where(mask > 0, cache.length[:, None] + jnp.cumsum(mask, 1, dtype=jnp.int32) - 1, cache.width)
    return lambda leaf, index, new, axis: _write_slots(leaf, index, slots, new, axis)


def _write_slots(cache: Array, index: Array | None, slots: Array, new: Array, axis: int) -> Array:
    """cache [L, B, …] with new [B, T, KV, H] in layer `index` at slots [B, T] of `axis`; one past the end is dropped.

    `cache.at[index, rows, …, slots].set(new)`, but with rows as a batch axis of the scatter: what is spread over a mesh
    by rows then stays where it is, while indices of rows would have every device gather them all.
    """
    if index is None:
        return _write_slots(cache[None], jnp.int32(0), slots, new, axis)[0]
    axis = cache.ndim + axis
    where = jnp.stack([jnp.full(slots.shape, index, slots.dtype), slots], -1)
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(2, 3),
        inserted_window_dims=(0, axis),
        scatter_dims_to_operand_dims=(0, axis),
        operand_batching_dims=(1,),
        scatter_indices_batching_dims=(0,),
    )
    return jax.lax.scatter(cache, where, new, numbers, mode="drop")


def _init_cache(config: TransformerConfig, compute_dtype: Any, rows: int, width: int) -> KVCache:
    def empty(*slots_and_size: int) -> Array:
        return jnp.zeros((config.num_layers, rows, config.num_kv_heads, *slots_and_size), compute_dtype)

    return KVCache(
        prompt_k=empty(config.head_dim, 0),
        prompt_v=empty(0, config.head_dim),
        prompt_length=jnp.zeros(rows, jnp.int32),
        k=empty(config.head_dim, width),
        v=empty(width, config.head_dim),
        length=jnp.zeros(rows, jnp.int32),
    )


# Heads


def _logits(config: TransformerConfig, params: Params, hidden: Array) -> Array:
    """At least float32 [..., V]; rows of the embedding that the tokenizer does not know are −inf."""
    if config.tie_embeddings:
        logits = matmul_rows(hidden, params["embed"].astype(hidden.dtype))
    else:
        head = params["lm_head"].astype(hidden.dtype)
        logits = matmul(hidden, head, jnp.promote_types(hidden.dtype, jnp.float32))
    if config.logit_softcap is not None:
        logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
    if config.real_vocab_size == config.vocab_size:
        return logits
    known = (jnp.arange(config.vocab_size) < config.real_vocab_size)[(None,) * (hidden.ndim - 1)]
    return jnp.where(known, logits, -jnp.inf)


def _value(config: TransformerConfig, params: Params, hidden: Array) -> Array:
    """At least float32 [...]"""
    del config
    head = params[VALUE_HEAD]
    value = _scalar(hidden, head["kernel"])
    return value + head["bias"].astype(value.dtype)


def _score(config: TransformerConfig, params: Params, hidden: Array) -> Array:
    """At least float32 [...]"""
    del config
    return _scalar(hidden, params[SCORE][0])


def _scalar(hidden: Array, kernel: Array) -> Array:
    accumulate = jnp.promote_types(hidden.dtype, jnp.float32)
    return jnp.einsum("...d,d->...", hidden, kernel.astype(hidden.dtype), preferred_element_type=accumulate)

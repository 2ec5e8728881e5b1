"""A flax.nnx module as a `Model`: `from_nnx`. See docs/own_model.md.

The module is any causal function of token ids; it knows nothing of prompts shared by several responses, of padding on
the left or of caches. What steps ask for in one line of a prompt and its responses is computed as rows of one sequence
each, and the "cache" is the tokens so far, of which everything is computed again at each new token: right for every
module, and slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx, struct

from jaxrl_llm.models.cache import put_rows, take_rows
from jaxrl_llm.models.lines import Rows
from jaxrl_llm.types import Array, Model, Packed, Param, Params

Make = Callable[[nnx.Rngs], nnx.Module]
Forward = Callable[[Any, Array, Array, Array], Array]
Head = Callable[[Any, Array], Array]


class TokenCache(struct.PyTreeNode):
    """What stands for a cache of keys and values where a model has none: the tokens themselves.

    The prompts' part once per prompt, shared by its n rows, and each row's own part, as in `KVCache`; what lies at or
    after a length is undefined and never seen.
    """

    prompt: Array  # int32 [G, P]
    prompt_length: Array  # int32 [G]
    tokens: Array  # int32 [B, R]
    length: Array  # int32 [B], slots filled

    @property
    def start(self) -> Array:
        """int32 [B], the position of each row's first slot."""
        return jnp.repeat(self.prompt_length, self.length.shape[0] // self.prompt_length.shape[0])

    def fork(self, n: int, width: int) -> TokenCache:
        """A cache of n rows per row of this one, which becomes their shared prompt; `width` empty slots each."""
        rows = self.tokens.shape[0] * n
        return TokenCache(
            prompt=self.tokens,
            prompt_length=self.length,
            tokens=jnp.zeros((rows, width), jnp.int32),
            length=jnp.zeros(rows, jnp.int32),
        )

    def grow(self, width: int) -> TokenCache:
        return self.replace(tokens=jnp.pad(self.tokens, ((0, 0), (0, width - self.tokens.shape[1]))))

    def in_step(self) -> TokenCache:
        return self

    def out_of_step(self) -> TokenCache:
        return self

    def take(self, rows: Array) -> TokenCache:
        """The cache of some rows, each with a copy of its prompt."""
        n = self.length.shape[0] // self.prompt_length.shape[0]
        prompt, length = (jnp.repeat(x, n, axis=0) for x in (self.prompt, self.prompt_length))
        return TokenCache(*(take_rows(x, rows) for x in (prompt, length, self.tokens, self.length)))

    def put(self, rows: Array, part: TokenCache) -> TokenCache:
        tokens, length = put_rows(self.tokens, rows, part.tokens), put_rows(self.length, rows, part.length)
        return self.replace(tokens=tokens, length=length)


def from_nnx(
    make: Make,
    *,
    vocab_size: int,
    forward: Forward = lambda module, tokens, positions, mask: module(tokens, positions, mask),
    heads: Mapping[str, Head] | None = None,
) -> Model:
    """A `Model` whose parameters are the `nnx.Param`s of `make(rngs)`, as nested dicts.

    Args:
      make: makes the module. Only its shapes are computed here; `init_params(model, key)` draws fresh parameters, and
        `params_of(module)` are those of a module that there is already.
      vocab_size: V, of the token ids.
      forward: (module, tokens, positions, mask) -> hidden [N, T, D], by default the module's own `__call__`. Each row
        is one sequence: tokens int32 [N, T], positions int32 [N, T] = 0, 1, …, mask bool [N, T], False on what follows
        the sequence's end. hidden[:, t] may depend on tokens[:, :t + 1] alone; then what follows the end cannot reach
        it, and a module need not look at the mask.
      heads: name -> (module, hidden [..., D]) -> [..., V] for "logits", [...] for "value" (a critic has that one
        alone). By default {"logits": module.logits}.

    Raises:
      ValueError: the module has variables that are neither parameters nor random keys (running averages, say): a model
        is a function of its parameters alone. When it is called: parameters that are not the module's, a `forward` or
        a head that gives another shape.

    Dropout is off (`module.eval()`), every parameter lies whole on every device, and `config.model.scan_layers` must
    stay True: there are no stacked layers to take apart.
    """
    graph, declared, keys, other = nnx.split(
        nnx.eval_shape(lambda: _evaluating(make(nnx.Rngs(0)))), nnx.Param, nnx.RngState, ...
    )
    if found := [name for name, _ in _named(nnx.to_pure_dict(other))]:
        raise ValueError(f"the module has state beside its parameters: {', '.join(found[:3])}; only nnx.Param can be")
    keys = jax.tree.map(_constant, keys)
    heads = heads or {"logits": lambda module, hidden: module.logits(hidden)}

    shapes = {name: leaf.shape for name, leaf in _named(nnx.to_pure_dict(declared))}

    def module_of(params: Params) -> Any:
        found = {name: jnp.shape(leaf) for name, leaf in _named(params)}
        if wrong := sorted(name for name in shapes | found if shapes.get(name) != found.get(name)):
            name = wrong[0]
            raise ValueError(
                f"parameter {name}: the module has {shapes.get(name, 'no such one')}, given is "
                f"{found.get(name, 'none')} ({len(wrong)} differ)"
            )
        state = jax.tree.map(lambda leaf: leaf, declared)  # a copy, since what follows writes into it
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state, keys)

    def run(params: Params, tokens: Array, mask: Array) -> Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        hidden = forward(module_of(params), jnp.where(mask, tokens, 0), positions, mask)
        shape = getattr(hidden, "shape", type(hidden).__name__)
        if len(shape) != 3 or shape[:2] != tokens.shape:
            raise ValueError(f"forward: expected hidden [{tokens.shape[0]}, {tokens.shape[1]}, D], found {shape}")
        return hidden

    def head(name: str, apply: Head) -> Callable[[Params, Array], Array]:
        def of_params(params: Params, hidden: Array) -> Array:
            out = apply(module_of(params), hidden)
            # A shape that broadcasts, or more logits than tokens, would go unnoticed for long.
            expected = (*hidden.shape[:-1], vocab_size) if name == "logits" else hidden.shape[:-1]
            if (shape := getattr(out, "shape", type(out).__name__)) != expected:
                raise ValueError(f"heads[{name!r}] of hidden {hidden.shape}: expected {expected}, found {shape}")
            return out.astype(jnp.promote_types(out.dtype, jnp.float32))

        return of_params

    def model_forward(
        params: Params,
        tokens: Array,
        positions: Array,
        segment_ids: Array,
        *,
        prefix_ids: Array | None = None,
        blocks: tuple[int, int] | Packed | None = None,
        cache: Any = None,
    ) -> tuple[Array, Any]:
        if prefix_ids is not None:
            raise NotImplementedError("from_nnx: lines packed of several segments; use blocks, or a row per sequence")
        mask = segment_ids > 0
        if cache is not None:
            return _with_cache(lambda *row: run(params, *row), tokens, positions, mask, cache)
        if isinstance(blocks, Packed):
            return _unpacked(lambda *row: run(params, *row), tokens, segment_ids, blocks), None
        if blocks is not None and blocks[1] > 0:
            return _in_blocks(lambda *row: run(params, *row), tokens, mask, blocks), None
        return _packed(lambda *row: run(params, *row), tokens, mask), None

    return Model(
        declare=lambda: _declaration(make, declared),
        forward=model_forward,
        heads={name: head(name, apply) for name, apply in heads.items()},
        init_cache=_empty_cache,
        vocab_size=vocab_size,
    )


def params_of(module: nnx.Module) -> Params:
    """The parameters of a module as the `Model` that `from_nnx` makes of it wants them."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _declaration(make: Make, declared: nnx.State) -> Params:
    names = [name for name, _ in _named(nnx.to_pure_dict(declared))]

    def param(name: str, leaf: jax.ShapeDtypeStruct) -> Param:
        index = names.index(name)

        def init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
            # The other leaves are not computed where this is jitted.
            value = jax.tree.leaves(params_of(make(nnx.Rngs(key))))[index]
            chex.assert_shape(value, shape)
            return value.astype(dtype)

        return Param(leaf.shape, leaf.dtype, (None,) * len(leaf.shape), init)

    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: param(jax.tree_util.keystr(path), leaf), nnx.to_pure_dict(declared)
    )


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.flatten_with_path(tree)[0]]


def _evaluating(module: nnx.Module) -> nnx.Module:
    module.eval()
    return module


def _constant(leaf: Any) -> Array:
    """A random key, or a count of its uses, that nothing reads: dropout is off."""
    zero = jax.random.key(0) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.zeros((), leaf.dtype)
    return jnp.broadcast_to(zero, leaf.shape)


def _empty_cache(rows: int, width: int) -> TokenCache:
    return TokenCache(
        prompt=jnp.zeros((rows, 0), jnp.int32),
        prompt_length=jnp.zeros(rows, jnp.int32),
        tokens=jnp.zeros((rows, width), jnp.int32),
        length=jnp.zeros(rows, jnp.int32),
    )


# Sequences, each in a row of its own that begins at its first slot

Run = Callable[[Array, Array], Array]  # tokens, mask [N, T] -> hidden [N, T, D]


def _packed(run: Run, tokens: Array, mask: Array) -> Array:
    """Hidden states [N, T, D] of the tokens under the mask, in their places; of the others undefined."""
    real_first = jnp.argsort(~mask, axis=1, stable=True)
    hidden = run(jnp.take_along_axis(tokens, real_first, 1), jnp.take_along_axis(mask, real_first, 1))
    rank = jnp.maximum(jnp.cumsum(mask, 1) - 1, 0)
    return jnp.take_along_axis(hidden, rank[:, :, None], 1)


def _in_blocks(run: Run, tokens: Array, mask: Array, blocks: tuple[int, int]) -> Array:
    """Hidden states of lines of a prompt and n responses: each response in a row of its own, after its prompt."""
    width, n = blocks
    lines, total = tokens.shape

    def rows(x: Array) -> Array:
        prompt = jnp.repeat(x[:, None, :width], n, axis=1)
        return jnp.concatenate([prompt, x[:, width:].reshape(lines, n, -1)], 2).reshape(lines * n, -1)

    hidden = _packed(run, rows(tokens), rows(mask)).reshape(lines, n, width + (total - width) // n, -1)
    responses = hidden[:, :, width:].reshape(lines, total - width, -1)
    return jnp.concatenate([hidden[:, 0, :width], responses], 1)


def _unpacked(run: Run, tokens: Array, segments: Array, packed: Packed) -> Array:
    """Hidden states of lines of a prompt and packed responses, computed as `_in_blocks`."""
    width, n = packed.prompt_width, packed.n
    rows = Rows.of(segments[:, width:], packed)
    mask = jnp.concatenate([segments[:, :width] > 0, rows.real], 1)
    own = rows.into_rows(tokens[:, width:])
    hidden = _in_blocks(run, jnp.concatenate([tokens[:, :width], own], 1), mask, (width, n))
    return jnp.concatenate([hidden[:, :width], rows.into_slots(hidden[:, width:])], 1)


def _with_cache(run: Run, tokens: Array, positions: Array, mask: Array, cache: TokenCache) -> tuple[Array, TokenCache]:
    """Puts tokens [B, T] into their rows' slots and computes every row from its first token on."""
    (rows, width), (groups, prompt_width) = cache.tokens.shape, cache.prompt.shape
    start = jnp.repeat(cache.prompt_length, rows // groups)[:, None]
    slots = jnp.where(mask, positions - start, width)  # past the end: dropped
    own = jax.vmap(lambda row, where, new: row.at[where].set(new, mode="drop"))(cache.tokens, slots, tokens)
    length = cache.length + mask.sum(1, dtype=jnp.int32)
    at = jnp.arange(prompt_width + width)[None, :]
    # Clipped indices read what the `where` then leaves out.
    after = jnp.take_along_axis(own, jnp.clip(at - start, 0, max(width - 1, 0)), 1)
    whole = after
    if prompt_width:
        prompt = jnp.repeat(cache.prompt, rows // groups, axis=0)
        before = jnp.take_along_axis(prompt, jnp.broadcast_to(jnp.minimum(at, prompt_width - 1), after.shape), 1)
        whole = jnp.where(at < start, before, after)
    hidden = run(whole, at < start + length[:, None])
    return jnp.take_along_axis(hidden, positions[:, :, None], 1), cache.replace(tokens=own, length=length)

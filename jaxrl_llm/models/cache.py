"""The cache of keys and values: the prompts' part once per prompt, shared by its n rows, and each row's own part."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_llm.types import Array


class KVCache(struct.PyTreeNode):
    """Keys and values of B rows.

    Slot i of a prompt holds its i-th real token (padding takes no slot) at position i; slot r of a row holds position
    prompt_length + r. What lies at or after `length` is undefined and never seen. The prompts' part may have width 0:
    such a cache is what prompts are prefilled into, before `fork` makes its rows the prompts of others.

    Keys lie with their slots last and values with their slots before last, as the two products of attention read them:
    a token's query by all keys, its weights by all values. Layers are stacked on a leading axis, as below, or a tuple
    of one array each, as the parameters' are.
    """

    prompt_k: Any  # compute dtype [L, G, KV, H, P]
    prompt_v: Any  # compute dtype [L, G, KV, P, H]
    prompt_length: Array  # int32 [G]
    k: Any  # compute dtype [L, B, KV, H, R]
    v: Any  # compute dtype [L, B, KV, R, H]
    length: Array  # int32 [B], slots filled
    # Where only some of the prompts' rows are left (`take`), in each of S shards:
    seat: Array | None = None  # int32 [S, B / S], the places of these rows among all the rows of the shard's prompts
    sitter: Array | None = None  # int32 [S, G · n / S], which row is at a place; any where none is
    # int32 [], where every row puts its next token, see `in_step`; None: each where its own length says.
    slot: Array | None = None
    n: int = struct.field(pytree_node=False, default=1)  # rows to a prompt

    @property
    def width(self) -> int:
        """R"""
        return jax.tree.leaves(self.k)[0].shape[-1]

    @property
    def prompt_width(self) -> int:
        """P"""
        return jax.tree.leaves(self.prompt_k)[0].shape[-1]

    @property
    def start(self) -> Array:
        """int32 [B], the position of each row's first slot."""
        return self.by_row(jnp.repeat(self.prompt_length[:, None], self.n, axis=1))

    def fork(self, n: int, width: int) -> KVCache:
        """A cache of n rows per row of this one, which becomes their shared prompt; `width` empty slots each."""
        rows = self.length.shape[0] * n

        def empty(x: Array, slots: int) -> Array:
            shape = list(x.shape)
            shape[-4], shape[slots] = rows, width
            return jnp.zeros(shape, x.dtype)

        return KVCache(
            prompt_k=self.k,
            prompt_v=self.v,
            prompt_length=self.length,
            k=jax.tree.map(lambda x: empty(x, -1), self.k),
            v=jax.tree.map(lambda x: empty(x, -2), self.v),
            length=jnp.zeros(rows, jnp.int32),
            n=n,
        )

    def in_step(self) -> KVCache:
        """The same, with the promise that its rows have equal lengths, take one token at a time, and that a row that
        is passed over once gets no more: the rows then write to one slot, without a scatter."""
        return self.replace(slot=self.length.max())

    def out_of_step(self) -> KVCache:
        return self.replace(slot=None)

    def grow(self, width: int) -> KVCache:
        """The same with room for `width` tokens a row, at least what it has."""
        more = width - self.width

        def pad(x: Array, axis: int) -> Array:
            return jnp.pad(x, [(0, more if i == x.ndim + axis else 0) for i in range(x.ndim)])

        grown = {
            name: jax.tree.map(lambda x, a=a: pad(x, a), getattr(self, name)) for name, a in (("k", -1), ("v", -2))
        }
        return self.replace(**grown) if more else self

    def take(self, rows: Array) -> KVCache:
        """The cache of some rows. Prompts stay shared where they are fewer than the rows.

        Args:
          rows: int32 [S, b], of each of S equal parts of the rows (shards) the same number.
        """
        parts, groups = rows.shape[0], self.prompt_length.shape[0]
        # While nobody has left, a row's place is its own number in its shard.
        seat = rows if self.seat is None else jnp.take_along_axis(self.seat, rows, 1)
        if rows.size > groups:
            numbers = jnp.arange(rows.shape[1], dtype=jnp.int32)
            places = jnp.zeros((parts, groups * self.n // parts), jnp.int32)
            sitter = jax.vmap(lambda empty, at: empty.at[at].set(numbers))(places, seat)
            changed: dict[str, Any] = {"seat": seat, "sitter": sitter}
        else:
            own = seat // self.n
            changed = {
                "prompt_k": take_layers(self.prompt_k, own),
                "prompt_v": take_layers(self.prompt_v, own),
                "prompt_length": take_rows(self.prompt_length, own),
                "seat": None,
                "sitter": None,
                "n": 1,
            }
        k, v = take_layers(self.k, rows), take_layers(self.v, rows)
        return self.replace(k=k, v=v, length=take_rows(self.length, rows), **changed)

    def put(self, rows: Array, part: KVCache) -> KVCache:
        """The cache with what `part`, once `take(rows)` of it, has become."""
        return self.replace(
            k=put_layers(self.k, rows, part.k),
            v=put_layers(self.v, rows, part.v),
            length=put_rows(self.length, rows, part.length),
            slot=part.slot,
        )

    def by_prompt(self, x: Array) -> Array:
        """x [B, …] in its rows' places among all the rows of the prompts: [G, n, …], and some row where none is."""
        if self.sitter is not None:
            x = take_rows(x, self.sitter)
        return x.reshape(self.prompt_length.shape[0], self.n, *x.shape[1:])

    def by_row(self, x: Array) -> Array:
        """x [G, n, …] as [B, …]: undoes `by_prompt`."""
        x = x.reshape(-1, *x.shape[2:])
        return x if self.seat is None else take_rows(x, self.seat)


def take_rows(x: Array, rows: Array) -> Array:
    """x [B, …] at rows int32 [S, b], each of S equal parts of x having b of its own: [S · b, …].

    Rows that are spread over a mesh in S shards stay where they are.
    """
    return jax.vmap(lambda part, index: part[index])(_in_parts(x, rows), rows).reshape(-1, *x.shape[1:])


def put_rows(x: Array, rows: Array, new: Array) -> Array:
    """x with `new` [S · b, …] at the rows that `take_rows` would take."""
    put = jax.vmap(lambda part, index, new: part.at[index].set(new, unique_indices=True))
    return put(_in_parts(x, rows), rows, _in_parts(new, rows)).reshape(x.shape)


def _in_parts(x: Array, rows: Array) -> Array:
    return x.reshape(rows.shape[0], -1, *x.shape[1:])


def take_layers(layers: Any, rows: Array) -> Any:
    """`take_rows` of each layer's array, stacked or apart."""
    return jax.tree.map(
        lambda x: take_rows(x, rows) if x.ndim == 4 else jax.vmap(take_rows, (0, None))(x, rows), layers
    )


def put_layers(layers: Any, rows: Array, new: Any) -> Any:
    def one(x: Array, new: Array) -> Array:
        return put_rows(x, rows, new) if x.ndim == 4 else jax.vmap(put_rows, (0, None, 0))(x, rows, new)

    return jax.tree.map(one, layers, new)

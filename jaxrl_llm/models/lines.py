"""Lines of a prompt and its responses (see `Model`), and the same responses in rows of their own."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax.numpy as jnp

from jaxrl_llm.types import Array, Packed


class Rows(NamedTuple):
    """Where packed responses lie: in S slots, and in n rows of R tokens one behind the other."""

    slot: Array  # int32 [B, n · R], the slot of each token; any where there is none
    real: Array  # bool [B, n · R], whether there is one
    place: Array  # int32 [B, S], the token in each slot; any where there is none

    @classmethod
    def of(cls, segments: Array, packed: Packed) -> Rows:
        """Of the slots' segments, int32 [B, S]: i + 1 for those of the i-th response, 0 behind the last one.

        >>> Rows.of(jnp.array([[1, 1, 3, 0]]), Packed(prompt_width=2, n=3, reach=2)).slot
        Array([[0, 1, 2, 3, 2, 3]], dtype=int32)
        """
        chex.assert_rank(segments, 2)
        (lines, count), n, reach = segments.shape, packed.n, packed.reach
        mine = segments[:, None, :] == jnp.arange(1, n + 1)[None, :, None]
        length = mine.sum(2, dtype=jnp.int32)
        start = jnp.cumsum(length, 1, dtype=jnp.int32) - length
        token = jnp.arange(reach, dtype=jnp.int32)[None, None, :]
        slot = jnp.minimum(start[:, :, None] + token, count - 1).reshape(lines, -1)
        real = (token < length[:, :, None]).reshape(lines, -1)
        response = jnp.maximum(segments - 1, 0)
        place = response * reach + jnp.arange(count)[None, :] - jnp.take_along_axis(start, response, 1)
        return cls(slot, real, jnp.clip(place, 0, n * reach - 1))

    def into_rows(self, slots: Array) -> Array:
        """[B, S, …] -> [B, n · R, …]"""
        return _take(slots, self.slot)

    def into_slots(self, rows: Array) -> Array:
        """[B, n · R, …] -> [B, S, …]"""
        return _take(rows, self.place)


def _take(x: Array, at: Array) -> Array:
    return jnp.take_along_axis(x, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), 1)

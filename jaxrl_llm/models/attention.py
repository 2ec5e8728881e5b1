"""Attention over keys that may lie in several places.

`attend` is over keys as products give them, where positions and segment ids say who sees whom; `attend_slots` over keys
as a cache has them. What they give over disjoint sets of keys can be put together (`combine`). A prompt's keys, stored
once for all of its responses, and a response's own keys are two such sets: bifurcated attention (Athiwaratkun et al.
2024, arXiv:2403.08845), Hydragen (Juravsky et al. 2024, arXiv:2402.05099).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.models.cache import KVCache
from jaxrl_llm.types import Array, Packed

# The largest score of no keys at all: finite, so that differences of two such stay 0 and never become NaN.
EMPTY = -1e30

Window = Array | int | None  # int32 [], how many positions back a query sees, itself included; None: all


def visible(
    q_pos: Array, kv_pos: Array, q_seg: Array, kv_seg: Array, q_prefix: Array | None = None, window: Window = None
) -> Array:
    """bool [B, T, S]: which keys each query sees.

    A query sees the keys of its own segment, and of the segment `q_prefix`, at positions up to its own and less than
    `window` behind it. Segment 0 is padding: it neither sees nor is seen.

    >>> one = jnp.ones((1, 3), jnp.int32)
    >>> visible(jnp.arange(3)[None], jnp.arange(3)[None], one, one)[0].astype(int)
    Array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]], dtype=int32)
    """
    same = q_seg[:, :, None] == kv_seg[:, None, :]
    if q_prefix is not None:
        same |= q_prefix[:, :, None] == kv_seg[:, None, :]
    distance = q_pos[:, :, None] - kv_pos[:, None, :]
    seen = same & (kv_seg[:, None, :] != 0) & (distance >= 0)
    return seen if window is None else seen & (distance < window)


class Partial(NamedTuple):
    """Attention over some of the keys, before it is divided by the sum of its weights."""

    out: Array  # at least float32 [..., D], Σ exp(score − top) · v
    top: Array  # at least float32 [...], the largest score; `EMPTY` where nothing is visible
    total: Array  # at least float32 [...], Σ exp(score − top)


def attend_slots(q: Array, k: Array, v: Array, seen: Array, *, scale: float, softcap: float | None = None) -> Partial:
    """Attention over keys and values as a cache has them.

    Args:
      q: [B, T, H, D]; k: [B, KV, D, S]; v: [B, KV, S, D], with H a multiple of KV.
      seen: bool [B, T, S]

    Returns:
      [B, T, H, D] and [B, T, H] twice.
    """
    batch, length, heads, size = q.shape
    kv_heads, slots = k.shape[1], k.shape[-1]
    per_key = heads // kv_heads
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    by_key = jnp.moveaxis(q.reshape(batch, length, kv_heads, per_key, size), 1, 3)
    # One plain product for each row and key head: what batched products are fastest at.
    scores = jnp.einsum(
        "bkqd,bkds->bkqs", by_key.reshape(batch, kv_heads, -1, size), k, preferred_element_type=accumulate
    )
    scores = scores.reshape(batch, kv_heads, per_key, length, slots) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    where = seen[:, None, None]
    # What is not seen may be large: past exp's range, from which no gradient would come back but NaN.
    scores = jnp.where(where, scores, EMPTY)
    # The maximum only keeps exp in range; no gradient flows through it.
    top = jax.lax.stop_gradient(scores.max(-1))
    weights = jnp.where(where, jnp.exp(scores - top[..., None]), 0)
    flat = weights.astype(v.dtype).reshape(batch, kv_heads, -1, slots)
    out = jnp.einsum("bkqs,bksd->bkqd", flat, v, preferred_element_type=accumulate)

    def by_token(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(batch, kv_heads, per_key, length, -1), 3, 1).reshape(batch, length, heads, -1)

    return Partial(by_token(out), by_token(top)[..., 0], by_token(weights.sum(-1))[..., 0])


def combine(first: Partial, second: Partial) -> Partial:
    """Attention over the union of two disjoint sets of keys."""
    top = jnp.maximum(first.top, second.top)
    a, b = jnp.exp(first.top - top), jnp.exp(second.top - top)
    out = a[..., None] * first.out + b[..., None] * second.out
    return Partial(out, top, a * first.total + b * second.total)


def finish(part: Partial, dtype: Any) -> Array:
    """softmax · v, 0 where nothing was visible."""
    return (part.out / jnp.where(part.total > 0, part.total, 1)[..., None]).astype(dtype)


def attend(
    q: Array,
    k: Array,
    v: Array,
    q_pos: Array,
    kv_pos: Array,
    q_seg: Array,
    kv_seg: Array,
    *,
    scale: float,
    q_prefix: Array | None = None,
    window: Window = None,
    softcap: float | None = None,
) -> Partial:
    """Attention over the visible keys.

    Args:
      q: [B, T, H, D]; k, v: [B, S, KV, D] with H a multiple of KV (query heads share keys in order).
      q_pos, q_seg, q_prefix: int32 [B, T]; kv_pos, kv_seg: int32 [B, S]. See `visible`.
      window: how many positions back a query sees, itself included.
      softcap: if given, scores become softcap · tanh(scores / softcap) before they are masked.
    """
    chex.assert_rank([q, k, v], 4)
    chex.assert_equal_shape([k, v])
    seen = visible(q_pos, kv_pos, q_seg, kv_seg, q_prefix, window)
    return attend_slots(q, jnp.moveaxis(k, 1, 3), jnp.swapaxes(v, 1, 2), seen, scale=scale, softcap=softcap)


QUERIES_AT_ONCE, MOST_CUTS = 128, 4  # more cuts: fewer keys that nobody sees, and a larger program


def cuts(length: int) -> list[tuple[int, int]]:
    """Queries from and to, of `length` tokens that see none behind them: each part needs the keys up to its own end.

    >>> cuts(150), cuts(512)
    ([(0, 150)], [(0, 128), (128, 256), (256, 384), (384, 512)])
    """
    count = min(max(round(length / QUERIES_AT_ONCE), 1), MOST_CUTS)
    size = -(-length // count)
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def attend_in_order(q: Array, k: Array, v: Array, positions: Array, segments: Array, **how: Any) -> Partial:
    """`attend` of tokens [B, T] to each other, where none sees a token of a later slot: most of what lies there is not
    computed."""
    parts = []
    for start, end in cuts(q.shape[1]):
        own, seen = (tuple(x[:, i:end] for x in (positions, segments)) for i in (start, 0))
        parts.append(attend(q[:, start:end], k[:, :end], v[:, :end], own[0], seen[0], own[1], seen[1], **how))
    return parts[0] if len(parts) == 1 else Partial(*(jnp.concatenate(x, 1) for x in zip(*parts, strict=True)))


def attend_blocks(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    mask: Array,
    *,
    blocks: tuple[int, int],
    scale: float,
    window: Window = None,
    softcap: float | None = None,
) -> Array:
    """Attention in lines of a prompt and n responses to it, [B, P + n·R]: each response sees the prompt and itself.

    Args:
      q: [B, P + n·R, H, D]; k, v: [B, P + n·R, KV, D]
      positions: int32 [B, P + n·R], those of a response go on where its prompt ends.
      mask: int32 0/1 [B, P + n·R]
      blocks: (P, n).
      window, softcap: see `attend`.
    """
    width, n = blocks
    how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    lines = q.shape[0]
    tokens = (q, k, v, positions, mask)
    prompt, rest = tuple(x[:, :width] for x in tokens), tuple(x[:, width:] for x in tokens)
    own = tuple(x.reshape(lines * n, -1, *x.shape[2:]) for x in rest)

    of_prompt = attend(rest[0], prompt[1], prompt[2], rest[3], prompt[3], rest[4], prompt[4], **how)
    of_own = Partial(*(x.reshape(lines, -1, *x.shape[2:]) for x in attend_in_order(*own, **how)))
    return _joined(attend_in_order(*prompt, **how), combine(of_prompt, of_own), v.dtype)


def _joined(prompt: Partial, rest: Partial, dtype: Any) -> Array:
    return jnp.concatenate([finish(prompt, dtype), finish(rest, dtype)], 1)


CHUNKS_PER_REACH = 2  # more: fewer keys that nobody sees, and more copies of each


def attend_packed(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    segments: Array,
    *,
    packed: Packed,
    scale: float,
    window: Window = None,
    softcap: float | None = None,
) -> Array:
    """Attention in lines of a prompt and responses packed behind it, [B, P + S]: each sees the prompt and itself.

    A token and what it sees of its own response lie less than `packed.reach` slots apart. So the slots are cut into
    chunks, and of the slots' keys each chunk is given its own and those of the chunks before it that reach so far.

    Args:
      q: [B, P + S, H, D]; k, v: [B, P + S, KV, D]
      positions: int32 [B, P + S], those of a response go on where its prompt ends.
      segments: int32 [B, P + S], see `Model`.
      window, softcap: see `attend`.
    """
    width = packed.prompt_width
    how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    tokens = (q, k, v, positions, segments)
    prompt, slots = tuple(x[:, :width] for x in tokens), tuple(x[:, width:] for x in tokens)

    real = (slots[4] > 0).astype(jnp.int32)
    of_prompt = attend(slots[0], prompt[1], prompt[2], slots[3], prompt[3], real, prompt[4], **how)
    (lines, count), chunk = slots[4].shape, -(-packed.reach // CHUNKS_PER_REACH)
    chunks, before = -(-count // chunk), -(-(packed.reach - 1) // chunk)  # chunks that each looks back at

    def near(x: Array, before: int) -> Array:
        """[B, S, …] -> [B · chunks, (before + 1) · chunk, …]"""
        ends = ((0, 0), (before * chunk, chunks * chunk - count), *((0, 0),) * (x.ndim - 2))
        cut = jnp.pad(x, ends).reshape(lines, before + chunks, chunk, *x.shape[2:])
        joined = jnp.concatenate([cut[:, back : back + chunks] for back in range(before + 1)], 2)
        return joined.reshape(lines * chunks, -1, *x.shape[2:])

    if chunks <= before + 1:
        of_own = attend_in_order(*slots, **how)
    else:
        queries, keys = tuple(near(x, 0) for x in slots), tuple(near(x, before) for x in slots)
        found = attend(queries[0], keys[1], keys[2], queries[3], keys[3], queries[4], keys[4], **how)
        of_own = Partial(*(x.reshape(lines, chunks * chunk, *x.shape[2:])[:, :count] for x in found))
    return _joined(attend_in_order(*prompt, **how), combine(of_prompt, of_own), v.dtype)


def attend_lines(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    segments: Array,
    *,
    prefixes: Array | None = None,
    blocks: tuple[int, int] | Packed | None = None,
    scale: float,
    window: Window = None,
    softcap: float | None = None,
) -> Array:
    """Attention within lines [B, T] of any kind; `positions`, `segments`, `prefixes` and `blocks` as of `Model`."""
    how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    if isinstance(blocks, Packed):
        return attend_packed(q, k, v, positions, segments, packed=blocks, **how)
    if blocks is not None and blocks[1] > 0:
        return attend_blocks(q, k, v, positions, segments, blocks=blocks, **how)
    if blocks is not None:
        return finish(attend_in_order(q, k, v, positions, segments, **how), v.dtype)
    return finish(attend(q, k, v, positions, positions, segments, segments, q_prefix=prefixes, **how), v.dtype)


def attend_cached(
    q: Array,
    cache: KVCache,
    prompt: tuple[Array, Array],
    own: tuple[Array, Array, Array],
    q_pos: Array,
    q_mask: Array,
    *,
    scale: float,
    window: Window = None,
    softcap: float | None = None,
) -> Array:
    """Attention of new tokens [B, T] over their row's prompt and their row's own slots.

    Args:
      cache: whose rows these are; only its places and lengths are read.
      prompt: one layer's k [G, KV, D, P], v [G, KV, P, D].
      own: one layer's k [B, KV, D, R], v [B, KV, R, D], the new tokens in them, and the slots filled, int32 [B].
      window, softcap: see `attend`.
    """
    k, v, filled = own
    how: dict[str, Any] = {"scale": scale, "softcap": softcap}
    q_seg = q_mask.astype(jnp.int32)
    slots = jnp.arange(k.shape[-1])[None, :]
    own_seg = (slots < filled[:, None]).astype(jnp.int32)
    result = attend_slots(q, k, v, visible(q_pos, cache.start[:, None] + slots, q_seg, own_seg, window=window), **how)
    groups, width = prompt[1].shape[0], prompt[1].shape[2]
    if width == 0:
        return finish(result, v.dtype)

    def by_prompt(x: Array) -> Array:
        return cache.by_prompt(x).reshape(groups, -1, *x.shape[2:])

    def by_row(x: Array) -> Array:
        return cache.by_row(x.reshape(groups, cache.n, q.shape[1], *x.shape[2:]))

    prompt_slots = jnp.broadcast_to(jnp.arange(width)[None, :], (groups, width))
    prompt_seg = (prompt_slots < cache.prompt_length[:, None]).astype(jnp.int32)
    seen = visible(by_prompt(q_pos), prompt_slots, by_prompt(q_seg), prompt_seg, window=window)
    of_prompt = attend_slots(by_prompt(q), *prompt, seen, **how)
    return finish(combine(Partial(*(by_row(x) for x in of_prompt)), result), v.dtype)

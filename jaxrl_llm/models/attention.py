"""Attention over keys that may lie in several places.

`attend` is the one interface: positions and segment ids say who sees whom, and the log-sum-exp that it returns lets
results over disjoint sets of keys be joined (`join`). A prompt's keys, stored once for all of its responses, and a
response's own keys are two such sets: bifurcated attention (Athiwaratkun et al. 2024, arXiv:2403.08845), Hydragen
(Juravsky et al. 2024, arXiv:2402.05099).
"""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.types import Array

# The log-sum-exp over no keys at all: finite, so that differences of two such stay 0 and never become NaN.
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
) -> tuple[Array, Array]:
    """softmax(scale · q kᵀ) v over the visible keys, and the log-sum-exp of the scores.

    Args:
      q: [B, T, H, D]; k, v: [B, S, KV, D] with H a multiple of KV (query heads share keys in order).
      q_pos, q_seg, q_prefix: int32 [B, T]; kv_pos, kv_seg: int32 [B, S]. See `visible`.
      window: how many positions back a query sees, itself included.
      softcap: if given, scores become softcap · tanh(scores / softcap) before they are masked.

    Returns:
      out [B, T, H, D] in v's dtype (0 where nothing is visible) and lse [B, T, H] in at least float32 (`EMPTY` there).
    """
    chex.assert_rank([q, k, v], 4)
    chex.assert_equal_shape([k, v])
    batch, length, heads, size = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, size)
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("btkmd,bskd->bkmts", grouped, k, preferred_element_type=accumulate) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = visible(q_pos, kv_pos, q_seg, kv_seg, q_prefix, window)[:, None, None]
    scores = jnp.where(seen, scores, EMPTY)
    # The maximum only keeps exp in range; no gradient flows through it.
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - top), 0)
    total = weights.sum(-1, keepdims=True)
    any_seen = total > 0
    safe_total = jnp.where(any_seen, total, 1)
    out = jnp.einsum("bkmts,bskd->btkmd", (weights / safe_total).astype(v.dtype), v)
    lse = jnp.where(any_seen, top + jnp.log(safe_total), EMPTY)[..., 0]
    return out.reshape(q.shape), jnp.moveaxis(lse, -1, 1).reshape(batch, length, heads)


def join(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Attention over the union of two disjoint sets of keys, from the results over each."""
    (out_1, lse_1), (out_2, lse_2) = first, second
    lse = jnp.logaddexp(lse_1, lse_2)
    weight_1, weight_2 = jnp.exp(lse_1 - lse)[..., None], jnp.exp(lse_2 - lse)[..., None]
    return (weight_1 * out_1 + weight_2 * out_2).astype(out_1.dtype), lse


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

    def within(q: Array, k: Array, v: Array, where: Array, real: Array) -> tuple[Array, Array]:
        return attend(q, k, v, where, where, real, real, **how)

    of_prompt = attend(rest[0], prompt[1], prompt[2], rest[3], prompt[3], rest[4], prompt[4], **how)
    of_own = tuple(x.reshape(lines, -1, *x.shape[2:]) for x in within(*own))
    responses, _ = join(of_prompt, (of_own[0], of_own[1]))
    return jnp.concatenate([within(*prompt)[0], responses], 1)


def attend_cached(
    q: Array,
    prompt: tuple[Array, Array, Array],
    own: tuple[Array, Array, Array],
    q_pos: Array,
    q_mask: Array,
    *,
    scale: float,
    window: Window = None,
    softcap: float | None = None,
) -> Array:
    """Attention of new tokens [B, T] over their row's prompt, shared by B/G consecutive rows, and their row's own
    slots.

    Args:
      prompt: k, v [G, P, KV, D] and the number of filled slots, int32 [G].
      own: k, v [B, R, KV, D] and the number of filled slots, int32 [B].
      window, softcap: see `attend`.
    """
    how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    rows, length, heads, _ = q.shape
    prompt_k, prompt_v, prompt_length = prompt
    k, v, filled = own
    groups, width = prompt_k.shape[:2]
    q_seg = q_mask.astype(jnp.int32)
    start = jnp.repeat(prompt_length, rows // groups)
    slots = jnp.arange(k.shape[1])[None, :]
    own_seg = (slots < filled[:, None]).astype(jnp.int32)
    result = attend(q, k, v, q_pos, start[:, None] + slots, q_seg, own_seg, **how)
    if width == 0:
        return result[0]

    def by_prompt(x: Array) -> Array:
        return x.reshape(groups, rows // groups * length, *x.shape[2:])

    prompt_slots = jnp.broadcast_to(jnp.arange(width)[None, :], (groups, width))
    prompt_seg = (prompt_slots < prompt_length[:, None]).astype(jnp.int32)
    out, lse = attend(
        by_prompt(q),
        prompt_k,
        prompt_v,
        by_prompt(q_pos),
        prompt_slots,
        by_prompt(q_seg),
        prompt_seg,
        **how,
    )
    return join((out.reshape(q.shape), lse.reshape(rows, length, heads)), result)[0]

"""Sampling responses: `append` puts tokens into the cache, `decode` samples until every row has stopped. Between two
turns of a conversation `observe` puts what an environment answered behind what was sampled.

Keys: the step's key is folded with the prompt's uid, then the sample's index, then the token's index, so that a row's
draws depend on nothing but who it is: permuting the prompts permutes the responses, and two equal prompts differ.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_llm.models.cache import put_rows, take_rows
from jaxrl_llm.steps.sampling import Sampling, sample
from jaxrl_llm.types import FINISH_LENGTH, FINISH_STOP, Array, Batch, Cache, DecodeState, Model, Params, Prompts

AnyCache = TypeVar("AnyCache", bound=Cache)


class StopRules(struct.PyTreeNode):
    """What ends a response. Arrays, not constants: other ids or strings need no new program of the same shapes."""

    ids: Array  # int32 [S], EOS and stop token ids; -1 is no id
    strings: Array  # int32 [Q, V], automaton over tokens: state × token -> state; the last state means "matched"
    min_new_tokens: Array  # int32 [], before so many tokens no id is sampled and no string ends a response


def no_stop_rules(vocab_size: int) -> StopRules:
    """Nothing but its length ends a response."""
    return StopRules(
        ids=jnp.full(1, -1, jnp.int32), strings=jnp.zeros((2, vocab_size), jnp.int32), min_new_tokens=jnp.int32(0)
    )


def append(model: Model, params: Params, cache: AnyCache, tokens: Array, mask: Array) -> tuple[Array, AnyCache]:
    """Puts tokens into the cache: a prompt to be prefilled, a sampled token, or an environment's observation.

    Args:
      cache: of B rows, with room for what is put in.
      tokens: int32 [B, T]
      mask: bool [B, T], the real ones; they need not stand together, and each takes the row's next slot and position.

    Returns:
      hidden, compute dtype [B, D], of each row's last real token (undefined for a row without any), and the cache.
    """
    chex.assert_equal_shape([tokens, mask])
    positions = (cache.start + cache.length)[:, None] + jnp.maximum(jnp.cumsum(mask, 1, dtype=jnp.int32) - 1, 0)
    hidden, filled = model.forward(params, jnp.where(mask, tokens, 0), positions, mask.astype(jnp.int32), cache=cache)
    assert filled is not None
    last = jnp.where(mask, jnp.arange(mask.shape[1])[None, :], 0).max(1)
    return jnp.take_along_axis(hidden, last[:, None, None], 1)[:, 0], filled


@dataclasses.dataclass(frozen=True)
class Cascade:
    """In which shapes a rollout decodes, see `decode`. Static: each shape is a loop of its own in the program."""

    width: int = 64  # slots of a row's cache at first; they double until the response fits; 0: all at once
    halvings: int = 2  # how often half of the rows may leave the batch
    min_rows: int = 8  # that a shard keeps at least
    shards: int = 1  # into how many equal parts the rows are spread over a mesh

    def widths(self, limit: int) -> list[int]:
        """The cache's widths, the last of them `limit`.

        >>> Cascade(width=64).widths(300)
        [64, 128, 300]
        """
        widths, width = [], self.width
        while width and 2 * width <= limit:
            widths.append(width)
            width *= 2
        return [*widths, limit]

    def sizes(self, rows: int) -> list[int]:
        """The numbers of rows.

        >>> Cascade(halvings=3, min_rows=8).sizes(32)
        [32, 16, 8]
        """
        sizes = [rows]
        for _ in range(self.halvings):
            half, odd = divmod(sizes[-1], 2)
            if odd or half % self.shards or half < self.min_rows * self.shards:
                break
            sizes.append(half)
        return sizes


class _Rows(struct.PyTreeNode):
    """Rows in the midst of a turn, every leaf by row."""

    hidden: Array  # compute dtype [b, D], of the last token in the cache
    uniform: Array  # float32 [b, R], one number for each token of the response frame
    tokens: Array  # int32 [b, R], of this turn, from slot 0 on
    log_probs: Array  # float32 [b, R]
    length: Array  # int32 [b], tokens in the response frame
    max_new_tokens: Array  # int32 [b]
    stop_state: Array  # int32 [b]
    finish_reason: Array  # int32 [b]

    @property
    def active(self) -> Array:
        return self.finish_reason == 0

    def take(self, rows: Array) -> _Rows:
        return jax.tree.map(lambda x: take_rows(x, rows), self)

    def put(self, rows: Array, part: _Rows) -> _Rows:
        return jax.tree.map(lambda x, new: put_rows(x, rows, new), self, part)


def decode(
    model: Model,
    params: Params,
    cache: AnyCache,
    state: DecodeState,
    *,
    sampling: Sampling,
    stops: StopRules,
    first_turn: bool = False,
    cascade: Cascade = Cascade(),
) -> tuple[AnyCache, DecodeState]:
    """Samples until each row has stopped or has its `max_new_tokens`; the loop ends with the last of them.

    Args:
      cache: of B rows; the row's prompt, and what it has said so far, are in it.
      state: of B rows, see `start_decoding`. Rows that are done are left as they are.
      first_turn: whether no row has said anything yet.
      cascade: the cache grows with the longest response so far (in a first turn), and as soon as half of the rows have
        ended the others go on without them. Neither changes what is sampled, but for the last bits of sums.

    Returns:
      The cache with every sampled token in it but the last one of each row, which nothing follows yet, and the state
      with `responses`, `response_mask`, `rollout_log_probs`, `length` and `finish_reason` filled in.
    """
    stop_ids = jnp.where(stops.ids < 0, model.vocab_size, stops.ids)
    is_stop = jnp.zeros(model.vocab_size, bool).at[stop_ids].set(True, mode="drop")
    matched = stops.strings.shape[0] - 1

    def say(t: Array, rows: _Rows) -> _Rows:
        """The t-th token of this turn, of the rows that go on."""
        logits = model.heads["logits"](params, rows.hidden)
        held = rows.length < stops.min_new_tokens
        logits = jnp.where(held[:, None] & is_stop[None, :], -jnp.inf, logits)
        at = jnp.minimum(rows.length, rows.uniform.shape[1] - 1)[:, None]
        token, log_prob = sample(logits, jnp.take_along_axis(rows.uniform, at, 1)[:, 0], sampling)
        active = rows.active
        length = rows.length + active
        automaton = stops.strings[rows.stop_state, token]
        automaton = jnp.where((automaton == matched) & (length < stops.min_new_tokens), 0, automaton)
        stopped = is_stop[token] | (automaton == matched)
        reason = jnp.where(stopped, FINISH_STOP, jnp.where(length >= rows.max_new_tokens, FINISH_LENGTH, 0))
        # What a row that has ended gets here lies past its length.
        return rows.replace(
            tokens=jax.lax.dynamic_update_index_in_dim(rows.tokens, token, t, 1),
            log_probs=jax.lax.dynamic_update_index_in_dim(rows.log_probs, log_prob.astype(rows.log_probs.dtype), t, 1),
            length=length,
            stop_state=jnp.where(active, automaton, rows.stop_state),
            finish_reason=jnp.where(active, reason, rows.finish_reason).astype(jnp.int32),
        )

    def step(carry: tuple[Array, AnyCache, _Rows]) -> tuple[Array, AnyCache, _Rows]:
        t, cache, rows = carry
        token = jax.lax.dynamic_index_in_dim(rows.tokens, t, 1)
        hidden, cache = append(model, params, cache, token, rows.active[:, None])
        rows = rows.replace(hidden=jnp.where(rows.active[:, None], hidden, rows.hidden))
        return t + 1, cache, say(t + 1, rows)

    def run(t: Array, cache: AnyCache, rows: _Rows, sizes: list[int], limit: int) -> tuple[Array, AnyCache, _Rows]:
        """Until every row is done or has no room for token `limit`; of half of the rows in smaller shapes."""
        shards = cascade.shards

        def going(rows: _Rows) -> Array:
            return rows.active.reshape(shards, -1)

        left = sizes[1] // shards if sizes[1:] else 0

        def more(carry: tuple[Array, AnyCache, _Rows]) -> Array:
            return (going(carry[2]).sum(1).max() > left) & (carry[0] < limit)

        t, cache, rows = jax.lax.while_loop(more, step, (t, cache, rows))
        if sizes[1:]:
            first = jnp.argsort(~going(rows), 1, stable=True)[:, :left].astype(jnp.int32)
            t, some, part = run(t, cache.take(first), rows.take(first), sizes[1:], limit)
            cache, rows = cache.put(first, some), rows.put(first, part)
        return t, cache, rows

    width = state.responses.shape[1]
    start = state.length
    token_keys = jax.vmap(lambda key: jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(width)))(state.key)
    rows = _Rows(
        hidden=state.hidden,
        uniform=jax.vmap(jax.vmap(jax.random.uniform))(token_keys),
        tokens=jnp.zeros_like(state.responses),
        log_probs=jnp.zeros_like(state.rollout_log_probs),
        length=start,
        max_new_tokens=state.max_new_tokens,
        stop_state=state.stop_state,
        finish_reason=state.finish_reason,
    )
    t, rows = jnp.int32(0), say(jnp.int32(0), rows)
    widths = cascade.widths(width) if first_turn else [width]
    if first_turn:
        cache = cache.in_step()
    for room in widths:
        cache = cache.grow(room)
        t, cache, rows = run(t, cache, rows, cascade.sizes(start.shape[0]), room)
    # What was said in this turn goes behind what was said before it.
    at = jnp.arange(width)[None, :] - start[:, None]
    said = (at >= 0) & (at < (rows.length - start)[:, None])

    def into(frame: Array, new: Array) -> Array:
        return jnp.where(said, jnp.take_along_axis(new, jnp.maximum(at, 0), 1), frame)

    return cache.out_of_step(), state.replace(
        hidden=rows.hidden,
        responses=into(state.responses, rows.tokens),
        response_mask=state.response_mask | said,
        rollout_log_probs=into(state.rollout_log_probs, rows.log_probs),
        length=rows.length,
        stop_state=rows.stop_state,
        finish_reason=rows.finish_reason,
    )


# Row by row: indexed with [rows, slot], a batch spread over a mesh would be gathered.
_put = jax.vmap(lambda row, slot, value: row.at[slot].set(value, mode="drop"))


def observe(
    model: Model, params: Params, cache: AnyCache, state: DecodeState, tokens: Array, mask: Array
) -> tuple[AnyCache, DecodeState]:
    """Puts an environment's observation behind what each row has sampled; those rows can be decoded further.

    The tokens are in the row's context and in its frame, but not in its `response_mask`: the policy did not say them,
    and nothing is learned of them. What was sampled stays in the cache as it was sampled.

    Args:
      tokens: int32 [B, O]
      mask: bool [B, O], the observation's tokens, first ones first; a row without any is done and stays so. A row
        whose frame (`max_new_tokens`) has no room behind it ends by its length.
    """
    chex.assert_equal_shape([tokens, mask])
    # What a row said last is not in the cache yet.
    waiting = mask.any(1) & (cache.length < state.length)
    last = jnp.take_along_axis(state.responses, jnp.maximum(state.length - 1, 0)[:, None], 1)
    both = jnp.concatenate([last, tokens], 1), jnp.concatenate([waiting[:, None], mask], 1)
    hidden, cache = append(model, params, cache, *both)
    slots = jnp.where(mask, state.length[:, None] + jnp.cumsum(mask, 1) - 1, state.responses.shape[1])
    length, observed = state.length + mask.sum(1, dtype=jnp.int32), mask.any(1)
    again = jnp.where(length < state.max_new_tokens, 0, FINISH_LENGTH)
    return cache, state.replace(
        hidden=jnp.where(observed[:, None], hidden, state.hidden),
        responses=_put(state.responses, slots, tokens),
        length=length,
        stop_state=jnp.where(observed, 0, state.stop_state),
        finish_reason=jnp.where(observed, again, state.finish_reason).astype(jnp.int32),
    )


def start_decoding(hidden: Array, key: Array, max_new_tokens: Array, width: int) -> DecodeState:
    """Rows that have their prompt in the cache and no response yet; a row that may sample nothing is done.

    Args:
      hidden: compute dtype [B, D], of each prompt's last token.
      key: typed PRNG keys [B], see `row_keys`.
      max_new_tokens: int32 [B], at most `width`.
      width: R, slots of the response frame.
    """
    rows = hidden.shape[0]
    return DecodeState(
        hidden=hidden,
        key=key,
        responses=jnp.zeros((rows, width), jnp.int32),
        response_mask=jnp.zeros((rows, width), bool),
        rollout_log_probs=jnp.zeros((rows, width), jnp.promote_types(hidden.dtype, jnp.float32)),
        length=jnp.zeros(rows, jnp.int32),
        max_new_tokens=max_new_tokens,
        stop_state=jnp.zeros(rows, jnp.int32),
        finish_reason=jnp.where(max_new_tokens > 0, 0, FINISH_LENGTH).astype(jnp.int32),
    )


def row_keys(key: Array, uid: Array, n: int) -> Array:
    """Typed PRNG keys [G·n], one per row: the step's key folded with uid int32 [G], then with the sample's index."""
    per_prompt = jax.vmap(jax.random.fold_in, (None, 0))(key, uid)
    per_row = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(per_prompt, jnp.arange(n))
    return per_row.reshape(-1)


def begin(
    model: Model, params: Params, prompts: Prompts, key: Array, *, n: int, width: int, cascade: Cascade = Cascade()
) -> tuple[Any, DecodeState]:
    """The prompts in the cache, once for the n rows of each, and every row ready for its first token; see `rollout`."""
    groups, prompt_width = prompts.prompts.shape
    chex.assert_shape(prompts.prompt_mask, (groups, prompt_width))
    chex.assert_shape([prompts.uid, prompts.prompt_valid], (groups,))
    limit = jnp.full(groups, width, jnp.int32) if prompts.max_new_tokens is None else prompts.max_new_tokens
    limit = jnp.where(prompts.prompt_valid, jnp.clip(limit, 0, width), 0)
    empty = model.init_cache(groups, prompt_width)
    hidden, cache = append(model, params, empty, prompts.prompts, prompts.prompt_mask)
    keys = row_keys(key, prompts.uid, n)
    state = start_decoding(jnp.repeat(hidden, n, axis=0), keys, jnp.repeat(limit, n, axis=0), width)
    return cache.fork(n, cascade.widths(width)[0]), state


def as_batch(prompts: Prompts, state: DecodeState) -> Batch:
    """The batch of rows that have ended, with the evidence of `gen`."""
    return Batch(
        prompts=prompts.prompts,
        prompt_mask=prompts.prompt_mask,
        prompt_valid=prompts.prompt_valid,
        record_arrays=prompts.record_arrays,
        uid=jnp.repeat(prompts.uid, state.length.shape[0] // prompts.uid.shape[0], axis=0),
        responses=state.responses,
        response_mask=state.response_mask,
        response_length=state.length,
        rollout_log_probs=state.rollout_log_probs,
        finish_reason=state.finish_reason,
    )


def rollout(
    model: Model,
    params: Params,
    prompts: Prompts,
    key: Array,
    *,
    n: int,
    width: int,
    sampling: Sampling,
    stops: StopRules,
    cascade: Cascade = Cascade(),
) -> Batch:
    """n responses of at most `width` tokens to each prompt: the phase `gen`.

    Args:
      params: the sampler's view of the policy's parameters.
      prompts: [G, P]; filler prompts get empty responses.
      key: the step's for this phase; consumed.
      n, width: responses per prompt; R, slots of the response frame.
      cascade: see `decode`.

    Returns:
      A batch of G·n rows with the evidence of `gen`. A row's tokens depend on key, uid and sample index alone, not on
      where it stands (bitwise at one shape; other shapes sum in another order).
    """
    cache, state = begin(model, params, prompts, key, n=n, width=width, cascade=cascade)
    _, state = decode(model, params, cache, state, sampling=sampling, stops=stops, first_turn=True, cascade=cascade)
    return as_batch(prompts, state)

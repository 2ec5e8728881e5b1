"""Sampling responses: `append` puts tokens into the cache, `decode` samples until every row has stopped. Between two
turns of a conversation `observe` puts what an environment answered behind what was sampled.

Keys: the step's key is folded with the prompt's uid, then the sample's index, then the token's index, so that a row's
draws depend on nothing but who it is: permuting the prompts permutes the responses, and two equal prompts differ.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from flax import struct

from jaxrl_llm.steps.sampling import Sampling, sample
from jaxrl_llm.types import FINISH_LENGTH, FINISH_STOP, Array, Batch, DecodeState, KVCache, Model, Params, Prompts


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


def append(model: Model, params: Params, cache: KVCache, tokens: Array, mask: Array) -> tuple[Array, KVCache]:
    """Puts tokens into the cache: a prompt to be prefilled, a sampled token, or an environment's observation.

    Args:
      cache: of B rows, with room for what is put in.
      tokens: int32 [B, T]
      mask: bool [B, T], the real ones; they need not stand together, and each takes the row's next slot and position.

    Returns:
      hidden, compute dtype [B, D], of each row's last real token (undefined for a row without any), and the cache.
    """
    chex.assert_equal_shape([tokens, mask])
    rows = tokens.shape[0]
    start = jnp.repeat(cache.prompt_length, rows // cache.prompt_length.shape[0]) + cache.length
    positions = start[:, None] + jnp.maximum(jnp.cumsum(mask, 1, dtype=jnp.int32) - 1, 0)
    hidden, filled = model.forward(params, jnp.where(mask, tokens, 0), positions, mask.astype(jnp.int32), cache=cache)
    assert filled is not None
    last = jnp.where(mask, jnp.arange(mask.shape[1])[None, :], 0).max(1)
    return jnp.take_along_axis(hidden, last[:, None, None], 1)[:, 0], filled


def decode(
    model: Model, params: Params, cache: KVCache, state: DecodeState, *, sampling: Sampling, stops: StopRules
) -> tuple[KVCache, DecodeState]:
    """Samples until each row has stopped or has its `max_new_tokens`; the loop ends with the last of them.

    Args:
      cache: of B rows; the row's prompt, and what it has said so far, are in it.
      state: of B rows, see `start_decoding`. Rows that are done are left as they are.

    Returns:
      The cache with every sampled token in it, the last one too, and the state with `responses`, `response_mask`,
      `rollout_log_probs`, `length` and `finish_reason` filled in.
    """
    stop_ids = jnp.where(stops.ids < 0, model.vocab_size, stops.ids)
    is_stop = jnp.zeros(model.vocab_size, bool).at[stop_ids].set(True, mode="drop")
    matched = stops.strings.shape[0] - 1

    def step(carry: tuple[KVCache, DecodeState]) -> tuple[KVCache, DecodeState]:
        cache, s = carry
        active = ~s.done
        logits = model.heads["logits"](params, s.hidden)
        held = s.length < stops.min_new_tokens
        logits = jnp.where(held[:, None] & is_stop[None, :], -jnp.inf, logits)
        uniform = jax.vmap(lambda key, t: jax.random.uniform(jax.random.fold_in(key, t)))(s.key, s.length)
        token, log_prob = sample(logits, uniform, sampling)

        length = s.length + active
        automaton = stops.strings[s.stop_state, token]
        may_stop = length >= stops.min_new_tokens
        automaton = jnp.where((automaton == matched) & ~may_stop, 0, automaton)
        stopped = is_stop[token] | (automaton == matched)
        reason = jnp.where(stopped, FINISH_STOP, jnp.where(length >= s.max_new_tokens, FINISH_LENGTH, 0))
        slot = jnp.where(active, s.length, s.responses.shape[1])  # past the end: dropped

        hidden, cache = append(model, params, cache, token[:, None], active[:, None])
        return cache, s.replace(
            hidden=jnp.where(active[:, None], hidden, s.hidden),
            responses=_put(s.responses, slot, token),
            response_mask=_put(s.response_mask, slot, active),
            rollout_log_probs=_put(s.rollout_log_probs, slot, log_prob.astype(s.rollout_log_probs.dtype)),
            length=length,
            stop_state=jnp.where(active, automaton, s.stop_state),
            finish_reason=jnp.where(active, reason, s.finish_reason).astype(jnp.int32),
        )

    return jax.lax.while_loop(lambda carry: ~carry[1].done.all(), step, (cache, state))


# Row by row: indexed with [rows, slot], a batch spread over a mesh would be gathered at every token.
_put = jax.vmap(lambda row, slot, value: row.at[slot].set(value, mode="drop"))


def observe(
    model: Model, params: Params, cache: KVCache, state: DecodeState, tokens: Array, mask: Array
) -> tuple[KVCache, DecodeState]:
    """Puts an environment's observation behind what each row has sampled; those rows can be decoded further.

    The tokens are in the row's context and in its frame, but not in its `response_mask`: the policy did not say them,
    and nothing is learned of them. What was sampled stays in the cache as it was sampled.

    Args:
      tokens: int32 [B, O]
      mask: bool [B, O], the observation's tokens, first ones first; a row without any is done and stays so. A row
        whose frame (`max_new_tokens`) has no room behind it ends by its length.
    """
    chex.assert_equal_shape([tokens, mask])
    hidden, cache = append(model, params, cache, tokens, mask)
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
    model: Model, params: Params, prompts: Prompts, key: Array, *, n: int, width: int
) -> tuple[KVCache, DecodeState]:
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
    return cache.fork(n, width), state


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
) -> Batch:
    """n responses of at most `width` tokens to each prompt: the phase `gen`.

    Args:
      params: the sampler's view of the policy's parameters.
      prompts: [G, P]; filler prompts get empty responses.
      key: the step's for this phase; consumed.
      n, width: responses per prompt; R, slots of the response frame.

    Returns:
      A batch of G·n rows with the evidence of `gen`. A row's tokens depend on key, uid and sample index alone, not on
      where it stands (bitwise at one shape; other shapes sum in another order).
    """
    cache, state = begin(model, params, prompts, key, n=n, width=width)
    _, state = decode(model, params, cache, state, sampling=sampling, stops=stops)
    return as_batch(prompts, state)

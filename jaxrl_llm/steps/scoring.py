"""What models say of a finished batch: log-probs, entropies and values, each in the response frame [B, R], and the
scores [B] of reward models. Both are computed of padded rows, or of packed lines (packing.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.log_probs import TokenStats, from_hidden
from jaxrl_llm.steps.packing import Packing
from jaxrl_llm.types import Array, Batch, Model, Packed, Params


def response_hidden(model: Model, params: Params, batch: Batch) -> Array:
    """Hidden states [B, R, D] of the positions that *predict* each response token.

    A prompt is computed once for its n responses. Token ids where no mask stands are never read.
    """
    # The last response token predicts nothing that is asked for.
    return _hidden_after(model, params, batch, max(batch.response_width - 1, 1))[:, : batch.response_width]


def _hidden_after(model: Model, params: Params, batch: Batch, inputs: int) -> Array:
    """Hidden states [B, inputs + 1, D]: after the prompt, and after each of the first `inputs` response tokens."""
    (groups, width), n, rows = batch.prompts.shape, batch.n, batch.num_rows
    in_response = jnp.arange(inputs)[None, :] < batch.response_length[:, None]
    after = jnp.arange(inputs)[None, :] + jnp.repeat(batch.prompt_mask.sum(1, dtype=jnp.int32), n)[:, None]
    line = (x.reshape(groups, n * inputs) for x in (batch.responses[:, :inputs], after, in_response))
    hidden = _after_prompt(model, params, batch, *line, blocks=(width, n))
    last_of_prompt = jnp.repeat(hidden[:, :1], n, axis=0)
    return jnp.concatenate([last_of_prompt, hidden[:, 1:].reshape(rows, inputs, -1)], 1)


def _packed_hidden_after(model: Model, params: Params, batch: Batch, packing: Packing) -> Array:
    """Hidden states [G, 1 + S, D]: after the prompt, and after the token in each of its S slots."""
    (_, width), used = batch.prompts.shape, packing.used
    after = packing.token + batch.prompt_mask.sum(1, dtype=jnp.int32)[:, None]
    segments = jnp.where(used, packing.response + 1, 0)
    line = packing.into_lines(batch.responses), jnp.where(used, after, 0), segments
    return _after_prompt(model, params, batch, *line, blocks=Packed(width, batch.n, batch.response_width))


def _after_prompt(
    model: Model, params: Params, batch: Batch, tokens: Array, positions: Array, segments: Array, *, blocks: Any
) -> Array:
    """Hidden states [G, 1 + T, D] of each prompt's last token and of T tokens behind it."""
    mask = batch.prompt_mask

    def line(prompt: Array, rest: Array) -> Array:
        return jnp.concatenate([prompt, rest], 1, dtype=jnp.int32)

    segments, before = line(mask, segments), jnp.maximum(jnp.cumsum(mask, 1, dtype=jnp.int32) - 1, 0)
    tokens = jnp.where(segments > 0, line(batch.prompts, tokens), 0)
    hidden, _ = model.forward(params, tokens, line(before, positions), segments, blocks=blocks)
    return hidden[:, mask.shape[1] - 1 :]


class Predictions(NamedTuple):
    """What predicts a batch's response tokens, in its rows or in packed lines: the one place of the shift by one."""

    hidden: Array  # [lines, W, D]
    labels: Array  # int32 [lines, W], the tokens predicted; 0 where there is none
    in_rows: Callable[[Array], Array]  # [lines, W] -> [B, R], 0 outside the response mask


def predictions(model: Model, params: Params, batch: Batch, packed_width: int | None = None) -> Predictions:
    """See `score_tokens`."""
    mask, width = batch.response_mask, batch.response_width
    if packed_width is None:
        hidden = response_hidden(model, params, batch)
        return Predictions(hidden, jnp.where(mask, batch.responses, 0), lambda x: jnp.where(mask, x, 0))
    packing = Packing.of(batch, packed_width)
    after = _packed_hidden_after(model, params, batch, packing)
    first = packing.used & (packing.token == 0)
    hidden = jnp.where(first[:, :, None], after[:, :1], after[:, :-1])
    labels = packing.into_lines(batch.responses)
    return Predictions(hidden, labels, lambda x: jnp.where(mask, packing.into_rows(x, width), 0))


def score_tokens(
    model: Model,
    params: Params,
    batch: Batch,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = True,
    entropy_gradient: bool = True,
    with_sum_pi_squared: bool = False,
    packed_width: int | None = None,
) -> TokenStats:
    """Log-probs, entropies (nats) and Σπ² of the response tokens under softmax(logits / temperature).

    Args:
      batch: B rows with responses; nothing else of it is read.
      temperature: above 0.
      with_entropy, with_sum_pi_squared: what is left out is None.
      entropy_gradient: False holds entropies constant, which costs less.
      packed_width: S, to compute lines of a prompt and S slots in which its responses are packed (packing.py), where
        each prompt's have at most S tokens together. None computes the padding of the response frame as well.

    Returns:
      `TokenStats` of float32 [B, R] each, 0 outside the mask.

    Logits exist for `chunk_tokens` tokens at a time (lines × positions; at least one position of every line).
    """
    hidden, labels, in_rows = predictions(model, params, batch, packed_width)
    stats = from_hidden(
        lambda hidden: model.heads["logits"](params, hidden),
        hidden,
        labels,
        temperature=temperature,
        chunk=max(1, chunk_tokens // labels.shape[0]),
        with_entropy=with_entropy,
        entropy_gradient=entropy_gradient,
        with_sum_pi_squared=with_sum_pi_squared,
    )
    return jax.tree.map(in_rows, stats)


def score_values(model: Model, params: Params, batch: Batch, *, packed_width: int | None = None) -> Array:
    """The critic's values, float32 [B, R]: values[t] from the position that predicts token t; 0 outside the mask.
    `packed_width` as in `score_tokens`."""
    hidden, _, in_rows = predictions(model, params, batch, packed_width)
    return in_rows(model.heads["value"](params, hidden))


def score_responses(model: Model, params: Params, batch: Batch, *, packed_width: int | None = None) -> Array:
    """A reward model's scores, float32 [B]: its head at each response's last token (at the prompt's, if it has none).

    That is `score_sequences` of prompt and response as one text, with a prompt computed once for its n responses.
    `packed_width` as in `score_tokens`.
    """
    if packed_width is None:
        hidden, at = _hidden_after(model, params, batch, batch.response_width), batch.response_length[:, None]
    else:
        packing = Packing.of(batch, packed_width)
        hidden = _packed_hidden_after(model, params, batch, packing)
        length = batch.response_length.reshape(packing.start.shape)
        at = jnp.where(length > 0, packing.start + length, 0)
    last = jnp.take_along_axis(hidden, at[:, :, None], 1).reshape(batch.num_rows, -1)
    return model.heads["score"](params, last)


def score_sequences(model: Model, params: Params, tokens: Array, mask: Array) -> Array:
    """A reward model's scores of whole texts, float32 [B]: its head at each text's last token, as the sequence
    classifiers of transformers read it.

    Args:
      model: with a "score" head.
      tokens: int32 [B, T], at least one of each row real; the others are never read.
      mask: bool [B, T], the real ones, on whichever side the padding is.
    """
    positions = jnp.maximum(jnp.cumsum(mask, 1, dtype=jnp.int32) - 1, 0)
    alone = (tokens.shape[1], 0)
    hidden, _ = model.forward(params, jnp.where(mask, tokens, 0), positions, mask.astype(jnp.int32), blocks=alone)
    last = jnp.where(mask, jnp.arange(mask.shape[1])[None, :], 0).max(1)
    return model.heads["score"](params, jnp.take_along_axis(hidden, last[:, None, None], 1)[:, 0])


def in_micro_batches(score: Callable[[Batch], Any], batch: Batch, parts: int) -> Any:
    """score(batch), computed in `parts` micro-batches of whole prompts, one after the other.

    Args:
      score: rows -> tree of arrays [rows, …].
      parts: a divisor of the batch's prompts.
    """
    if parts == 1:
        return score(batch)
    return batch.join_parts(jax.lax.map(score, batch.split(parts)))

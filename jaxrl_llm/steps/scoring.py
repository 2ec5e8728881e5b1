"""What models say of a finished batch: log-probs, entropies and values, each in the response frame [B, R], and the
scores [B] of reward models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.log_probs import TokenStats, from_hidden
from jaxrl_llm.types import Array, Batch, Model, Params


def response_hidden(model: Model, params: Params, batch: Batch) -> Array:
    """Hidden states [B, R, D] of the positions that *predict* each response token: the one place of the shift by one.

    A prompt is computed once for its n responses. Token ids where no mask stands are never read.
    """
    # The last response token predicts nothing that is asked for.
    return _hidden_after(model, params, batch, max(batch.response_width - 1, 1))[:, : batch.response_width]


def _hidden_after(model: Model, params: Params, batch: Batch, inputs: int) -> Array:
    """Hidden states [B, inputs + 1, D]: after the prompt, and after each of the first `inputs` response tokens."""
    (groups, width), n, rows = batch.prompts.shape, batch.n, batch.num_rows
    in_response = jnp.arange(inputs)[None, :] < batch.response_length[:, None]
    prompt_length = batch.prompt_mask.sum(1, dtype=jnp.int32)
    after = jnp.arange(inputs)[None, :] + jnp.repeat(prompt_length, n)[:, None]

    def line(prompt: Array, response: Array) -> Array:
        return jnp.concatenate([prompt, response.reshape(groups, n * inputs)], 1)

    mask = line(batch.prompt_mask, in_response)
    tokens = jnp.where(mask, line(batch.prompts, batch.responses[:, :inputs]), 0)
    before = jnp.maximum(jnp.cumsum(batch.prompt_mask, 1, dtype=jnp.int32) - 1, 0)
    hidden, _ = model.forward(params, tokens, line(before, after), mask.astype(jnp.int32), blocks=(width, n))
    last_of_prompt = jnp.repeat(hidden[:, width - 1], n, axis=0)[:, None]
    return jnp.concatenate([last_of_prompt, hidden[:, width:].reshape(rows, inputs, -1)], 1)


def score_tokens(
    model: Model,
    params: Params,
    batch: Batch,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = True,
    with_sum_pi_squared: bool = False,
) -> TokenStats:
    """Log-probs, entropies (nats) and Σπ² of the response tokens under softmax(logits / temperature).

    Args:
      batch: B rows with responses; nothing else of it is read.
      temperature: above 0.
      with_entropy, with_sum_pi_squared: what is left out is None.

    Returns:
      `TokenStats` of float32 [B, R] each, 0 outside the mask.

    Logits exist for `chunk_tokens` tokens at a time (rows × positions; at least one position of every row).
    """
    mask = batch.response_mask
    stats = from_hidden(
        lambda hidden: model.heads["logits"](params, hidden),
        response_hidden(model, params, batch),
        jnp.where(mask, batch.responses, 0),
        temperature=temperature,
        chunk=max(1, chunk_tokens // batch.num_rows),
        with_entropy=with_entropy,
        with_sum_pi_squared=with_sum_pi_squared,
    )
    return jax.tree.map(lambda x: jnp.where(mask, x, 0), stats)


def score_values(model: Model, params: Params, batch: Batch) -> Array:
    """The critic's values, float32 [B, R]: values[t] from the position that predicts token t; 0 outside the mask."""
    values = model.heads["value"](params, response_hidden(model, params, batch))
    return jnp.where(batch.response_mask, values, 0)


def score_responses(model: Model, params: Params, batch: Batch) -> Array:
    """A reward model's scores, float32 [B]: its head at each response's last token (at the prompt's, if it has none).

    That is `score_sequences` of prompt and response as one text, with a prompt computed once for its n responses.
    """
    hidden = _hidden_after(model, params, batch, batch.response_width)
    last = jnp.take_along_axis(hidden, batch.response_length[:, None, None], 1)[:, 0]
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
    hidden, _ = model.forward(params, jnp.where(mask, tokens, 0), positions, mask.astype(jnp.int32))
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

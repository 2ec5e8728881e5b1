"""What models say of a finished batch: log-probs, entropies and values, each in the response frame [B, R]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.log_probs import TokenStats, from_hidden
from jaxrl_llm.types import Array, Batch, Model, Params


def response_hidden(model: Model, params: Params, rows: Batch) -> Array:
    """Hidden states [B, R, D] of the positions that *predict* each response token: the one place of the shift by one.

    `rows` is an expanded batch (a prompt per row). Token ids where no mask stands are never read.
    """
    width = rows.response_width
    in_response = jnp.arange(width)[None, :] < rows.response_length[:, None]
    # The last response token predicts nothing that is asked for.
    mask = jnp.concatenate([rows.prompt_mask, in_response[:, :-1]], 1)
    tokens = jnp.where(mask, jnp.concatenate([rows.prompts, rows.responses[:, :-1]], 1), 0)
    positions = jnp.maximum(jnp.cumsum(mask, 1, dtype=jnp.int32) - 1, 0)
    hidden, _ = model.forward(params, tokens, positions, mask.astype(jnp.int32))
    return hidden[:, -width:]


def score_tokens(
    model: Model,
    params: Params,
    rows: Batch,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = True,
    with_sum_pi_squared: bool = False,
) -> TokenStats:
    """Log-probs, entropies (nats) and Σπ² of the response tokens under softmax(logits / temperature); 0 outside the mask.

    Logits exist for `chunk_tokens` tokens at a time (rows × positions; at least one position of every row).
    """
    mask = rows.response_mask
    stats = from_hidden(
        lambda hidden: model.heads["logits"](params, hidden),
        response_hidden(model, params, rows),
        jnp.where(mask, rows.responses, 0),
        temperature=temperature,
        chunk=max(1, chunk_tokens // rows.num_rows),
        with_entropy=with_entropy,
        with_sum_pi_squared=with_sum_pi_squared,
    )
    return jax.tree.map(lambda x: jnp.where(mask, x, 0), stats)


def score_values(model: Model, params: Params, rows: Batch) -> Array:
    """values [B, R], values[t] before response token t is known; 0 outside the mask."""
    values = model.heads["value"](params, response_hidden(model, params, rows))
    return jnp.where(rows.response_mask, values, 0)


def split_rows(tree: Any, parts: int) -> Any:
    """Leaves [B, …] as [parts, B / parts, …]; part j takes rows j, j + parts, …, so that each takes some of every shard."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1), tree)


def join_rows(tree: Any) -> Any:
    """The inverse of `split_rows`."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), tree)


def in_micro_batches(score: Callable[[Batch], Any], rows: Batch, parts: int) -> Any:
    """score(rows), computed in `parts` micro-batches one after the other; parts must divide the number of rows."""
    if parts == 1:
        return score(rows)
    return join_rows(jax.lax.map(score, split_rows(rows, parts)))

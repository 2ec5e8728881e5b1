"""Rewards that speak of the form of a response, on top of what it is worth."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

Array = jax.Array


def overlong_penalty(length: Array, *, limit: int, buffer: int, factor: float = 1.0) -> Array:
    """DAPO's soft overlong punishment: −factor · clip((length − (limit − buffer)) / buffer, 0, 1), float32 [B]
    (https://arxiv.org/abs/2503.14476, eq. 13).

    Args:
      length: int [B], tokens of the responses.
      limit: tokens that a response may have.
      buffer: the last tokens of these, over which the penalty rises from 0 to `factor`.

    Raises:
      ValueError: the buffer is not from 1 to the limit.

    >>> overlong_penalty(jnp.array([60, 80, 90, 100]), limit=100, buffer=20, factor=0.5).tolist()
    [0.0, 0.0, -0.25, -0.5]
    """
    chex.assert_rank(length, 1)
    if not 1 <= buffer <= limit:
        raise ValueError(f"a buffer of {buffer} tokens in responses of at most {limit}")
    over = (length - (limit - buffer)).astype(jnp.float32) / buffer
    return 0.0 - factor * jnp.clip(over, 0, 1)  # not -0 where there is none

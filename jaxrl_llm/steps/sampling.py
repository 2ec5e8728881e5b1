"""One token per row from logits: filters, an exact draw with a single uniform number, and the log-prob of what was
drawn."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.types import Array

BLOCK = 64  # vocabulary entries per block of the two-level draw


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to sample. Static: each distinct value is a program of its own.

    temperature 0 is greedy. Filters apply in the order top_k, top_p, min_p, each on what the former left, renormalized.
    """

    temperature: float = 1.0
    top_k: int = 0  # keep the k likeliest; 0 keeps all
    top_p: float = 1.0  # keep the fewest likeliest whose mass reaches top_p (Holtzman et al. 2020)
    min_p: float = 0.0  # keep those at least min_p times as likely as the likeliest (Nguyen et al. 2024)


def sample(logits: Array, uniform: Array, sampling: Sampling) -> tuple[Array, Array]:
    """Draws one token per row.

    Args:
      logits: at least float32 [B, V]; −inf is never drawn.
      uniform: [B] in [0, 1), one number per row (greedy ignores it).

    Returns:
      token int32 [B], and its log-prob [B] under the distribution that was sampled, filters and temperature included.
      (Greedy: under softmax(logits), since the distribution sampled has no other outcome.)
    """
    chex.assert_rank([logits, uniform], [2, 1])
    if sampling.temperature == 0:
        token = jnp.argmax(logits, -1).astype(jnp.int32)
    else:
        logits = filter_logits(logits / sampling.temperature, sampling)
        token = draw(logits, uniform)
    chosen = jnp.take_along_axis(logits, token[:, None], 1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, -1)


def filter_logits(logits: Array, sampling: Sampling) -> Array:
    """logits [B, V] with what top-k, top-p and min-p leave out at −inf. Ties with the last one kept are kept."""
    if 0 < sampling.top_k < logits.shape[-1]:
        threshold = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    if sampling.top_p < 1:
        descending = jnp.sort(logits, -1, descending=True)
        mass = jax.nn.softmax(descending, -1)
        before = jnp.cumsum(mass, -1) - mass
        keep = (before < sampling.top_p).at[:, 0].set(True)
        threshold = jnp.where(keep, descending, jnp.inf).min(-1, keepdims=True)
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    if sampling.min_p > 0:
        threshold = logits.max(-1, keepdims=True) + jnp.log(sampling.min_p)
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    return logits


def draw(logits: Array, uniform: Array) -> Array:
    """int32 [B]: the inverse of the distribution function of softmax(logits) [B, V] at `uniform` [B].

    Two levels, first among blocks of the vocabulary, then inside one: a random number and a running sum per vocabulary
    entry, as in `jax.random.categorical`, would take several times as long. Each target is kept strictly below the sum
    that it is sought in, so that rounding can never lead to an entry of probability 0.
    """
    rows, size = logits.shape
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    blocks = jnp.pad(weights, ((0, 0), (0, -size % BLOCK))).reshape(rows, -1, BLOCK)
    sums = jnp.cumsum(blocks.sum(-1), -1)
    target = _below(uniform * sums[:, -1], sums[:, -1])
    block = (sums <= target[:, None]).sum(-1)
    before = jnp.where(block > 0, jnp.take_along_axis(sums, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0)
    inside = jnp.cumsum(jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0], -1)
    target = _below(jnp.maximum(target - before, 0), inside[:, -1])
    return (block * BLOCK + (inside <= target[:, None]).sum(-1)).astype(jnp.int32)


def _below(target: Array, total: Array) -> Array:
    return jnp.minimum(target, jnp.nextafter(total, jnp.zeros_like(total)))

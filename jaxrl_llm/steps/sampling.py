"""One token per row from logits: filters, an exact draw with a single uniform number, and the log-prob of what was
drawn."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

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
        # The first of the largest; on CPUs several times faster than argmax.
        size = logits.shape[-1]
        places = jnp.where(logits == logits.max(-1, keepdims=True), jnp.arange(size)[None, :], size - 1)
        token = places.min(-1).astype(jnp.int32)
        weights, top = _weights(logits)
        total = weights.sum(-1)
    else:
        logits = filter_logits(logits / sampling.temperature, sampling)
        weights, top = _weights(logits)
        token, total = _draw(weights, uniform)
    chosen = jnp.take_along_axis(logits, token[:, None], 1)[:, 0]
    return token, chosen - top[:, 0] - jnp.log(total)


def filter_logits(logits: Array, sampling: Sampling) -> Array:
    """logits [B, V] with what top-k, top-p and min-p leave out at −inf. Ties with the last one kept are kept."""
    if 0 < sampling.top_k < logits.shape[-1]:
        threshold = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    if sampling.top_p < 1:
        logits = jnp.where(logits > below_nucleus(logits, sampling.top_p)[:, None], logits, -jnp.inf)
    if sampling.min_p > 0:
        threshold = logits.max(-1, keepdims=True) + jnp.log(sampling.min_p)
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    return logits


class _End(NamedTuple):
    """One end of the interval in which a nucleus ends, of each row."""

    at: Array  # [B], a logit
    mass: Array  # [B], of the entries above it
    count: Array  # int32 [B], of these entries
    pull: Array  # [B], how far the mass is from what is sought; halved whenever the other end has moved twice
    moved: Array  # bool [B], whether this end moved last


def below_nucleus(logits: Array, top_p: float) -> Array:
    """The nucleus of each row of logits [B, V] without sorting: [B], such that the entries above it are the fewest
    likeliest whose mass reaches top_p.

    The mass of what lies above a number falls as the number grows, so the place where it passes top_p can be searched
    for: between a low end, with at least top_p above it, and a high end, with less. A look at the logits tries where
    the straight line between the two points to (regula falsi; Dowell and Jarratt 1971, "Illinois"), every third time
    the middle. A row is done when one entry is left in between, or several equal ones, or no more than rounding leaves
    of a sum. That is ten to forty looks, where a sort of a whole vocabulary takes far longer.
    """
    weights, top = _weights(logits)
    top, total = top[:, 0], weights.sum(-1)
    target, rounding = top_p * total, jnp.finfo(weights.dtype).eps * total

    def end(at: Array) -> _End:
        # The mass and the number of the entries in one reduction: on CPUs the fastest way.
        chosen = logits > at[:, None]
        zero = jnp.zeros((), weights.dtype), jnp.int32(0)
        both = jnp.where(chosen, weights, 0), chosen.astype(jnp.int32)
        mass, count = jax.lax.reduce(both, zero, lambda a, b: (a[0] + b[0], a[1] + b[1]), (1,))
        return _End(at, mass, count, jnp.abs(mass - target), jnp.ones(at.shape, bool))

    def open_rows(low: _End, high: _End) -> Array:
        middle = low.at + (high.at - low.at) * 0.5
        apart = (middle > low.at) & (middle < high.at)
        return apart & (low.count - high.count > 1) & (low.mass - high.mass > rounding)

    def look(search: tuple[Array, _End, _End]) -> tuple[Array, _End, _End]:
        step, low, high = search
        share = jnp.clip(low.pull / jnp.maximum(low.pull + high.pull, rounding), 0.01, 0.99)
        new = end(low.at + (high.at - low.at) * jnp.where(step % 3 == 2, 0.5, share))
        going, enough = open_rows(low, high), new.mass >= target

        def moved(old: _End, moves: Array) -> _End:
            waits = old._replace(moved=jnp.zeros_like(moves), pull=jnp.where(old.moved, old.pull, old.pull * 0.5))
            return jax.tree.map(lambda a, b, c: jnp.where(going, jnp.where(moves, a, b), c), new, waits, old)

        return step + 1, moved(low, enough), moved(high, ~enough)

    # All that is lighter than this has together less mass than may be left out.
    least = top + jnp.log((1 - top_p) * total / logits.shape[-1]) - 0.01
    search = (jnp.int32(0), end(least), end(top))
    return jax.lax.while_loop(lambda search: open_rows(*search[1:]).any(), look, search)[1].at


def draw(logits: Array, uniform: Array) -> Array:
    """int32 [B]: the inverse of the distribution function of softmax(logits) [B, V] at `uniform` [B].

    Two levels, first among blocks of the vocabulary, then inside one: a random number and a running sum per vocabulary
    entry, as in `jax.random.categorical`, would take several times as long. Each target is kept strictly below the sum
    that it is sought in, so that rounding can never lead to an entry of probability 0.
    """
    return _draw(_weights(logits)[0], uniform)[0]


def _weights(logits: Array) -> tuple[Array, Array]:
    """exp(logits − top) [B, V], and top [B, 1], the largest of each row."""
    top = logits.max(-1, keepdims=True)
    return jnp.exp(logits - top), top


def _draw(weights: Array, uniform: Array) -> tuple[Array, Array]:
    """The tokens drawn, int32 [B], and the sums of the weights, [B]."""
    rows, size = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -size % BLOCK))).reshape(rows, -1, BLOCK)
    sums = jnp.cumsum(blocks.sum(-1), -1)
    target = _below(uniform * sums[:, -1], sums[:, -1])
    block = (sums <= target[:, None]).sum(-1)
    before = jnp.where(block > 0, jnp.take_along_axis(sums, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0)
    inside = jnp.cumsum(jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0], -1)
    target = _below(jnp.maximum(target - before, 0), inside[:, -1])
    return (block * BLOCK + (inside <= target[:, None]).sum(-1)).astype(jnp.int32), sums[:, -1]


def _below(target: Array, total: Array) -> Array:
    return jnp.minimum(target, jnp.nextafter(total, jnp.zeros_like(total)))

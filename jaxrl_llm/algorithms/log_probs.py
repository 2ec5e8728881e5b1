"""Log-probabilities and entropies of tokens, from logits or from hidden states, and estimators of the KL divergence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.errors import nearest

Array = jax.Array

LOG_RATIO_LIMIT = 20.0  # exp(±20) is 4.9e8: log-ratios are clipped here before they are exponentiated
OVERFLOW_LIMIT = 60.0  # exp(60) is 1.1e26: where a formula has no clip of its own, this keeps float32 finite
K3_LIMIT = 10.0
NO_WEIGHT = -1e4  # exp of it is 0 in any floating dtype; finite, so that 0 times it is 0

# Of a chunk of tokens the backward pass finds these, and computes the logits alone again.
PER_TOKEN = "jaxrl_llm_per_token"
KEPT = jax.checkpoint_policies.save_only_these_names(PER_TOKEN)


class TokenStats(NamedTuple):
    """What a distribution over the vocabulary says at each position, [B, R] each."""

    log_probs: Array  # nats
    entropys: Array | None  # nats
    sum_pi_squared: Array | None


def token_log_probs(logits: Array, labels: Array, temperature: float | Array = 1.0) -> Array:
    """log softmax(logits / T)[label].

    Args:
      logits: floating [..., V]; computed in float32 at least. Vocabulary padding is −inf.
      labels: integer [...]
      temperature: T > 0.

    Returns:
      float [...], nats.

    >>> print(token_log_probs(jnp.zeros((1, 4)), jnp.array([2])).round(4))
    [-1.3863]
    """
    shifted = _shift(logits, temperature)
    return _at(shifted, labels) - _log_sum_exp(shifted)[..., 0]


def entropy(logits: Array, temperature: float | Array = 1.0) -> Array:
    """H = −Σ_v π_v log π_v of π = softmax(logits / T), nats; entries of −inf count for nothing.

    Args:
      logits: floating [..., V]

    >>> print(entropy(jnp.array([0.0, 0.0, -jnp.inf])).round(4))
    0.6931
    """
    return _entropy(_log_softmax(logits, temperature))


def sum_pi_squared(logits: Array, temperature: float | Array = 1.0) -> Array:
    """Σ_v π_v² of π = softmax(logits / T): the chance that two samples agree.

    Args:
      logits: floating [..., V]

    >>> sum_pi_squared(jnp.zeros(4)).item()
    0.25
    """
    return _sum_pi_squared(_log_softmax(logits, temperature))


def from_hidden(
    logits_fn: Callable[[Array], Array],
    hidden: Array,
    labels: Array,
    *,
    temperature: float | Array = 1.0,
    chunk: int,
    with_entropy: bool = True,
    entropy_gradient: bool = True,
    with_sum_pi_squared: bool = False,
) -> TokenStats:
    """Log-probs of labels from hidden states, without ever holding the logits of all positions.

    The response axis is cut into chunks (the batch axis stays whole, or a sharded one would be gathered); where there
    are several, each is computed again in the backward pass, so that at most one chunk's logits, [B, chunk, V], exist
    at a time.

    Args:
      logits_fn: hidden [..., D] -> float32 logits [..., V].
      hidden: floating [B, R, D]
      labels: integer [B, R]
      temperature: T > 0; it has no gradient.
      chunk: positions at a time, at least 1; R need not be a multiple.
      with_entropy: False leaves `entropys` None.
      entropy_gradient: False holds entropies constant, which costs less.
      with_sum_pi_squared: False leaves `sum_pi_squared` None.

    >>> stats = from_hidden(lambda hidden: hidden, jnp.zeros((1, 3, 4)), jnp.array([[1, 1, 1]]), chunk=2)
    >>> stats.log_probs.shape, bool(jnp.allclose(stats.log_probs, -jnp.log(4)))
    ((1, 3), True)
    """
    rows, width, size = hidden.shape
    chunk = min(chunk, width)
    count = -(-width // chunk)
    wanted = with_entropy, with_entropy and entropy_gradient, with_sum_pi_squared

    def stats(pair: tuple[Array, Array]) -> TokenStats:
        return _token_stats(logits_fn(pair[0]), pair[1], temperature, wanted)

    if count == 1:
        return stats((hidden, labels))  # no more would be kept than is computed at once anyway
    padding = count * chunk - width
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0))).reshape(rows, count, chunk, size).swapaxes(0, 1)
    labels = jnp.pad(labels, ((0, 0), (0, padding))).reshape(rows, count, chunk).swapaxes(0, 1)
    chunks = jax.lax.map(jax.checkpoint(stats, policy=KEPT), (hidden, labels))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(rows, count * chunk)[:, :width], chunks)


def kl_penalty(log_probs: Array, ref_log_probs: Array, kind: str) -> Array:
    """A one-sample estimate of KL(π ‖ ref) at each token, from a token sampled from π. With d = log π − log ref:

    `k1` or `kl`: d. `abs`: |d|. `k2` or `mse`: d²/2. `k3` or `low_var_kl`: exp(−d) + d − 1, never negative, with d
    clipped to ±20 and the result to ±10. A `+` behind a kind keeps its value and gives it the gradient of k2, which
    is in expectation that of the reverse KL (straight-through). http://joschu.net/blog/kl-approx.html

    Args:
      log_probs, ref_log_probs: floating [...], nats.
      kind: one of the names above.

    Raises:
      ValueError: the kind is unknown.

    >>> float(kl_penalty(jnp.float32(-1.0), jnp.float32(-2.0), "k1"))
    1.0
    >>> float(kl_penalty(jnp.float32(-1.0), jnp.float32(-2.0), "k2"))
    0.5
    """
    difference = log_probs - ref_log_probs
    name = kind.removesuffix("+")
    if name not in KL_KINDS:
        raise ValueError(f"kl kind {kind!r} is unknown; {nearest(kind, [*KL_KINDS, *(k + '+' for k in KL_KINDS)])}")
    value = KL_KINDS[name](difference)
    if not kind.endswith("+"):
        return value
    slope = _k2(difference)
    return slope - jax.lax.stop_gradient(slope) + jax.lax.stop_gradient(value)


def absolute(x: Array) -> Array:
    """|x| with the slope 0 at 0 (that of `jnp.abs` is 1 there).

    >>> float(jax.grad(absolute)(0.0)), float(absolute(-2.0))
    (0.0, 2.0)
    """
    return x * jnp.sign(x)


def _k1(difference: Array) -> Array:
    return difference


def _k2(difference: Array) -> Array:
    return 0.5 * jnp.square(difference)


def _k3(difference: Array) -> Array:
    d = jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # expm1 keeps the digits that exp(-d) - 1 would lose where d is small.
    return jnp.clip(jnp.expm1(-d) + d, -K3_LIMIT, K3_LIMIT)


KL_KINDS: dict[str, Callable[[Array], Array]] = {
    "k1": _k1,
    "kl": _k1,
    "abs": absolute,
    "k2": _k2,
    "mse": _k2,
    "k3": _k3,
    "low_var_kl": _k3,
}


def _shift(logits: Array, temperature: float | Array) -> Array:
    """(logits − their maximum) / T; in this order, or the division would round away the digits of large logits."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return (logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True))) / temperature


def _log_sum_exp(shifted: Array) -> Array:
    return jnp.log(jnp.exp(shifted).sum(-1, keepdims=True))


def _log_softmax(logits: Array, temperature: float | Array) -> Array:
    shifted = _shift(logits, temperature)
    return shifted - _log_sum_exp(shifted)


def _at(values: Array, labels: Array) -> Array:
    return jnp.take_along_axis(values, labels[..., None], axis=-1)[..., 0]


def _dot(a: Array, b: Array) -> Array:
    return (a * b).sum(-1, keepdims=True)


def _entropy(log_pi: Array) -> Array:
    pi = jnp.exp(log_pi)
    return -(pi * jnp.where(pi > 0, log_pi, 0)).sum(-1)


def _sum_pi_squared(log_pi: Array) -> Array:
    return jnp.exp(2 * log_pi).sum(-1)


def _token_stats(
    logits: Array, labels: Array, temperature: float | Array, wanted: tuple[bool, bool, bool]
) -> TokenStats:
    high = jnp.promote_types(logits.dtype, jnp.float32)
    return _stats(wanted, logits, labels, jnp.asarray(temperature, high))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stats(wanted: tuple[bool, bool, bool], logits: Array, labels: Array, temperature: Array) -> TokenStats:
    """`TokenStats` of logits [..., V], with a gradient by formula: nothing else of a chunk is kept for it, and no
    scatter puts a token's share into its place. The temperature has no gradient.

    Args:
      wanted: whether entropies, a gradient of theirs, and Σπ² are.
    """
    return _stats_forward(wanted, logits, labels, temperature)[0]


def _stats_forward(
    wanted: tuple[bool, bool, bool], logits: Array, labels: Array, temperature: Array
) -> tuple[TokenStats, Any]:
    with_entropy, _, with_sum_pi_squared = wanted
    logits = logits.astype(temperature.dtype)
    top = logits.max(-1, keepdims=True)
    shifted = (logits - top) / temperature
    weights = jnp.exp(shifted)
    total = weights.sum(-1, keepdims=True)
    log_sum = jnp.log(total)
    # Of weights and their sum, not of π: that would be one more pass over the vocabulary. H is a sum of two, log Σ w
    # and −Σ w · shifted / Σ w, neither of them negative.
    entropys = log_sum - _dot(weights, jnp.maximum(shifted, NO_WEIGHT)) / total if with_entropy else None
    sum_pi_squared = _dot(weights, weights) / (total * total) if with_sum_pi_squared else None
    stats = TokenStats(
        log_probs=_at(shifted, labels) - log_sum[..., 0],
        entropys=None if entropys is None else entropys[..., 0],
        sum_pi_squared=None if sum_pi_squared is None else sum_pi_squared[..., 0],
    )
    norm, stats = checkpoint_name(((top, log_sum), stats), PER_TOKEN)
    return stats, (logits, labels, temperature, norm, stats)


def _stats_backward(wanted: tuple[bool, bool, bool], kept: Any, g: TokenStats) -> tuple[Any, ...]:
    """With z = logits / T: ∂ log π_a / ∂z_v = [v = a] − π_v, ∂H / ∂z_v = −π_v (log π_v + H),
    ∂ Σπ² / ∂z_v = 2 π_v (π_v − Σπ²)."""
    _, entropy_gradient, with_sum_pi_squared = wanted
    logits, labels, temperature, (top, log_sum), stats = kept
    # What these come of would be fused into the pass over the vocabulary, and computed again for each of its entries.
    g = jax.lax.optimization_barrier(g)
    log_pi = (logits - top) / temperature - log_sum
    pi = jnp.exp(log_pi)
    pull = g.log_probs[..., None]
    slots = jnp.arange(logits.shape[-1], dtype=labels.dtype)[(None,) * labels.ndim]
    of_label = jnp.where(slots == labels[..., None], pull, 0)
    if entropy_gradient:
        assert g.entropys is not None and stats.entropys is not None
        pull = pull + g.entropys[..., None] * (jnp.where(pi > 0, log_pi, 0) + stats.entropys[..., None])
    if with_sum_pi_squared:
        assert g.sum_pi_squared is not None and stats.sum_pi_squared is not None
        pull = pull - 2 * g.sum_pi_squared[..., None] * (pi - stats.sum_pi_squared[..., None])
    of_logits = of_label - pi * pull
    return (of_logits / temperature).astype(logits.dtype), None, jnp.zeros_like(temperature)


_stats.defvjp(_stats_forward, _stats_backward)

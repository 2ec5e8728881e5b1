"""Log-probs, entropies and KL estimators, against closed forms."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jaxrl_llm.algorithms.log_probs import (
    KL_KINDS,
    TokenStats,
    absolute,
    entropy,
    from_hidden,
    kl_penalty,
    sum_pi_squared,
    token_log_probs,
)

variants: Any = chex.variants  # pyright cannot see through its decorators
ROWS, WIDTH, SIZE, VOCAB = 2, 7, 3, 11
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 3, (ROWS, WIDTH, VOCAB)).astype(np.float32)
HIDDEN = RNG.normal(size=(ROWS, WIDTH, SIZE)).astype(np.float32)
HEAD = RNG.normal(size=(SIZE, VOCAB)).astype(np.float32)
LABELS: Any = RNG.integers(0, VOCAB, (ROWS, WIDTH)).astype(np.int32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


class FromLogits(chex.TestCase):
    @variants(with_jit=True, without_jit=True)
    @parameterized.parameters(0.3, 1.0, 1.7)
    def test_everything_is_of_logits_over_temperature(self, temperature: float) -> None:
        pi = softmax(LOGITS / temperature)
        chosen = np.take_along_axis(pi, LABELS[..., None], -1)[..., 0]
        close = {"rtol": 1e-4, "atol": 1e-5}
        log_probs = self.variant(token_log_probs)(LOGITS, LABELS, temperature)
        np.testing.assert_allclose(log_probs, np.log(chosen), **close)
        np.testing.assert_allclose(self.variant(entropy)(LOGITS, temperature), -(pi * np.log(pi)).sum(-1), **close)
        np.testing.assert_allclose(self.variant(sum_pi_squared)(LOGITS, temperature), (pi**2).sum(-1), **close)
        stats = self.variant(self.from_hidden)(HIDDEN, temperature)
        expected = np.take_along_axis(softmax(HIDDEN @ HEAD / temperature), LABELS[..., None], -1)[..., 0]
        np.testing.assert_allclose(stats.log_probs, np.log(expected), **close)

    @staticmethod
    def from_hidden(hidden: Any, temperature: Any) -> TokenStats:
        return from_hidden(lambda h: h @ HEAD, hidden, LABELS, temperature=temperature, chunk=3)


def test_vocabulary_padding_of_minus_infinity_counts_for_nothing() -> None:
    padded = jnp.concatenate([jnp.asarray(LOGITS), jnp.full((ROWS, WIDTH, 2), -jnp.inf)], axis=-1)

    def total(logits: Any) -> Any:
        return (token_log_probs(logits, LABELS) + entropy(logits) + sum_pi_squared(logits)).sum()

    (value, grad), (value_padded, grad_padded) = (jax.value_and_grad(total)(x) for x in (LOGITS, padded))
    np.testing.assert_allclose(value_padded, value, rtol=1e-6)
    np.testing.assert_allclose(grad_padded[..., :VOCAB], grad, rtol=1e-5, atol=1e-6)
    assert not np.any(grad_padded[..., VOCAB:])


def test_large_logits_lose_no_digits() -> None:
    shifted: Any = (LOGITS + np.float32(4096)).astype(np.float32)
    exact = softmax(shifted.astype(np.float64) / 0.7)
    np.testing.assert_allclose(entropy(shifted, 0.7), -(exact * np.log(exact)).sum(-1), rtol=1e-5, atol=1e-6)


def test_half_precision_logits_are_computed_in_float32() -> None:
    logits = jnp.asarray(LOGITS, jnp.bfloat16)
    assert token_log_probs(logits, LABELS).dtype == jnp.float32
    expected = token_log_probs(logits.astype(jnp.float32), LABELS)
    np.testing.assert_array_equal(token_log_probs(logits, LABELS), expected)


def run_chunks(chunk: int, *, entropys: bool = True, squares: bool = True) -> tuple[Any, Any]:
    def total(hidden: Any, head: Any) -> tuple[Any, TokenStats]:
        stats = from_hidden(
            lambda h: h @ head,
            hidden,
            jnp.asarray(LABELS),
            temperature=0.7,
            chunk=chunk,
            with_entropy=entropys,
            with_sum_pi_squared=squares,
        )
        return sum(jnp.sin(x).sum() for x in stats if x is not None), stats

    grads, stats = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(HIDDEN, HEAD)
    return stats, grads


@pytest.mark.parametrize("chunk", [3, WIDTH])
@pytest.mark.parametrize("hidden_entry", [False, True])
def test_the_gradient_by_formula_is_that_of_differentiation(chunk: int, hidden_entry: bool) -> None:
    """Of each number by itself, with an entry of the vocabulary at −inf or without."""
    known = jnp.arange(VOCAB)[None, None] != (LABELS + 1)[..., None] % VOCAB if hidden_entry else jnp.bool_(True)
    labels, weights = jnp.asarray(LABELS), jnp.asarray(RNG.normal(size=(3, ROWS, WIDTH)), jnp.float32)

    def logits_of(hidden: Any) -> Any:
        return hidden[..., :VOCAB]

    def plain(logits: Any) -> Any:
        found = token_log_probs(logits, labels, 0.7), entropy(logits, 0.7), sum_pi_squared(logits, 0.7)
        return jnp.stack(found)

    def by_formula(logits: Any) -> Any:
        found: Any = from_hidden(logits_of, logits, labels, temperature=0.7, chunk=chunk, with_sum_pi_squared=True)
        return jnp.stack(found)

    logits = jnp.where(known, LOGITS, -jnp.inf)
    for one in range(3):
        expected, found = (
            jax.jit(jax.grad(lambda x, f=f, one=one: (weights * f(x))[one].sum()))(logits) for f in (plain, by_formula)
        )
        assert np.isfinite(found).all() and np.abs(found).max() > 1e-2
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_temperature_is_not_rounded_to_the_logits_precision() -> None:
    given: dict[str, Any] = {"temperature": 0.7, "chunk": WIDTH}
    low = jnp.asarray(LOGITS, jnp.bfloat16)
    found = from_hidden(lambda x: x, low, jnp.asarray(LABELS), **given).log_probs
    np.testing.assert_allclose(found, token_log_probs(low, jnp.asarray(LABELS), 0.7), rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 50])
def test_chunks_change_neither_value_nor_gradient(chunk: int) -> None:
    (stats, grads), (whole, whole_grads) = run_chunks(chunk), run_chunks(WIDTH)
    chex.assert_trees_all_close((stats, grads), (whole, whole_grads), rtol=1e-5, atol=1e-6)
    assert all(x.shape == (ROWS, WIDTH) for x in stats)


def test_what_is_not_asked_for_is_not_there() -> None:
    stats, _ = run_chunks(3, entropys=False, squares=False)
    assert stats.entropys is None and stats.sum_pi_squared is None


@pytest.mark.parametrize("chunk", [3, WIDTH])
def test_entropies_held_constant_keep_their_values(chunk: int) -> None:
    def total(hidden: Any, with_entropy: bool, entropy_gradient: bool) -> tuple[Any, Any]:
        given: dict[str, Any] = {"with_entropy": with_entropy, "entropy_gradient": entropy_gradient}
        stats = from_hidden(lambda h: h @ HEAD, hidden, jnp.asarray(LABELS), chunk=chunk, **given)
        return jnp.sin(stats.log_probs).sum() + (0 if stats.entropys is None else stats.entropys.sum()), stats.entropys

    gradient = jax.jit(jax.grad(total, has_aux=True), static_argnums=(1, 2))
    without, _ = gradient(HIDDEN, False, True)
    moving, entropys = gradient(HIDDEN, True, True)
    held, same = gradient(HIDDEN, True, False)
    np.testing.assert_array_equal(same, entropys)
    np.testing.assert_allclose(held, without, rtol=1e-6, atol=1e-7)
    assert np.abs(moving - held).max() > 1e-2


def equations(function: Any, *args: Any) -> list[Any]:
    """All of a function's, those within loops and checkpoints as well."""
    found: list[Any] = []

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            found.append(equation)
            for value in equation.params.values():
                for inner in value if isinstance(value, tuple | list) else (value,):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        walk(inner)

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return found


def in_chunks_of_two(hidden: Any) -> Any:
    return from_hidden(lambda h: h @ HEAD, hidden, jnp.asarray(LABELS), chunk=2, with_entropy=False)[0].sum()


def test_logits_never_exist_for_all_tokens() -> None:
    """Neither the forward nor the backward pass has an array of the size of all logits."""
    outs = [v for equation in equations(jax.grad(in_chunks_of_two), HIDDEN) for v in equation.outvars]
    sizes = [v.aval.size for v in outs if hasattr(v.aval, "size")]
    assert ROWS * 2 * VOCAB in sizes  # a chunk's logits
    assert max(sizes) < ROWS * WIDTH * VOCAB


def test_the_backward_pass_computes_logits_again_and_nothing_else() -> None:
    """Maxima and sums over the vocabulary are kept; they are one number a token."""
    names = [equation.primitive.name for equation in equations(jax.grad(in_chunks_of_two), HIDDEN)]
    # Forward, again, and the gradient in the hidden states.
    assert names.count("dot_general") == 3
    over_vocabulary = [name for name in names if name in ("reduce_max", "log")]
    assert over_vocabulary == ["reduce_max", "log"]


@pytest.mark.parametrize("kind", [*KL_KINDS, *(kind + "+" for kind in KL_KINDS)])
def test_kl_is_zero_where_the_two_agree(kind: str) -> None:
    x = jnp.array([-0.5, -3.0])
    value, grad = kl_penalty(x, x, kind), jax.grad(lambda y: kl_penalty(y, x, kind).sum())(x)
    assert not np.any(value)
    if kind.rstrip("+") not in ("k1", "kl") or kind.endswith("+"):
        assert not np.any(grad)


def test_k3_is_never_negative() -> None:
    difference = np.concatenate([np.linspace(-30, 30, 301), np.logspace(-9, 0, 50), -np.logspace(-9, 0, 50)])
    values = kl_penalty(jnp.asarray(difference, jnp.float32), jnp.zeros(len(difference)), "k3")
    assert (np.asarray(values) >= 0).all() and np.isfinite(values).all()


# A policy small enough to sum over: a softmax over the vocabulary against a fixed reference.
THETA = jnp.asarray(RNG.normal(0, 0.4, VOCAB), jnp.float32)
REFERENCE = jnp.asarray(np.log(softmax(RNG.normal(0, 0.4, VOCAB))), jnp.float32)


def reverse_kl(theta: Any) -> Any:
    log_pi = jax.nn.log_softmax(theta)
    return (jnp.exp(log_pi) * (log_pi - REFERENCE)).sum()


def expected_penalty(theta: Any, kind: str) -> Any:
    """Σ_v π(v) kl(v) with the sampling distribution held fixed: what an average over samples differentiates."""
    log_pi = jax.nn.log_softmax(theta)
    return (jax.lax.stop_gradient(jnp.exp(log_pi)) * kl_penalty(log_pi, REFERENCE, kind)).sum()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_estimate_the_reverse_kl(kind: str) -> None:
    np.testing.assert_allclose(expected_penalty(THETA, kind), reverse_kl(THETA), rtol=1e-5)


@pytest.mark.parametrize("kind", ["k2", "mse", "k1+", "kl+", "abs+", "k2+", "k3+", "low_var_kl+"])
def test_straight_through_forms_have_the_exact_gradient_of_the_reverse_kl(kind: str) -> None:
    expected = jax.grad(reverse_kl)(THETA)
    np.testing.assert_allclose(jax.grad(expected_penalty)(THETA, kind), expected, rtol=1e-4, atol=1e-6)
    name = kind.removesuffix("+")
    np.testing.assert_array_equal(expected_penalty(THETA, kind), expected_penalty(THETA, name))


def test_k1_has_no_expected_gradient() -> None:
    np.testing.assert_allclose(jax.grad(expected_penalty)(THETA, "k1"), np.zeros(VOCAB), atol=1e-6)
    assert np.abs(jax.grad(reverse_kl)(THETA)).max() > 1e-2


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="'low_var_k' is unknown; did you mean 'low_var_kl'"):
        kl_penalty(jnp.zeros(1), jnp.zeros(1), "low_var_k")


def test_absolute_has_no_slope_at_zero() -> None:
    assert jax.vmap(jax.grad(absolute))(jnp.array([-2.0, 0.0, 3.0])).tolist() == [-1.0, 0.0, 1.0]


def test_float64_is_kept() -> None:
    with jax.enable_x64(True):
        logits = jnp.asarray(LOGITS, jnp.float64)
        assert token_log_probs(logits, LABELS).dtype == jnp.float64
        assert entropy(logits).dtype == sum_pi_squared(logits).dtype == jnp.float64
        assert all(kl_penalty(logits, logits - 1, kind).dtype == jnp.float64 for kind in KL_KINDS)

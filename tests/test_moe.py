"""A mixture of experts: the quick way gives what every expert for every token gives, whatever the routing."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import jit

from jaxrl_llm.models.architecture import MoeConfig
from jaxrl_llm.models.moe import FEW_TOKENS, LARGEST_BLOCK, all_experts, block_shape, grouped_experts, moe
from jaxrl_llm.types import Array

EXPERTS, K, WIDTH, INNER = 8, 2, 16, 24
B, T = 3, 40


def keep(x: Array, axes: Any) -> Array:
    del axes
    return x


def kernels(experts: int = EXPERTS) -> dict[str, Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"gate": (WIDTH, INNER), "up": (WIDTH, INNER), "down": (INNER, WIDTH)}
    return {name: jax.random.normal(key, (experts, *shapes[name])) for name, key in zip(shapes, keys, strict=True)}


def random_choice(key: Array) -> Array:
    return jax.vmap(lambda key: jax.random.permutation(key, EXPERTS)[:K])(jax.random.split(key, B * T)).reshape(B, T, K)


CHOICES = {
    "random": random_choice(jax.random.key(1)),
    "all to two": jnp.broadcast_to(jnp.array([6, 3]), (B, T, K)),
    "all to the first and the last": jnp.broadcast_to(jnp.array([0, EXPERTS - 1]), (B, T, K)),
    "in turn": (jnp.arange(B * T * K) % EXPERTS).reshape(B, T, K),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_grouped_experts_give_what_all_experts_give(choice: str) -> None:
    """Values, and gradients by tokens, weights and kernels."""
    x, wanted = jax.random.normal(jax.random.key(2), (2, B, T, WIDTH))
    weights = jax.random.uniform(jax.random.key(3), (B, T, K))

    def graded(compute: Any) -> Any:
        def total(x: Array, weights: Array, experts: dict[str, Array]) -> tuple[Array, Array]:
            out = compute(jax.nn.silu, keep, experts, x, weights, CHOICES[choice])
            return (out * wanted).sum(), out

        return jit(jax.grad(total, (0, 1, 2), has_aux=True))(x, weights, kernels())

    found, expected = graded(grouped_experts), graded(all_experts)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()), rtol=0)
    unused = set(range(EXPERTS)) - set(np.unique(CHOICES[choice]))
    assert all((found[0][2][name][e] == 0).all() for name in kernels() for e in unused)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_there_are_blocks_enough_for_any_load(load: list[int]) -> None:
    pairs = sum(load)
    blocks, size = block_shape(pairs, len(load))
    assert sum(-(-n // size) for n in load) <= blocks
    assert size <= LARGEST_BLOCK and size & (size - 1) == 0
    assert blocks * size <= 1.125 * (pairs + len(load) * size) + 2 * size


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def router(normalized: bool, tokens: int, experts: int = EXPERTS) -> tuple[MoeConfig, Array, Array]:
    config = MoeConfig(experts, K, INNER, normalized)
    keys = jax.random.split(jax.random.key(4))
    return config, jax.random.normal(keys[0], (1, tokens, WIDTH)), jax.random.normal(keys[1], (1, tokens, experts))


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("tokens", [FEW_TOKENS, FEW_TOKENS + 36])
def test_the_likeliest_experts_count_by_their_probability(normalized: bool, tokens: int) -> None:
    config, x, logits = router(normalized, tokens)
    found = jit(functools.partial(moe, config, jax.nn.silu, keep))(kernels(), x, logits)
    experts = jax.tree.map(np.asarray, kernels())
    for t in range(0, tokens, 7):
        probs = np.exp(logits[0, t]) / np.exp(logits[0, t]).sum()
        best = np.argsort(probs)[-K:]
        shares = probs[best] / (probs[best].sum() if normalized else 1)
        token = np.asarray(x[0, t])
        inner = [silu(token @ experts["gate"][e]) * (token @ experts["up"][e]) for e in best]
        expected = sum(p * (h @ experts["down"][e]) for p, h, e in zip(shares, inner, best, strict=True))
        np.testing.assert_allclose(found[0, t], expected, atol=2e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize(
    ("tokens", "least", "most"), [(FEW_TOKENS, 16, 16.5), (2048, 2, 2.1), (2 * 16 * LARGEST_BLOCK * 4, 1.1, 1.3)]
)
def test_of_many_tokens_little_more_than_the_chosen_experts_is_computed(tokens: int, least: float, most: float) -> None:
    experts, width = 32, 128
    config = MoeConfig(experts, K, width, normalized=True)
    x, logits = (jax.ShapeDtypeStruct((1, tokens, size), jnp.float32) for size in (width, experts))
    kernel = jax.ShapeDtypeStruct((experts, width, width), jnp.float32)
    run = jax.jit(lambda *given: moe(config, jax.nn.silu, keep, *given))
    cost: Any = run.lower(dict.fromkeys(("gate", "up", "down"), kernel), x, logits).compile().cost_analysis()
    assert least <= cost["flops"] / (2 * 3 * width * width * K * tokens) < most


def test_half_precision_routes_in_float32() -> None:
    """The probabilities of these logits are all 1/8 in bfloat16, so that the first experts would be chosen."""
    config, x, _ = router(True, 4)
    logits = jnp.broadcast_to(jnp.linspace(0.001, 0.002, EXPERTS).astype(jnp.bfloat16), (1, 4, EXPERTS))
    half = {name: kernel.astype(jnp.bfloat16) for name, kernel in kernels().items()}
    found = moe(config, jax.nn.silu, keep, half, x.astype(jnp.bfloat16), logits)
    assert found.dtype == jnp.bfloat16
    last = jnp.broadcast_to(jnp.arange(EXPERTS - K, EXPERTS), (1, 4, K))
    expected = all_experts(jax.nn.silu, keep, kernels(), x, jnp.full((1, 4, K), 0.5), last)
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=0.03 * float(jnp.abs(expected).max()))

"""Products whose backward pass is written out: values and gradients of the plain ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.products import matmul, matmul_rows


@pytest.mark.parametrize("rows", [(3,), (2, 5), (2, 40)])  # fewer and more than the products are wide
@pytest.mark.parametrize(("width", "out"), [(4, 7), (7, 4)])
@pytest.mark.parametrize("by_rows", [False, True])
def test_gradients_are_those_of_the_plain_product(rows: tuple[int, ...], width: int, out: int, by_rows: bool) -> None:
    x = jax.random.normal(jax.random.key(0), (*rows, width))
    kernel = jax.random.normal(jax.random.key(1), (out, width) if by_rows else (width, out))
    wanted = jax.random.normal(jax.random.key(2), (*rows, out))

    def loss(product: Any, x: Any, kernel: Any) -> Any:
        return jnp.square(product(x, kernel) - wanted).sum()

    plain = (lambda x, table: x @ table.T) if by_rows else jnp.matmul
    expected = jax.value_and_grad(loss, (1, 2))(plain, x, kernel)
    found = jax.value_and_grad(loss, (1, 2))(matmul_rows if by_rows else matmul, x, kernel)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), expected, found)


@pytest.mark.parametrize("by_rows", [False, True])
def test_products_of_bfloat16_are_summed_and_returned_in_float32(by_rows: bool) -> None:
    x = jax.random.normal(jax.random.key(0), (3, 64), jnp.bfloat16)
    kernel = jax.random.normal(jax.random.key(1), (5, 64) if by_rows else (64, 5), jnp.bfloat16)

    def product(x: Any, kernel: Any) -> Any:
        return matmul_rows(x, kernel) if by_rows else matmul(x, kernel, jnp.float32)

    def plain(x: Any, kernel: Any) -> Any:
        high = kernel.astype(jnp.float32)
        return x.astype(jnp.float32) @ (high.T if by_rows else high)

    found, expected = product(x, kernel), plain(x, kernel)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    gradients = [jax.grad(lambda x, k, f=f: jnp.sin(f(x, k)).sum(), (0, 1))(x, kernel) for f in (product, plain)]
    for a, b in zip(*gradients, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0.03, atol=0.05)


@pytest.mark.parametrize("rows", [(3,), (2, 5), (2, 40)])
@pytest.mark.parametrize(("width", "out"), [(4, 7), (7, 4), (1, 3), (3, 1)])
@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "gpu"])  # the way of the one and that of all others
def test_products_of_bfloat16_are_rounded_once(
    rows: tuple[int, ...], width: int, out: int, by_rows: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    x = jax.random.normal(jax.random.key(0), (*rows, width), jnp.bfloat16)
    kernel = jax.random.normal(jax.random.key(1), (out, width) if by_rows else (width, out), jnp.bfloat16)
    product, plain = matmul_rows if by_rows else matmul, (lambda x, t: x @ t.T) if by_rows else jnp.matmul
    found, back = jax.vjp(product, x, kernel)
    exact, exact_back = jax.vjp(plain, x.astype(jnp.float32), kernel.astype(jnp.float32))
    g = jax.random.normal(jax.random.key(2), (*rows, out), jnp.bfloat16)
    assert found.dtype == (jnp.float32 if by_rows else jnp.bfloat16)
    gradients = zip(back(g.astype(found.dtype)), exact_back(g.astype(jnp.float32)), strict=True)
    half = float(jnp.finfo(jnp.bfloat16).eps) / 2
    for a, b in [(found, exact), *gradients]:
        # Half of a bfloat16's last digit, and what float32 sums differ by.
        np.testing.assert_allclose(np.float32(a), b, rtol=half, atol=1e-5)


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_product_that_is_worth_keeping_is_not_computed_again(by_rows: bool) -> None:
    """As model.remat = "dots" has it: one product forwards, two backwards."""

    def loss(x: Any, kernel: Any) -> Any:
        return jnp.sin(matmul_rows(x, kernel) if by_rows else matmul(x, kernel)).sum()

    kept = jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    given = jnp.ones((3, 4)), jnp.ones((5, 4) if by_rows else (4, 5))
    text = jax.jit(jax.value_and_grad(kept, (0, 1))).lower(*given).as_text()
    assert text.count("stablehlo.dot_general") == 3

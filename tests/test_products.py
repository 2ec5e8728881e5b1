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

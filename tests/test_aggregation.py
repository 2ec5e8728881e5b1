"""What a loss is divided by, and the value loss: known values and finite differences."""

from __future__ import annotations

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from jaxrl_llm.algorithms.aggregation import AGGREGATIONS, Norm, aggregate
from jaxrl_llm.algorithms.losses import value_loss
from tests.test_losses import SHAPE, inputs

variants: Any = chex.variants  # pyright cannot see through its decorators


class Aggregation(chex.TestCase):
    @variants(with_jit=True, without_jit=True)
    @parameterized.parameters(*AGGREGATIONS)
    def test_known_values(self, mode: str) -> None:
        x, _, _, mask = inputs()
        rows = [x[i][mask[i]] for i in (0, 1, 3)]
        expected = {
            "token-mean": np.concatenate(rows).mean(),
            "token-sum": np.concatenate(rows).sum(),
            "seq-mean-token-sum": np.mean([r.sum() for r in rows]),
            "seq-mean-token-mean": np.mean([r.mean() for r in rows]),
            "seq-mean-token-sum-norm": np.mean([r.sum() / SHAPE[1] for r in rows]),
        }[mode]
        poisoned = np.where(mask, x, np.nan)
        found = self.variant(lambda x, mask: aggregate(x, mask, mode, Norm.of(mask)))(poisoned, mask)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_constant_of_dr_grpo() -> None:
    x, mask = jnp.ones((2, 4)), jnp.ones((2, 4), bool)
    assert float(aggregate(x, mask, "seq-mean-token-sum-norm", Norm.of(mask), scale_factor=16)) == 0.25


def test_an_unknown_aggregation_names_the_nearest() -> None:
    mask = jnp.ones((1, 1), bool)
    with pytest.raises(ValueError, match="'token-men' is unknown; did you mean 'token-mean'"):
        aggregate(jnp.ones((1, 1)), mask, "token-men", Norm.of(mask))


def value_inputs() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(5)
    return (*(rng.normal(size=SHAPE) for _ in range(3)), inputs()[3])


def test_the_value_loss_is_numpys_and_its_gradient_finite_differences() -> None:
    new, old, returns, mask = value_inputs()

    def expected(new: np.ndarray) -> float:
        clipped_new = np.clip(new, old - 0.5, old + 0.5)
        return 0.5 * np.maximum((new - returns) ** 2, (clipped_new - returns) ** 2)[mask].mean()

    with jax.enable_x64(True):
        norm = Norm.of(jnp.asarray(mask))
        loss = partial(value_loss, clip=0.5)
        (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(new, old, returns, mask, norm)
    np.testing.assert_allclose(value, expected(new), rtol=1e-9)
    assert 0 < float(metrics["vf_clipfrac"]) < 1
    np.testing.assert_allclose(metrics["vpred_mean"], new[mask].mean(), rtol=1e-9)
    for at in np.ndindex(*SHAPE):
        direction = np.zeros(SHAPE)
        direction[at] = 1e-6
        slope = (expected(new + direction) - expected(new - direction)) / 2e-6
        np.testing.assert_allclose(grad[at], slope, rtol=1e-5, atol=1e-8)


def test_the_value_loss_hides_what_the_mask_hides_and_adds_up() -> None:
    new, old, returns, mask = (np.asarray(v, np.float32) if v.dtype != bool else v for v in value_inputs())
    norm = Norm.of(jnp.asarray(mask))
    loss = jax.jit(jax.value_and_grad(partial(value_loss, clip=0.5, aggregation="seq-mean-token-mean"), has_aux=True))
    whole = loss(new, old, returns, mask, norm)
    poisoned = loss(*(np.where(mask, v, np.float32(np.nan)) for v in (new, old, returns)), mask, norm)
    chex.assert_trees_all_equal(whole, poisoned)
    halves = [loss(*(v[rows] for v in (new, old, returns, mask)), norm)[0] for rows in ([0, 1], [2, 3])]
    chex.assert_trees_all_close(jax.tree.map(lambda a, b: a + b, *halves), whole[0], rtol=1e-5)

"""Masked statistics: known values, numpy's answers, and that nothing outside the mask is ever seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms import masked

variants: Any = chex.variants  # pyright cannot see through its decorators
SHAPE = (4, 6)
FLOATS = hnp.arrays(np.float32, SHAPE, elements=st.floats(-100, 100, width=32))
MASKS = hnp.arrays(np.bool_, SHAPE)
HOSTILE = (np.nan, np.inf, -np.inf, 1e38)
STATISTICS: dict[str, Callable[..., Any]] = {
    "sum": masked.masked_sum,
    "mean": masked.masked_mean,
    "var": masked.masked_var,
    "min": masked.masked_min,
    "max": masked.masked_max,
    "whiten": masked.masked_whiten,
    "to_go": lambda x, mask: masked.sum_to_go(x, mask, 0.9),
}

VALUE_AND_GRAD = {
    name: jax.jit(jax.value_and_grad(lambda x, mask, f=f: f(x, mask).sum())) for name, f in STATISTICS.items()
}


class Statistics(chex.TestCase):
    @variants(with_jit=True, without_jit=True)
    @parameterized.parameters(None, 0, 1)
    def test_numpy_agrees(self, axis: int | None) -> None:
        rng = np.random.default_rng(0)
        x, mask = rng.normal(size=SHAPE).astype(np.float32), rng.random(SHAPE) < 0.6
        mask[:, :2], mask[:2] = True, True  # at least two entries along every axis
        hidden = np.ma.array(x, mask=~mask)
        for name, expected in {
            "sum": hidden.sum(axis),
            "mean": hidden.mean(axis),
            "var": hidden.var(axis, ddof=1),
            "min": hidden.min(axis),
            "max": hidden.max(axis),
        }.items():
            statistic = self.variant(lambda x, mask, name=name: STATISTICS[name](x, mask, axis))
            np.testing.assert_allclose(statistic(x, mask), np.ma.filled(expected), rtol=1e-5, atol=1e-6, err_msg=name)

    @variants(with_jit=True, without_jit=True)
    def test_whitening(self) -> None:
        rng = np.random.default_rng(1)
        x, mask = rng.normal(3, 2, SHAPE).astype(np.float32), rng.random(SHAPE) < 0.6
        white = np.asarray(self.variant(masked.masked_whiten)(x, mask))
        np.testing.assert_allclose([white[mask].mean(), white[mask].std(ddof=1)], [0, 1], atol=1e-5)
        assert (white[~mask] == 0).all()
        kept = self.variant(lambda x, mask: masked.masked_whiten(x, mask, shift_mean=False))(x, mask)
        np.testing.assert_allclose(np.asarray(kept)[mask], white[mask] + x[mask].mean(), rtol=1e-5)


@pytest.mark.parametrize("name", STATISTICS)
def test_an_empty_mask_gives_zeros(name: str) -> None:
    x, mask = jnp.ones(SHAPE), jnp.zeros(SHAPE, bool)
    value, grad = STATISTICS[name](x, mask), jax.grad(lambda x: STATISTICS[name](x, mask).sum())(x)
    assert not np.any(value) and not np.any(grad)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whitening_fewer_than_two_tokens_gives_zeros(shift_mean: bool) -> None:
    mask = jnp.array([[True, False], [False, False]])
    assert not np.any(masked.masked_whiten(jnp.full((2, 2), 7.0), mask, shift_mean))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-8, 12345.678])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_whitening_equal_values_gives_exactly_zero(value: float, dtype: str) -> None:
    """A mean of equal numbers may round; divided by a deviation of 1e-4 that would be a signal."""
    assert not np.any(masked.masked_whiten(jnp.full((3, 7), value, dtype), jnp.ones((3, 7), bool)))


@settings(deadline=None, max_examples=25)
@given(x=FLOATS, mask=MASKS, hostile=st.sampled_from(HOSTILE))
def test_what_the_mask_hides_reaches_neither_value_nor_gradient(x: Any, mask: Any, hostile: float) -> None:
    poisoned = np.where(mask, x, hostile).astype(np.float32)
    for name, both in VALUE_AND_GRAD.items():
        for clean, dirty in zip(both(x, mask), both(poisoned, mask), strict=True):
            np.testing.assert_array_equal(clean, dirty, err_msg=name)
        assert not np.any(np.asarray(both(poisoned, mask)[1])[~mask]), name


@settings(deadline=None, max_examples=25)
@given(
    uid=hnp.arrays(np.int32, 8, elements=st.sampled_from([-5, 0, 3, 2**31 - 1])),
    x=hnp.arrays(np.float32, 8, elements=st.floats(-10, 10, width=32)),
    valid=hnp.arrays(np.bool_, 8),
)
def test_group_statistics_are_those_of_a_loop(uid: Any, x: Any, valid: Any) -> None:
    stats = masked.group_stats(jnp.asarray(np.where(valid, x, np.nan)), jnp.asarray(uid), jnp.asarray(valid))
    leads, second = masked.group_lead(jnp.asarray(x), jnp.asarray(uid), jnp.asarray(valid))
    for row in range(8):
        group = x[valid & (uid == uid[row])]
        assert stats.count[row] == len(group)
        assert bool(stats.flat[row]) == (len(set(group.tolist())) < 2)
        expected = (group.mean() if len(group) else 0, group.std(ddof=1) if len(group) > 1 else 0)
        np.testing.assert_allclose((stats.mean[row], stats.std[row]), expected, rtol=1e-4, atol=1e-5)
        ordered = np.sort(group)[::-1]
        assert bool(leads[row]) == bool(valid[row] and x[row] == ordered[0] and (ordered == ordered[0]).sum() == 1)
        if len(group) > 1:
            assert second[row] == ordered[1]


def test_group_statistics_of_a_flat_group_have_a_finite_gradient() -> None:
    uid, valid = jnp.array([1, 1, 2]), jnp.ones(3, bool)
    grad = jax.grad(lambda x: masked.group_stats(x, uid, valid).std.sum())(jnp.array([0.5, 0.5, 7.0]))
    assert not np.any(grad)


def test_group_ids_are_dense_for_any_integers() -> None:
    dense = masked.group_ids(jnp.array([2**31 - 1, -7, 2**31 - 1, 5]))
    assert dense.tolist() == [2, 0, 2, 1]


def test_sums_to_go_skip_what_is_masked() -> None:
    x, mask = jnp.array([[1.0, 100.0, 2.0, 4.0]]), jnp.array([[True, False, True, True]])
    assert masked.sum_to_go(x, mask, 0.5).tolist() == [[1 + 0.5 * (2 + 0.5 * 4), 0.0, 4.0, 4.0]]


def test_float64_is_kept() -> None:
    with jax.enable_x64(True):
        x, mask = jnp.ones(SHAPE, jnp.float64), jnp.ones(SHAPE, bool)
        for name, statistic in STATISTICS.items():
            assert statistic(x, mask).dtype == jnp.float64, name

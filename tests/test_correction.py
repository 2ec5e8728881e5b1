"""Rollout correction: weights, rejection and metrics of the mismatch between sampler and scorer."""

from __future__ import annotations

from functools import partial
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

from jaxrl_llm.algorithms.correction import RS_KINDS, Bounds, is_bounds, rollout_correction, rs_bounds

variants: Any = chex.variants  # pyright cannot see through its decorators
SHAPE = (4, 5)
MASK: Any = np.arange(5)[None, :] < np.array([5, 3, 0, 4])[:, None]
RNG = np.random.default_rng(0)
ROLLOUT: Any = np.log(RNG.uniform(0.1, 0.9, SHAPE)).astype(np.float32)
OLD: Any = (ROLLOUT + RNG.normal(0, 0.6, SHAPE)).astype(np.float32)
RATIO = np.where(MASK, np.exp(OLD - ROLLOUT), 0)
ROW_RATIO = np.where(MASK, np.exp(np.where(MASK, OLD - ROLLOUT, 0).sum(-1, keepdims=True)), 0)
EVERYTHING = {
    "rollout_is": "sequence",
    "rollout_is_threshold": "0.5_2.0",
    "rollout_is_batch_normalize": True,
    "rollout_rs": "token_k1,seq_mean_k3,seq_max_k2",
    "rollout_rs_threshold": "0.3_3.0,0.5,1.0",
}


class Weights(chex.TestCase):
    @variants(with_jit=True, without_jit=True)
    @parameterized.parameters(("token", RATIO), ("sequence", ROW_RATIO))
    def test_truncated_or_zeroed(self, level: str, raw: np.ndarray) -> None:
        correct = partial(rollout_correction, rollout_is=level)
        truncated = self.variant(partial(correct, rollout_is_threshold=1.3))(OLD, ROLLOUT, MASK)
        np.testing.assert_allclose(truncated.weights, np.minimum(raw, 1.3), rtol=1e-5)
        bounded = self.variant(partial(correct, rollout_is_threshold="0.8_1.3"))(OLD, ROLLOUT, MASK)
        inside = (raw >= 0.8) & (raw <= 1.3)
        np.testing.assert_allclose(bounded.weights, np.where(inside, raw, 0), rtol=1e-5)
        np.testing.assert_array_equal(bounded.mask, MASK)
        outside = MASK & ~inside
        oob = bounded.metrics["rollout_corr/rollout_is_oob_ratio"]
        np.testing.assert_allclose(oob, outside.sum() / MASK.sum(), rtol=1e-5)

    @variants(with_jit=True, without_jit=True)
    def test_normalized_over_the_batch(self) -> None:
        for level in ("token", "sequence"):
            found = self.variant(partial(rollout_correction, rollout_is=level, rollout_is_batch_normalize=True))(
                OLD, ROLLOUT, MASK
            )
            weights = np.asarray(found.weights)
            rows = [weights[i][MASK[i]] for i in (0, 1, 3)]
            mean = np.concatenate(rows).mean() if level == "token" else np.mean([row.mean() for row in rows])
            np.testing.assert_allclose(mean, 1, rtol=1e-5)


def test_weights_that_are_all_zero_stay_zero() -> None:
    found = rollout_correction(
        OLD, ROLLOUT - 5, MASK, rollout_is="token", rollout_is_threshold="0.5_2.0", rollout_is_batch_normalize=True
    )
    assert not np.any(found.weights) and all(np.isfinite(value) for value in found.metrics.values())


def statistic(level: str, k: str) -> np.ndarray:
    d = OLD.astype(np.float64) - ROLLOUT
    tokens = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}[k]
    if level == "token":
        return tokens
    out = np.zeros(SHAPE)
    for row in (0, 1, 3):
        out[row] = {"seq_sum": np.sum, "seq_mean": np.mean, "seq_max": np.max}[level](tokens[row][MASK[row]])
    return out


@pytest.mark.parametrize("kind", RS_KINDS)
def test_every_kind_of_rejection(kind: str) -> None:
    level, _, k = kind.rpartition("_")
    values = statistic(level, k)
    middle = float(np.median(values[MASK]))
    threshold = f"0.01_{np.exp(middle + 1e-4):.6f}" if k == "k1" else middle + 1e-4
    found = rollout_correction(OLD, ROLLOUT, MASK, rollout_rs=kind, rollout_rs_threshold=threshold)
    kept = MASK & (values <= middle + 1e-4)
    np.testing.assert_array_equal(found.mask, kept)
    assert 0 < kept.sum() < MASK.sum() and found.weights is None
    name = f"rollout_corr/rollout_rs_{kind}"
    rejected = 1 - kept.sum() / MASK.sum()
    np.testing.assert_allclose(found.metrics[f"{name}_masked_fraction"], rejected, rtol=1e-5)
    np.testing.assert_allclose(found.metrics[f"{name}_mean"], values[MASK].mean(), rtol=1e-4, atol=1e-6)
    rows = np.mean([not kept[row][MASK[row]].all() for row in (0, 1, 3)])
    np.testing.assert_allclose(found.metrics["rollout_corr/rollout_rs_seq_masked_fraction"], rows, rtol=1e-5)


def test_k1_is_bounded_on_both_sides() -> None:
    found = rollout_correction(OLD, ROLLOUT, MASK, rollout_rs="token_k1", rollout_rs_threshold="0.7_1.4")
    inverse = np.where(MASK, np.exp(ROLLOUT - OLD), 1)
    np.testing.assert_array_equal(found.mask, MASK & (inverse >= 0.7) & (inverse <= 1.4))
    assert float(found.metrics["rollout_corr/rollout_rs_token_k1_fraction_low"]) > 0


def test_what_one_kind_rejects_is_rejected() -> None:
    both = rollout_correction(OLD, ROLLOUT, MASK, rollout_rs="token_k2,seq_mean_k3", rollout_rs_threshold="0.1,0.15")
    single = [
        rollout_correction(OLD, ROLLOUT, MASK, rollout_rs=kind, rollout_rs_threshold=threshold).mask
        for kind, threshold in (("token_k2", 0.1), ("seq_mean_k3", 0.15))
    ]
    np.testing.assert_array_equal(both.mask, single[0] & single[1])
    assert (single[0] != single[1]).any()


def test_a_sampler_that_is_the_scorer_changes_nothing() -> None:
    found = rollout_correction(OLD, OLD, MASK, **EVERYTHING)
    np.testing.assert_array_equal(found.mask, MASK)
    np.testing.assert_array_equal(found.weights, MASK.astype(np.float32))
    zero = ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "rollout_rs_masked_fraction")
    assert not any(float(found.metrics[f"rollout_corr/{name}"]) for name in zero)
    assert float(found.metrics["rollout_corr/rollout_is_eff_sample_size"]) == pytest.approx(1)
    assert float(found.metrics["rollout_corr/ppl_ratio"]) == 1


def test_perplexity_is_the_mean_over_rows() -> None:
    metrics = rollout_correction(OLD, ROLLOUT, MASK).metrics
    rows = [-OLD[row][MASK[row]].mean() for row in (0, 1, 3)]
    np.testing.assert_allclose(metrics["rollout_corr/training_ppl"], np.exp(rows).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["rollout_corr/kl"], (ROLLOUT - OLD)[MASK].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["rollout_corr/chi2_token"], (RATIO[MASK] ** 2).mean() - 1, rtol=1e-5)


CORRECT = jax.jit(partial(rollout_correction, **EVERYTHING))


@settings(deadline=None, max_examples=20)
@given(mask=hnp.arrays(np.bool_, SHAPE), hostile=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_what_the_mask_hides_is_not_seen(mask: Any, hostile: float) -> None:
    poisoned = (np.where(mask, x, np.float32(hostile)) for x in (OLD, ROLLOUT))
    clean, dirty = CORRECT(OLD, ROLLOUT, mask), CORRECT(*poisoned, mask)
    chex.assert_trees_all_equal(clean, dirty)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(dirty))
    assert not np.any(np.asarray(dirty.weights)[~mask]) and not (np.asarray(dirty.mask) & ~mask).any()


def test_extreme_ratios_stay_finite() -> None:
    far = np.where(MASK, np.float32(200.0), 0)
    for rollout in (OLD + far, OLD - far):
        found = rollout_correction(OLD, rollout, MASK, **EVERYTHING)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_nothing_carries_a_gradient() -> None:
    def total(old: Any) -> Any:
        found = rollout_correction(old, ROLLOUT, MASK, **EVERYTHING)
        assert found.weights is not None
        return found.weights.sum() + sum(found.metrics.values())

    assert not np.any(jax.grad(total)(jnp.asarray(OLD)))


def test_float64_is_kept() -> None:
    with jax.enable_x64(True):
        found = rollout_correction(OLD.astype(np.float64), ROLLOUT.astype(np.float64), MASK, rollout_is="token")
        assert found.weights is not None and found.weights.dtype == jnp.float64


def test_none_in_words_is_none() -> None:
    found = rollout_correction(OLD, ROLLOUT, MASK, rollout_is="none", rollout_rs="none", rollout_rs_threshold=0.0)
    assert found.weights is None and (np.asarray(found.mask) == MASK).all()


def test_thresholds() -> None:
    assert is_bounds("2.0") == is_bounds(2) == Bounds(None, 2.0)
    assert rs_bounds("token_k2,token_k3", 0.5) == dict.fromkeys(("token_k2", "token_k3"), Bounds(None, 0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_is": "tokens"}, "'tokens' is unknown; did you mean 'token'"),
        ({"rollout_is": "token", "rollout_is_threshold": -1.0}, "must be above 0"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_1"}, "low at most high"),
        ({"rollout_is": "token", "rollout_is_threshold": "abc"}, 'expected a number above 0 or "low_high"'),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, "'token_k4' is unknown; did you mean 'token_k"),
        ({"rollout_rs": ","}, "names no kind"),
        ({"rollout_rs": "token_k1"}, "needs rollout_rs_threshold"),
        ({"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "1,2"}, "2 bounds for 3 kinds"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2_0.5"}, "low at most high"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, "takes an upper bound alone"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rollout_correction(OLD, ROLLOUT, MASK, **options)

"""Advantage estimators: known values, plain loops, and the properties that hold for all of them."""

from __future__ import annotations

from functools import cache
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

from jaxrl_llm.algorithms.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    Estimator,
    adaptive_kl_update,
    gae,
    kl_in_reward,
)

variants: Any = chex.variants  # pyright cannot see through its decorators
ROWS, WIDTH = 8, 5
GROUP = [name for name, estimator in ESTIMATORS.items() if estimator.group]
WHITENED = ("reinforce_plus_plus_baseline", "gdpo")
CENTERED = ("grpo", "rloo")  # advantages of a group sum to 0 over its rows
SCORES = hnp.arrays(np.float32, ROWS, elements=st.floats(-10, 10, width=32))
LENGTHS = hnp.arrays(np.int64, ROWS, elements=st.integers(0, WIDTH))
UID = np.array([7, 7, 9, 9, 7, 9, 7, 9], np.int32)


def evidence(scores: Any, lengths: Any, uid: Any = UID, *, seed: int = 0, dtype: str = "float32") -> Any:
    """`AdvantageInputs`: rows with their score on the last token, and random evidence for the rest."""
    rng = np.random.default_rng(seed)
    mask = np.arange(WIDTH)[None, :] < np.asarray(lengths)[:, None]
    last = np.arange(WIDTH)[None, :] == np.asarray(lengths)[:, None] - 1
    pi = rng.uniform(0.1, 0.9, mask.shape)
    arrays = {
        "rewards": np.where(last, np.asarray(scores)[:, None], 0),
        "values": rng.normal(size=mask.shape),
        "scores": np.asarray(scores)[:, None],
        "reward_baselines": rng.normal(size=len(mask)),
        "old_log_probs": np.log(pi),
        "sum_pi_squared": pi**2 + rng.uniform(0, 0.1, mask.shape),
        "rollout_is_weights": rng.uniform(0.5, 2, mask.shape),
    }
    floats = {name: jnp.asarray(value.astype(dtype)) for name, value in arrays.items()}
    return AdvantageInputs(mask=jnp.asarray(mask), uid=jnp.asarray(uid), **floats)


@cache
def jitted(name: str) -> Any:
    return jax.jit(ESTIMATORS[name])


def loop_gae(x: AdvantageInputs, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    rewards, values, mask = (np.asarray(v, np.float64) for v in (x.rewards, x.values, x.mask))
    advantages = np.zeros_like(rewards)
    for row in range(len(rewards)):
        tokens = np.flatnonzero(mask[row])
        following, accumulated = 0.0, 0.0
        for t in tokens[::-1]:
            accumulated = rewards[row, t] + gamma * following - values[row, t] + gamma * lam * accumulated
            following = values[row, t]
            advantages[row, t] = accumulated
    return advantages, np.where(mask > 0, advantages + values, 0)


class Gae(chex.TestCase):
    @variants(with_jit=True, without_jit=True)
    @parameterized.parameters((1.0, 1.0), (0.9, 0.95), (0.99, 0.0), (0.0, 0.5))
    def test_equals_a_plain_loop(self, gamma: float, lam: float) -> None:
        x = evidence(np.arange(8.0) - 3, [5, 1, 3, 0, 2, 5, 4, 2])
        x = x._replace(mask=x.mask & (jax.random.uniform(jax.random.key(0), x.mask.shape) < 0.7))  # tool output
        found = self.variant(lambda x: gae(x.rewards, x.mask, x.values, gamma=gamma, lam=lam, whiten=False))(x)
        chex.assert_trees_all_close(found, loop_gae(x, gamma, lam), rtol=1e-5, atol=1e-6)


def test_gae_with_lambda_1_is_return_minus_value_and_with_0_one_step() -> None:
    x = evidence(np.arange(8.0), [5, 1, 3, 2, 2, 5, 4, 2])
    one, returns = gae(x.rewards, x.mask, x.values, lam=1.0, whiten=False)
    expected = np.where(x.mask, np.arange(8.0)[:, None], 0)  # gamma 1: the score, on every token
    np.testing.assert_allclose(returns, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(one, np.where(x.mask, expected - x.values, 0), rtol=1e-5, atol=1e-5)
    zero, _ = gae(x.rewards, x.mask, x.values, lam=0.0, whiten=False)
    following = np.pad(np.where(x.mask, x.values, 0), ((0, 0), (0, 1)))[:, 1:]
    np.testing.assert_allclose(zero, np.where(x.mask, x.rewards + following - x.values, 0), rtol=1e-5, atol=1e-5)


def test_gae_of_shifted_scores_is_shifted_and_whitened_the_same() -> None:
    lengths = [5, 1, 3, 2, 2, 5, 4, 2]
    x, shifted = evidence(np.arange(8.0), lengths), evidence(np.arange(8.0) + 3, lengths)
    raw, raw_shifted = (gae(e.rewards, e.mask, e.values, whiten=False) for e in (x, shifted))
    for before, after in zip(raw, raw_shifted, strict=True):
        np.testing.assert_allclose(after, np.where(x.mask, before + 3, 0), rtol=1e-5, atol=1e-5)
    white, white_shifted = (gae(e.rewards, e.mask, e.values)[0] for e in (x, shifted))
    np.testing.assert_allclose(white, white_shifted, atol=1e-5)


def test_gae_whitens_the_advantages_and_never_the_returns() -> None:
    x = evidence(np.arange(8.0), [5] * 8)
    (white, returns), (raw, raw_returns) = (gae(x.rewards, x.mask, x.values, whiten=w) for w in (True, False))
    np.testing.assert_array_equal(returns, raw_returns)
    np.testing.assert_allclose([white.mean(), white.std(ddof=1)], [0, 1], atol=1e-5)
    np.testing.assert_allclose(white, (raw - raw.mean()) / raw.std(ddof=1), rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(scores=SCORES, lengths=LENGTHS)
def test_group_advantages_sum_to_zero(scores: Any, lengths: Any) -> None:
    x = evidence(scores, lengths)
    for name in CENTERED:
        row = np.asarray(jitted(name)(x)[0])[:, 0]  # one number on every token, and every row with tokens has the first
        for uid in (7, 9):
            assert abs(row[uid == UID].sum()) < 1e-3 * (1 + np.abs(row).max()), name


@settings(deadline=None, max_examples=25)
@given(scores=SCORES, lengths=LENGTHS, order=st.permutations(range(ROWS)))
def test_row_order_and_the_names_of_groups_do_not_matter(scores: Any, lengths: Any, order: list[int]) -> None:
    x = evidence(scores, lengths)
    renamed = np.where(UID == 7, 2**31 - 1, -3).astype(np.int32)
    permuted = jax.tree.map(lambda v: v[np.array(order)], x._replace(uid=jnp.asarray(renamed)))
    for name in ESTIMATORS:
        expected = jax.tree.map(lambda v: v[np.array(order)], jitted(name)(x))
        chex.assert_trees_all_close(jitted(name)(permuted), expected, rtol=1e-3, atol=1e-4, custom_message=name)


@settings(deadline=None, max_examples=25)
@given(
    # Scores on a grid, so that no two of them differ by rounding alone.
    scores=hnp.arrays(np.int64, ROWS, elements=st.integers(-8, 8)),
    lengths=LENGTHS,
    factor=st.sampled_from([0.25, 2.0, 1024.0]),
    shift=st.sampled_from([-4.0, 0.0, 8.0]),
)
def test_affine_changes_of_the_reward(scores: Any, lengths: Any, factor: float, shift: float) -> None:
    """Scaled by the group's deviation nothing changes; unscaled the factor comes through, and a shift never does."""
    x, changed = evidence(scores, lengths), evidence(scores * factor + shift, lengths)
    for name, expected in {
        "grpo": 1.0,
        "reinforce_plus_plus_baseline": 1.0,
        "gdpo": 1.0,
        "rloo": factor,
        "opo": factor,
    }.items():
        before, after = (np.asarray(jitted(name)(e)[0]) for e in (x, changed))
        np.testing.assert_allclose(after, before * expected, rtol=2e-3, atol=1e-3 * expected, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", GROUP)
def test_equal_rewards_give_exactly_zero(name: str, dtype: str) -> None:
    """In groups of three and seven, where the mean of equal numbers rounds away from them."""
    lengths, uid = [5, 1, 3, 2, 2, 5, 4, 2, 1, 5], np.array([7, 7, 9, 9, 7, 9, 9, 9, 9, 9], np.int32)
    with jax.enable_x64(dtype == "float64"):
        for value in (0.0, 0.1, -1 / 3, 0.7, 1e-3, 12345.678 if dtype != "float16" else 123.4):
            x = evidence(np.full(10, value), lengths, uid, dtype=dtype)
            advantages, _ = jitted(name)(x)
            assert not np.any(advantages) and advantages.dtype == dtype, value


@pytest.mark.parametrize("name", GROUP)
def test_a_group_of_one_gives_zero(name: str) -> None:
    lengths = np.array([5, 1, 3, 2, 2, 5, 4, 2])
    uid = np.array([1, 7, 9, 9, 7, 9, 7, 9], np.int32)
    advantages, _ = jitted(name)(evidence(np.arange(8.0), lengths, uid))
    assert not np.any(advantages[0]) and np.any(advantages[1:])
    lengths[4], lengths[6] = 0, 0  # and one whose siblings have no tokens
    advantages, _ = jitted(name)(evidence(np.arange(8.0), lengths, uid))
    assert not np.any(advantages[1])


@settings(deadline=None, max_examples=15)
@given(scores=SCORES, lengths=LENGTHS, hostile=st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_what_the_mask_hides_reaches_neither_value_nor_gradient(scores: Any, lengths: Any, hostile: float) -> None:
    x = evidence(scores, lengths)
    hidden = ~np.asarray(x.mask)

    def poison(value: Any) -> Any:
        where = (
            hidden
            if value.ndim == 2 and value.shape[1] == WIDTH
            else hidden.all(-1).reshape(-1, *[1] * (value.ndim - 1))
        )
        return jnp.where(where, hostile, value)

    floats = [name for name in x._fields if name not in ("mask", "uid")]
    poisoned = x._replace(**{name: poison(getattr(x, name)) for name in floats})
    for name in ESTIMATORS:
        clean, dirty = gradients(name)(x), gradients(name)(poisoned)
        chex.assert_trees_all_equal(clean, dirty, custom_message=name)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(dirty)), name


@cache
def gradients(name: str) -> Any:
    """(value, gradient with respect to the rewards) of the sum of squares of all that an estimator returns."""

    def total(rewards: Any, x: AdvantageInputs) -> Any:
        return sum(jnp.square(v).sum() for v in ESTIMATORS[name](x._replace(rewards=rewards)))

    return jax.jit(lambda x: jax.value_and_grad(total)(x.rewards, x))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_rows_without_tokens_are_in_no_statistic(name: str) -> None:
    lengths = np.array([5, 0, 3, 2, 2, 5, 0, 2])
    with_rows, kept = evidence(np.arange(8.0), lengths), lengths > 0
    without = jax.tree.map(lambda v: v[kept], with_rows)
    found = jax.tree.map(lambda v: v[kept], jitted(name)(with_rows))
    chex.assert_trees_all_close(found, jitted(name)(without), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nothing_outside_the_mask(name: str) -> None:
    x = evidence(np.arange(8.0), [5, 1, 3, 2, 2, 5, 4, 2])
    for value in jitted(name)(x):
        assert not np.any(np.asarray(value)[~np.asarray(x.mask)])


@pytest.mark.parametrize("name", ["gae", "grpo", "gdpo", "tir_optimal_token_baseline"])
def test_vmap_over_batches_is_a_loop(name: str) -> None:
    batches = [evidence(np.arange(8.0) * k, [5, 1, 3, 2, 2, 5, 4, 2], seed=k) for k in (1, 2)]
    stacked = jax.tree.map(lambda *v: jnp.stack(v), *batches)
    found = jax.jit(jax.vmap(ESTIMATORS[name]))(stacked)
    for k, batch in enumerate(batches):
        chex.assert_trees_all_close(jax.tree.map(lambda v, k=k: v[k], found), jitted(name)(batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_float64_is_kept(name: str) -> None:
    with jax.enable_x64(True):
        found = jitted(name)(evidence(np.arange(8.0), [5, 1, 3, 2, 2, 5, 4, 2], dtype="float64"))
        assert all(value.dtype == jnp.float64 for value in found)


def row(name: str, scores: list[float], **options: Any) -> list[float]:
    """The advantages of one group's rows, all of length 1."""
    x = evidence(scores, [1] * len(scores), np.full(len(scores), 3, np.int32))
    return np.asarray(ESTIMATORS[name](x, **options)[0][:, 0], np.float64).round(4).tolist()


def test_known_values() -> None:
    assert row("grpo", [1.0, 0.0, 0.0, 0.0], epsilon=0.0) == [1.5, -0.5, -0.5, -0.5]
    assert row("grpo", [1.0, 0.0, 0.0, 0.0], scale="none") == [0.75, -0.25, -0.25, -0.25]
    assert row("rloo", [1.0, 0.0, 0.0, 0.0]) == [1.0, -0.3333, -0.3333, -0.3333]
    assert row("gpg", [1.0, 0.0, 0.0, 0.0]) == [3.0, -1.0, -1.0, -1.0]
    assert row("gpg", [1.0, 0.0, 0.0, 0.0], f_norm=2.0) == [1.5, -0.5, -0.5, -0.5]
    assert row("grpo_passk", [5.0, 3.0, 0.0, 0.0], norm_by_std=False) == [2.0, 0.0, 0.0, 0.0]
    assert row("grpo_passk", [5.0, 5.0, 0.0, 0.0], norm_by_std=False) == [0.0, 0.0, 0.0, 0.0]


def test_grpo_can_be_scaled_by_the_whole_batch() -> None:
    x = evidence(np.array([1, 0, 4, 0, 1, 0, 0, 0.0]), [1] * 8)
    advantages = np.asarray(ESTIMATORS["grpo"](x, scale="batch", epsilon=0.0)[0][:, 0])
    scores = np.array([1, 0, 4, 0, 1, 0, 0, 0.0])
    mean = np.where(UID == 7, scores[UID == 7].mean(), scores[UID == 9].mean())
    np.testing.assert_allclose(advantages, (scores - mean) / scores.std(ddof=1), rtol=1e-5)


def test_the_scale_of_grpo_is_checked() -> None:
    with pytest.raises(ValueError, match="'groups' is unknown; did you mean 'group'"):
        row("grpo", [1.0, 0.0, 0.0, 0.0], scale="groups")


def test_opo_weighs_its_baseline_by_length() -> None:
    x = evidence([3.0, 0.0], [1, 4], np.array([1, 1], np.int32))
    advantages = ESTIMATORS["opo"](x)[0]
    np.testing.assert_allclose([advantages[0, 0], advantages[1, 0]], [3 - 0.6, -0.6], rtol=1e-6)


def test_remax_compares_to_the_greedy_response() -> None:
    x = evidence([3.0, 0.0], [2, 1], np.array([1, 2], np.int32))
    advantages, returns = ESTIMATORS["remax"](x._replace(reward_baselines=jnp.array([1.0, 0.5])))
    assert advantages[:, :2].tolist() == [[2.0, 2.0], [-0.5, 0.0]]
    assert returns[:, :2].tolist() == [[3.0, 3.0], [0.0, 0.0]]


def test_gdpo_weighs_rewards_after_normalizing_each() -> None:
    """A reward a thousand times larger says no more than a small one; a weight of 0 silences it."""
    x = evidence(np.zeros(4), [1] * 4, np.full(4, 1, np.int32))
    small, large = np.array([1.0, 0.0, 0.0, 1.0]), 1000 * np.array([0.0, 1.0, 0.0, 1.0])
    scores = jnp.asarray(np.stack([small, large], 1), jnp.float32)
    both = ESTIMATORS["gdpo"](x._replace(scores=scores), weights=(1.0, 1.0))[0][:, 0]
    np.testing.assert_allclose(both[0], both[1], atol=1e-3)
    one = ESTIMATORS["gdpo"](x._replace(scores=scores), weights=(1.0, 0.0))[0][:, 0]
    alone = ESTIMATORS["gdpo"](x._replace(scores=scores.at[:, 1].set(7.0)), weights=(1.0, 1.0))[0][:, 0]
    np.testing.assert_allclose(one, alone, rtol=1e-5)
    with pytest.raises(ValueError, match="3 weights for 2 rewards"):
        ESTIMATORS["gdpo"](x._replace(scores=scores), weights=(1.0, 1.0, 1.0))


def test_the_optimal_token_baseline_is_the_weighted_mean_of_returns() -> None:
    scores = np.array([1.0, 0.0, 2.0, 5.0])
    x = evidence(scores, [2, 2, 2, 2], np.full(4, 5, np.int32))
    pi, squares = np.exp(np.asarray(x.old_log_probs)), np.asarray(x.sum_pi_squared)
    weights = np.cumsum(np.where(x.mask, (1 - 2 * pi + squares) * np.asarray(x.rollout_is_weights) ** 2, 0), 1)[:, :2]
    returns = scores[:, None]
    expected = returns - (weights * returns).sum(0) / weights.sum(0)
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        np.testing.assert_allclose(jitted(name)(x)[0][:, :2], expected, rtol=1e-4, atol=1e-5)


def test_the_tail_of_the_longest_response_has_no_baseline_or_itself() -> None:
    x = evidence([1.0, 0.0], [4, 2], np.full(2, 5, np.int32))
    with_tail, without = (ESTIMATORS["optimal_token_baseline"](x, handle_zero_tail=flag)[0] for flag in (True, False))
    assert with_tail[0, 2:4].tolist() == [1.0, 1.0]
    np.testing.assert_allclose(without[0, 2:4], 0, atol=1e-6)
    np.testing.assert_array_equal(with_tail[:, :2], without[:, :2])


def test_the_registry_says_what_each_estimator_needs() -> None:
    needs = {name: set(e.needs) for name, e in ESTIMATORS.items()}
    assert needs["gae"] == {"values"} and needs["grpo"] == {"uid"} and needs["remax"] == {"reward_baselines"}
    assert needs["gdpo"] == {"uid", "scores"} and needs["reinforce_plus_plus"] == set()
    assert needs["optimal_token_baseline"] == {"uid", "old_log_probs", "sum_pi_squared"}
    assert ESTIMATORS["optimal_token_baseline"].uses == ("rollout_is_weights",)
    assert set(GROUP) == set(ESTIMATORS) - {"gae", "reinforce_plus_plus", "remax"}
    with pytest.raises(ValueError, match="estimator 'gae' needs 'values', which is None"):
        ESTIMATORS["gae"](evidence(np.zeros(8), [1] * 8)._replace(values=None))


def test_a_function_of_ones_own_is_an_estimator() -> None:
    def scaled(rewards: Any, mask: Any, values: Any, *, factor: float = 2.0) -> Any:
        return factor * (rewards - values) * mask, rewards

    own = Estimator.of(scaled)
    x = evidence(np.arange(8.0), [1] * 8)
    assert own.needs == ("values",) and own.options == {"factor": 2.0} and not own.group
    np.testing.assert_array_equal(own(x, factor=3.0)[0], 3 * (x.rewards - x.values) * x.mask)

    def wrong(rewards: Any, mask: Any, value: Any) -> Any:
        return rewards, mask, value

    with pytest.raises(TypeError, match="'value' is no evidence; did you mean 'values'"):
        Estimator.of(wrong)


def test_kl_in_the_reward() -> None:
    x = evidence(np.arange(8.0), [5, 1, 3, 0, 2, 5, 4, 2])
    ref = x.old_log_probs - 0.5
    poisoned = jnp.where(x.mask, ref, jnp.nan)
    rewards, kl = kl_in_reward(x.rewards, x.old_log_probs, poisoned, x.mask, coef=0.1, kind="k1")
    np.testing.assert_allclose(rewards, x.rewards - 0.05 * x.mask, rtol=1e-5, atol=1e-6)
    assert float(kl) == pytest.approx(0.5)


def test_the_adaptive_coefficient_steers_to_its_target() -> None:
    def coef(kl: float) -> float:
        return float(adaptive_kl_update(0.1, kl, target=0.2, horizon=1000, n_rows=100))

    assert coef(0.2) == pytest.approx(0.1)
    assert coef(0.21) == pytest.approx(0.1 * (1 + 0.05 * 0.1), rel=1e-5)
    assert coef(5.0) == pytest.approx(0.1 * 1.02) and coef(0.0) == pytest.approx(0.1 * 0.98)

"""Metrics: known values by hand, and that rows which do not count, do not count."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import metrics
from jaxrl_llm.types import FINISH_LENGTH, FINISH_STOP, Batch, MissingEvidence


def make_batch() -> Batch:
    """Two prompts, two responses each: lengths 1 to 3 of 3; the last row's reward failed."""
    length = jnp.array([3, 1, 2, 3], jnp.int32)
    mask = jnp.arange(3)[None, :] < length[:, None]
    scores = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [jnp.nan, jnp.nan]])
    last = (jnp.arange(3)[None, :] == length[:, None] - 1).astype(jnp.float32)
    values = jnp.array([[0.0, 1.0, 2.0], [3.0, 9.0, 9.0], [4.0, 5.0, 9.0], [jnp.nan, 0.0, 0.0]])
    return Batch(
        prompts=jnp.zeros((2, 4), jnp.int32),
        prompt_mask=jnp.array([[False, True, True, True], [True, True, True, True]]),
        prompt_valid=jnp.array([True, True]),
        record_arrays={},
        uid=jnp.array([7, 7, 9, 9], jnp.int32),
        responses=jnp.zeros((4, 3), jnp.int32),
        response_mask=mask,
        response_length=length,
        rollout_log_probs=jnp.log(jnp.full((4, 3), 0.5)),
        finish_reason=jnp.array([FINISH_LENGTH, FINISH_STOP, FINISH_STOP, FINISH_LENGTH], jnp.int32),
        scores=scores,
        scores_mask=jnp.ones((4, 2), bool).at[0, 1].set(False),  # the first response's format is nobody's business
        loss_mask=mask.at[3].set(False),
        row_valid=jnp.array([True, True, True, False]),
        token_level_scores=last * jnp.array([1.0, 0.0, 2.0, jnp.nan])[:, None],
        old_log_probs=jnp.log(jnp.array([[0.5, 0.6, 0.5], [0.7, 0.1, 0.1], [0.5, 0.5, 0.1], [0.1, 0.1, 0.1]])),
        entropys=jnp.ones((4, 3)),
        values=values,
        token_level_rewards=last * jnp.array([0.5, 0.0, 2.0, jnp.nan])[:, None],
        advantages=jnp.array([[1.0, 2.0, 3.0], [-3.0, 99.0, 99.0], [0.0, 0.0, 99.0], [jnp.inf, 1.0, 1.0]]),
        returns=values,
    )


def described(batch: Batch) -> dict[str, float]:
    found = jax.jit(lambda b: metrics.data_metrics(b, use_critic=True, reward_names=("exact", "format")))(batch)
    assert all(value.shape == () for value in found.values())
    return {name: float(value) for name, value in found.items()}


def test_data_metrics_by_hand():
    found = described(make_batch())
    expected = {
        "critic/score/mean": 1.0,
        "critic/score/max": 2.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": 2.5 / 3,
        "critic/advantages/mean": 0.5,
        "critic/advantages/max": 3.0,
        "critic/advantages/min": -3.0,
        "critic/values/mean": 15 / 6,
        "critic/returns/max": 5.0,
        "critic/vf_explained_var": 1.0,
        "prompt_length/mean": 10 / 3,
        "prompt_length/clip_ratio": 1 / 3,
        "response_length/mean": 2.0,
        "response_length/clip_ratio": 1 / 3,
        "response_length_terminated/mean": 1.5,
        "response_length_terminated/max": 2.0,
        "response/truncated_ratio": 1 / 3,
        "response/aborted_ratio": 0.0,
        "reward/failed_ratio": 0.25,
        "reward_std": np.std([1.0, 0.0], ddof=1) / 2,
        "frac_reward_zero_std": 0.5,
        "rewards/exact/mean": 2 / 3,
        "rewards/exact/std": np.std([0, 1, 1], ddof=1),
        "rewards/format/mean": 1.0,
        "rewards/format/std": 0.0,
        "actor/entropy": 1.0,
        "training/rollout_probs_diff_max": 0.2,
        "training/rollout_probs_diff_mean": 0.3 / 6,
        "training/rollout_actor_probs_pearson_corr": 0.0,  # the sampler's are constant
        "perf/total_num_tokens": 3 + 3 + 4 + 4 + 9,
        "perf/response_tokens": 9,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_lengths_by_the_sign_of_the_advantage():
    found = described(make_batch())  # advantages 2, -3, 0 on responses of 3, 1 and 2 tokens; the fourth has failed
    assert found["response_length_positive_advantage/mean"] == 3
    assert found["response_length_negative_advantage/mean"] == 1
    assert found["response_length/advantage_corr"] == pytest.approx(1.0, abs=1e-6)  # of the two that teach something


def test_metrics_are_finite_whatever_an_invalid_row_holds():
    batch = make_batch()
    assert all(np.isfinite(value) for value in described(batch).values())
    other = jax.tree.map(lambda x: x, batch)
    for name in ("advantages", "returns", "values", "token_level_scores", "token_level_rewards", "old_log_probs"):
        other = dataclasses.replace(other, **{name: getattr(other, name).at[3].set(-123.0)})
    assert described(other) == described(batch)


def test_filler_prompts_cost_nothing():
    batch = dataclasses.replace(make_batch(), prompt_valid=jnp.array([True, False]))
    batch = dataclasses.replace(batch, row_valid=jnp.array([True, True, False, False]))
    found = described(batch)
    assert found["perf/total_num_tokens"] == 3 + 3 + 4
    assert found["reward/failed_ratio"] == 0.0
    assert found["frac_reward_zero_std"] == 0.0


def test_nothing_valid_gives_zeros():
    batch = make_batch()
    found = described(
        dataclasses.replace(batch, row_valid=jnp.zeros(4, bool), loss_mask=jnp.zeros_like(batch.response_mask))
    )
    assert found.pop("reward/failed_ratio") == 1.0
    assert found.pop("critic/vf_explained_var") == 1.0
    left = {name: value for name, value in found.items() if not name.startswith("perf/")}
    assert set(left.values()) == {0.0}


def test_missing_evidence_is_named():
    batch = dataclasses.replace(make_batch(), advantages=None)
    with pytest.raises(MissingEvidence, match="'advantages'"):
        metrics.data_metrics(batch, use_critic=False)
    assert "critic/values/mean" not in metrics.data_metrics(make_batch(), use_critic=False)


def test_explained_variance_of_a_constant_critic_is_zero():
    returns = jnp.array([[1.0, 2.0, 4.0]])
    mask = jnp.ones((1, 3), bool)
    zeros = jnp.zeros((1, 3))
    found = metrics.sequence_metrics(
        token_level_scores=zeros,
        token_level_rewards=zeros,
        advantages=zeros,
        returns=returns,
        values=jnp.full((1, 3), 7.0),
        mask=mask,
        row_valid=jnp.ones(1, bool),
    )
    assert float(found["critic/vf_explained_var"]) == pytest.approx(0.0, abs=1e-5)


def test_response_that_ends_on_the_last_slot_is_not_truncated():
    length, valid = jnp.array([4, 4], jnp.int32), jnp.ones(2, bool)
    endings = metrics.ending_metrics(length, jnp.array([FINISH_STOP, FINISH_LENGTH]), valid)
    lengths = metrics.length_metrics(length, length, valid, 8, 4)
    assert float(endings["response/truncated_ratio"]) == 0.5
    assert float(endings["response_length_terminated/mean"]) == 4.0
    assert float(lengths["response_length/clip_ratio"]) == 1.0


def test_equal_scores_that_round_differently_have_no_spread():
    scores = jnp.full((1, 3), 0.1)
    found = metrics.group_metrics(scores, jnp.ones((1, 3), bool))
    assert (float(found["reward_std"]), float(found["frac_reward_zero_std"])) == (0.0, 1.0)


def test_correlation_of_equal_probabilities_is_one():
    log_probs = jnp.log(jnp.array([[0.1, 0.5, 0.9, jnp.nan]]))
    mask = jnp.array([[True, True, True, False]])
    found = metrics.prob_diff_metrics(log_probs, log_probs, mask)
    assert float(found["training/rollout_actor_probs_pearson_corr"]) == pytest.approx(1.0)
    assert float(found["training/rollout_probs_diff_max"]) == 0.0
    assert int(found["training/rollout_probs_diff_valid"]) == 1


def test_variance_proxy_by_hand():
    mask = jnp.array([[True, True], [True, False], [False, False]])
    found = metrics.variance_power(
        advantages=jnp.array([[1.0, 3.0], [1.0, jnp.nan], [5.0, 5.0]]),
        old_log_probs=jnp.log(jnp.array([[0.5, 0.25], [0.5, jnp.nan], [0.1, 0.1]])),
        sum_pi_squared=jnp.array([[0.5, 0.5], [1.0, jnp.nan], [1.0, 1.0]]),
        mask=mask,
    )
    found |= metrics.variance_proxy(found | {"actor/grad_norm": jnp.array(1.0)})
    assert metrics.variance_proxy({"actor/grad_norm": 1.0}) == {}  # nothing was measured
    # W: 1 − 1 + .5 + 1 − .5 + .5 = 1.5 and 1 − 1 + 1 = 1; Ā²: 4 and 1; power (6 + 1) / 2
    expected = {"proxy2_total_power": 3.5, "expected_w": 1.25, "expected_a_squared": 2.5, "proxy3_pure_noise": 2.5}
    assert {k: float(found[f"variance_proxy/{k}"]) for k in expected} == pytest.approx(expected)


def test_timing():
    found = metrics.timing_metrics(
        {"gen": 2.0, "ref": 1.0, "reward": 3.0, "step": 8.0}, total_tokens=400, response_tokens=100, n_devices=2
    )
    assert found == {
        "timing_s/gen": 2.0,
        "timing_s/ref": 1.0,
        "timing_s/reward": 3.0,
        "timing_s/step": 8.0,
        "timing_per_token_ms/gen": 20.0,
        "timing_per_token_ms/ref": 2.5,
        "perf/tokens_per_sec/gen": 50.0,
        "perf/tokens_per_sec/ref": 400.0,
        "perf/time_per_step": 8.0,
        "perf/throughput": 25.0,
    }
    # What few steps have does not make them look slow.
    whole = {"step": 8.0, "testing": 3.0, "save_checkpoint": 1.0}
    found = metrics.timing_metrics(whole, total_tokens=400, response_tokens=100, n_devices=2)
    assert [found[f"perf/{name}"] for name in ("time_per_step", "throughput")] == [4.0, 50.0]
    assert metrics.timing_metrics({"gen": 1.0}, total_tokens=0, response_tokens=0, n_devices=1) == {"timing_s/gen": 1.0}


def test_extras():
    rows = [{"parsed": True, "len": 3, "why": "text", "huge": 10**400}, {"parsed": False, "len": float("nan")}, None]
    assert metrics.extras_metrics(rows) == {"reward_extra/parsed/mean": 0.5, "reward_extra/len/mean": 3.0}

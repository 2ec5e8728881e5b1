"""What the phases make of odd rows: failed, filler, empty, endless, padded, non-finite; of rows computed in parts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.losses import POLICY_LOSSES, Norm, top_entropy_mask, vanilla
from jaxrl_llm.config import need_critic
from jaxrl_llm.steps.objectives import make_actor_loss
from jaxrl_llm.steps.phases import Program, make_program
from jaxrl_llm.steps.reward import write_scores
from jaxrl_llm.steps.rollout import no_stop_rules
from jaxrl_llm.steps.scoring import score_tokens
from jaxrl_llm.steps.step import prefixed
from jaxrl_llm.types import FINISH_LENGTH, FINISH_STOP, Batch, RunState, check_batch
from tests import tiny, tiny_folder

B, N, R = 16, 4, 8
EOS = 0  # which is also what stands after a response, and before a prompt
# Adam with a large eps moves a parameter by about its gradient, so that equal updates mean equal gradients.
SMOOTH = {"optimizer__lr": 1.0, "optimizer__eps": 1.0, "optimizer__weight_decay": 0.0}
GRPO = {**SMOOTH, "actor__use_kl_loss": True, "actor__kl_loss_coef": 0.1}
PPO = {
    **SMOOTH,
    "algorithm__estimator": "gae",
    "algorithm__lam": 0.9,
    "algorithm__use_kl_in_reward": True,
    "algorithm__kl_ctrl__kl_coef": 0.1,
    "algorithm__kl_ctrl__type": "adaptive",
    "algorithm__rollout_correction__rollout_is": "token",
    "algorithm__mask_truncated": True,
    "actor__mini_batch_size": 2,
    "actor__entropy_coeff": 0.01,
    "critic__mini_batch_size": 2,
    "critic__optimizer__lr": 1.0,
    "critic__optimizer__eps": 1.0,
}


@pytest.fixture(scope="module", autouse=True)
def _compile_once() -> Iterator[None]:
    with tiny_folder.compile_once():
        yield


@functools.cache
def program(**overrides: Any) -> Program:
    config = tiny.config(**overrides)
    critic = tiny.model(value_head=True) if need_critic(config) else None
    return make_program(config, tiny.model(), critic, reward_names=("score",))


@functools.cache
def start(p: Program) -> RunState:
    return p.init(
        tiny.params(), tiny.params(50, value_head=True) if p.critic else None, tiny.params(8) if p.ref else None
    )


@functools.cache
def sampled() -> Batch:
    """Responses of many lengths: some end by EOS, among them one at its first token, and some never do."""
    p = program()
    params = dict(tiny.params())
    params["embed"] = params["embed"].at[EOS].multiply(3.0)
    stops = no_stop_rules(tiny.VOCAB).replace(ids=jnp.array([EOS, 3, 5, 7, 11], jnp.int32))
    batch = jax.jit(p.gen)(params, tiny.prompts(), jax.random.key(4), stops)
    check_batch(batch, n=N, vocab_size=tiny.VOCAB)
    lengths, reasons = np.asarray(batch.response_length), np.asarray(batch.finish_reason)
    assert {1, R} <= set(lengths) and {FINISH_STOP, FINISH_LENGTH} == set(reasons) and len(set(lengths)) > 3
    assert (np.asarray(batch.responses)[np.arange(B), lengths - 1][reasons == FINISH_STOP] == EOS).any()
    return batch


SCORES = np.random.default_rng(0).normal(size=B).astype(np.float32)


@functools.cache
def learner(p: Program) -> Any:
    """learn(state, batch, scores [B], valid [B], spoiled [B, R], extra [B]) -> (batch, metrics, state), for one update.

    Where `spoiled`, whatever a model says of a token is replaced by NaN. `extra` is added to the advantages.
    """

    def learn(state: RunState, batch: Batch, scores: Any, valid: Any, spoiled: Any, extra: Any) -> Any:
        def spoil(batch: Batch, *names: str) -> Batch:
            return batch.replace(**{name: nan_where(spoiled, getattr(batch, name)) for name in names})

        batch = write_scores(batch, scores[:, None], valid, weights=(1.0,))
        if p.old_log_prob:
            batch = spoil(p.old_log_prob(state.actor.params, batch), "old_log_probs", "entropys")
        if p.ref:
            batch = spoil(p.ref(state.reference, batch), "ref_log_prob")
        if p.values and state.critic:
            batch = spoil(p.values(state.critic.params, batch), "values")
        batch, kl_coef, metrics = p.adv(batch, state.kl_coef)
        batch = batch.replace(advantages=batch.advantages + extra[:, None])
        key, critic = jax.random.key(5), state.critic
        if p.critic and critic:
            critic, found = p.critic.update(critic, batch.select(p.critic.order(key)[0]), key)
            metrics |= prefixed("critic", found)
        actor, found = p.actor.update(state.actor, batch.select(p.actor.order(key)[0]), key)
        metrics |= prefixed("actor", found)
        return batch, metrics, state.replace(actor=actor, critic=critic, kl_coef=kl_coef)

    return jax.jit(learn)


def learn(p: Program, batch: Batch, *, state: RunState | None = None, scores: Any = SCORES, **given: Any) -> Any:
    usual = {"valid": np.ones(B, bool), "spoiled": np.zeros((B, R), bool), "extra": np.zeros(B, np.float32)}
    everything = {**usual, **given}
    return learner(p)(state or start(p), batch, jnp.asarray(scores), *map(jnp.asarray, everything.values()))


def nan_where(where: Any, x: Any) -> Any:
    return jnp.where(where, jnp.nan, x)


def equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


# Contents that must not matter, bit for bit

FAILED = np.isin(np.arange(B), [1, 6, 7, 8])
COUNTED = ("perf/response_tokens", "perf/total_num_tokens")  # they tell what was computed, valid or not


@pytest.mark.parametrize("overrides", [GRPO, pytest.param(PPO, marks=pytest.mark.long)], ids=["grpo", "ppo"])
def test_nothing_in_a_failed_row_matters(overrides: dict[str, Any]) -> None:
    """Its tokens, its length, NaN as its score and as whatever the models say of it."""
    p, clean, rng = program(**overrides), sampled(), np.random.default_rng(1)
    lengths = np.where(FAILED, rng.integers(0, R + 1, B), clean.response_length).astype(np.int32)
    mask = np.arange(R)[None] < lengths[:, None]
    junk = clean.replace(
        responses=jnp.where(FAILED[:, None], rng.integers(0, tiny.VOCAB, (B, R)), clean.responses).astype(jnp.int32),
        response_length=jnp.asarray(lengths),
        response_mask=jnp.asarray(mask),
        rollout_log_probs=nan_where(FAILED[:, None], clean.rollout_log_probs),
        finish_reason=jnp.where(FAILED, 3 - clean.finish_reason, clean.finish_reason),
    )
    before = learn(p, clean, valid=~FAILED)
    scores = np.where(FAILED, [np.nan, np.inf] * (B // 2), SCORES).astype(np.float32)
    spoiled = np.broadcast_to(FAILED[:, None], (B, R))
    after = learn(p, junk, scores=scores, valid=~FAILED, spoiled=spoiled)
    for name in ("advantages", "returns", "loss_mask", "token_level_rewards", "token_level_scores", "scores"):
        equal(getattr(before[0], name)[~FAILED], getattr(after[0], name)[~FAILED])
    assert not after[0].loss_mask[FAILED].any()
    equal(*({name: value for name, value in m.items() if name not in COUNTED} for m in (before[1], after[1])))
    equal(before[2], after[2])
    assert differ(before[2].actor.params, start(p).actor.params)


def differ(a: Any, b: Any) -> bool:
    return any((x != y).any() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("overrides", [GRPO, PPO], ids=["grpo", "ppo"])
def test_nothing_outside_the_masks_matters(overrides: dict[str, Any]) -> None:
    p, clean, rng = program(**overrides), sampled(), np.random.default_rng(2)
    prompts, responses = (rng.integers(0, tiny.VOCAB, x.shape) for x in (clean.prompts, clean.responses))
    junk = clean.replace(
        prompts=jnp.where(clean.prompt_mask, clean.prompts, prompts).astype(jnp.int32),
        responses=jnp.where(clean.response_mask, clean.responses, responses).astype(jnp.int32),
        rollout_log_probs=nan_where(~clean.response_mask, clean.rollout_log_probs),
    )
    assert differ(junk.prompts, clean.prompts) and differ(junk.responses, clean.responses)
    before, after = learn(p, clean), learn(p, junk, spoiled=~clean.response_mask)
    for name in ("advantages", "returns", "loss_mask", "token_level_rewards", "token_level_scores"):
        equal(getattr(before[0], name), getattr(after[0], name))
    equal(before[1:], after[1:])


@pytest.mark.parametrize("overrides", [GRPO, PPO], ids=["grpo", "ppo"])
def test_nothing_in_a_filler_prompt_matters(overrides: dict[str, Any]) -> None:
    p, rng = program(**overrides), np.random.default_rng(3)
    filler = np.arange(4) == 2
    rows = np.repeat(filler, N)
    clean = sampled().replace(prompt_valid=jnp.asarray(~filler))
    junk = clean.replace(
        prompts=jnp.where(filler[:, None], rng.integers(0, tiny.VOCAB, (4, 6)), clean.prompts).astype(jnp.int32),
        responses=jnp.where(rows[:, None], rng.integers(0, tiny.VOCAB, (B, R)), clean.responses).astype(jnp.int32),
    )
    before = learn(p, clean)
    after = learn(p, junk, scores=np.where(rows, np.nan, SCORES), spoiled=np.broadcast_to(rows[:, None], (B, R)))
    equal(before[1:], after[1:])
    assert after[1]["reward/failed_ratio"] == 0 and not after[0].loss_mask[rows].any()


# Failed rows and their groups


def test_failed_rows_are_counted_and_left_out_of_their_groups() -> None:
    valid = np.ones((4, N), bool)
    valid[0, 1] = valid[1, 1:] = valid[2] = False  # one row failed, one row left, none left
    batch, metrics, _ = learn(program(**GRPO), sampled(), valid=valid.ravel())
    assert metrics["reward/failed_ratio"] == 8 / B
    scores, expected = SCORES.reshape(4, N), np.zeros((4, N))
    for group in (0, 3):
        own = scores[group, valid[group]]
        expected[group, valid[group]] = (own - own.mean()) / (own.std(ddof=1) + 1e-6)
    on_tokens = np.where(batch.response_mask, expected.reshape(B, 1), 0)
    np.testing.assert_allclose(batch.advantages, on_tokens, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(batch.loss_mask, batch.response_mask & valid.reshape(B, 1))
    np.testing.assert_allclose(metrics["critic/score/mean"], scores[valid].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["critic/score/max"], scores[valid].max(), rtol=1e-6)
    np.testing.assert_allclose(metrics["rewards/score/mean"], scores[valid].mean(), rtol=1e-5)
    loss = -(on_tokens * np.asarray(batch.loss_mask)).sum() / np.asarray(batch.loss_mask).sum()
    np.testing.assert_allclose(metrics["actor/pg_loss"], loss, rtol=1e-4, atol=1e-6)


def test_nothing_valid_moves_nothing() -> None:
    p = program(**GRPO)
    _, metrics, state = learn(p, sampled(), valid=np.zeros(B, bool), scores=np.full(B, np.nan))
    equal(state.actor.params, start(p).actor.params)
    assert metrics["reward/failed_ratio"] == 1 and metrics["critic/score/mean"] == metrics["actor/pg_loss"] == 0
    assert all(np.isfinite(value) for value in metrics.values())


# Non-finite gradients


def test_an_update_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    p = program(**PPO)
    first, batch, good = start(p), sampled(), SCORES
    in_mini_batch = N * int(p.actor.order(jax.random.key(5))[0, 0])
    bad = np.where(np.arange(B) == in_mini_batch, np.inf, good)
    _, metrics, once = learn(p, batch, scores=bad)
    _, _, twice = learn(p, batch, scores=bad, state=once.replace(kl_coef=first.kl_coef))
    for role in ("actor", "critic"):
        assert metrics[f"{role}/skipped_updates"] == 1
        before, skipped = getattr(first, role), getattr(twice, role)
        equal((skipped.params, skipped.opt_state), (before.params, before.opt_state))
        assert (int(skipped.updates), int(skipped.skipped)) == (0, 2)
    _, metrics, after = learn(p, batch, state=twice.replace(kl_coef=first.kl_coef))
    _, _, expected = learn(p, batch)
    equal(after, expected)  # as if nothing had been: `skipped` too is 0 again
    assert metrics["actor/skipped_updates"] == 0 and int(after.actor.updates) == 1


def test_infinite_advantages_change_nothing() -> None:
    p = program(**GRPO)
    _, metrics, state = learn(p, sampled(), extra=np.where(np.arange(B) == 3, np.inf, 0).astype(np.float32))
    equal((state.actor.params, state.actor.opt_state), (start(p).actor.params, start(p).actor.opt_state))
    assert (int(state.actor.updates), int(state.actor.skipped)) == (0, 1) and metrics["actor/skipped_updates"] == 1


# Rows computed in parts


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (GRPO, {"actor__micro_batch_size": 2, "trainer__score_micro_batch_size": 8}),
        pytest.param(
            PPO,
            {"actor__micro_batch_size": 4, "critic__micro_batch_size": 2, "model__scan_layers": False},
            marks=pytest.mark.long,
        ),
    ],
    ids=["grpo", "ppo-and-unrolled"],
)
def test_micro_batches_and_unrolled_layers_give_the_same_update(overrides: dict[str, Any], parts: Any) -> None:
    """Micro-batches of whole groups, and of parts of them."""
    whole, split = program(**overrides), program(**overrides, **parts)
    valid = np.arange(B) != 5
    _, expected_metrics, expected = learn(whole, sampled(), valid=valid)
    _, metrics, state = learn(split, sampled(), valid=valid, state=start(whole))
    for role in ("actor", "critic") if whole.critic else ("actor",):
        before = getattr(start(whole), role).params
        moved = max(float(jnp.abs(a - b).max()) for a, b in both(before, getattr(expected, role).params))
        assert moved > 1e-3  # there is something to compare
        for a, b in both(getattr(expected, role), getattr(state, role)):
            np.testing.assert_allclose(a, b, atol=1e-5)
    for name, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=2e-5, err_msg=name)


def both(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    return zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)


# Responses of every kind, by hand

LENGTHS = np.array([1, R, 0, 3, 2, 5, R, 1, 0, 0, 0, 0, 4, 4, 4, 4], np.int32)
ENDS = np.array([1, 2, 2, 1, 1, 1, 2, 1, 2, 2, 2, 2, 1, 1, 1, 1], np.int32)
BY_HAND = np.array([1.0, 3.0, 100.0, 5.0, 0.1, 0.1, 0.1, 0.1, 7.0, 8.0, 9.0, 10.0, 0.0, 0.0, 1.0, 1.0], np.float32)


def by_hand() -> Batch:
    """Group 0: EOS at once, endless, empty, ended. 1: equal scores. 2: empty. 3: ended. Prompt 0 fills its frame."""
    mask = np.arange(R)[None] < LENGTHS[:, None]
    ids = np.random.default_rng(5).integers(1, tiny.VOCAB, (B, R))
    ids[np.arange(R)[None] == np.where(ENDS == FINISH_STOP, LENGTHS - 1, -1)[:, None]] = EOS
    prompts = tiny.prompts()
    assert prompts.prompt_mask[0].all() and not prompts.prompt_mask.all()
    batch = Batch(
        prompts=prompts.prompts,
        prompt_mask=prompts.prompt_mask,
        prompt_valid=prompts.prompt_valid,
        record_arrays={},
        uid=jnp.repeat(prompts.uid, N),
        responses=jnp.asarray(np.where(mask, ids, EOS), jnp.int32),
        response_mask=jnp.asarray(mask),
        response_length=jnp.asarray(LENGTHS),
        rollout_log_probs=jnp.zeros((B, R)),
        finish_reason=jnp.asarray(ENDS),
    )
    check_batch(batch, n=N, vocab_size=tiny.VOCAB)
    return batch


def test_responses_of_every_kind() -> None:
    batch, metrics, state = learn(program(**GRPO), by_hand(), scores=BY_HAND)
    on_last = np.zeros((B, R), np.float32)
    for row, length in enumerate(LENGTHS):
        if length:  # an empty response has no token that could bear its score
            on_last[row, length - 1] = BY_HAND[row]
    np.testing.assert_array_equal(batch.token_level_scores, on_last)
    np.testing.assert_array_equal(batch.loss_mask, batch.response_mask)
    np.testing.assert_array_equal(batch.response_mask.sum(1), LENGTHS)
    # The empty row's 100 is in no group: 1, 3, 5 have mean 3 and deviation 2. Halves and quarters: 0, 0, 1, 1.
    third = 0.5 / (np.sqrt(1 / 3) + 1e-6)
    expected = np.array([-1, 0, 0, 1, *[0] * 8, -third, -third, third, third])
    np.testing.assert_allclose(batch.advantages, np.where(batch.response_mask, expected[:, None], 0), atol=2e-6)
    assert (batch.advantages[4:8] == 0).all()
    with_tokens = LENGTHS > 0
    np.testing.assert_allclose(metrics["critic/score/mean"], BY_HAND[with_tokens].mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["response/aborted_ratio"], np.mean(~with_tokens))
    np.testing.assert_allclose(metrics["response_length/mean"], LENGTHS.mean())
    np.testing.assert_allclose(metrics["response/truncated_ratio"], np.mean(ENDS == FINISH_LENGTH))
    np.testing.assert_allclose(metrics["actor/pg_loss"], -(expected * LENGTHS).sum() / LENGTHS.sum(), atol=1e-6)
    assert metrics["actor/skipped_updates"] == 0 and int(state.actor.updates) == 1


def test_whitened_rewards_have_the_scale_of_the_batch() -> None:
    p, plain = program(**GRPO, algorithm__whiten_rewards=True, algorithm__scale="none"), program(**GRPO)
    scored = write_scores(by_hand(), jnp.asarray(BY_HAND)[:, None], jnp.ones(B, bool), weights=(1.0,))
    found, _, metrics = jax.jit(p.adv)(scored, jnp.float32(0))
    _, _, before = jax.jit(plain.adv)(scored, jnp.float32(0))
    rewards, mask = np.asarray(scored.token_level_scores), np.asarray(scored.response_mask)
    np.testing.assert_allclose(found.token_level_rewards, rewards / rewards[mask].std(ddof=1), rtol=1e-5)
    assert metrics["critic/score/mean"] == before["critic/score/mean"]  # what is reported as the score is not touched
    flat = write_scores(by_hand(), jnp.zeros((B, 1)), jnp.ones(B, bool), weights=(1.0,))
    assert (jax.jit(p.adv)(flat, jnp.float32(0))[0].token_level_rewards == 0).all()


def test_the_policy_loss_of_the_tokens_of_highest_entropy() -> None:
    """Their loss over the denominators of all tokens; entropy and KL stay those of all."""
    batch, _, state = learn(program(**GRPO), by_hand(), scores=BY_HAND)
    assert batch.advantages is not None and batch.loss_mask is not None
    scoring = {"temperature": 1.0, "chunk_tokens": 64}
    loss = {"aggregation": "token-mean", "scale_factor": 8.0, "entropy_coeff": 0.1, **scoring}
    key, norm = jax.random.key(0), Norm.of(batch.loss_mask)
    model, params = tiny.model(), state.actor.params
    found, metrics = jax.jit(make_actor_loss(model, POLICY_LOSSES["vanilla"], top_entropy_quantile=0.25, **loss))(
        params, batch, norm, key
    )
    _, of_all = jax.jit(make_actor_loss(model, POLICY_LOSSES["vanilla"], **loss))(params, batch, norm, key)
    stats = jax.jit(lambda p, b: score_tokens(model, p, b, **scoring))(params, batch)
    assert stats.entropys is not None
    chosen = top_entropy_mask(stats.entropys, batch.loss_mask, 0.25)
    assert 0 < chosen.sum() < 0.3 * batch.loss_mask.sum()
    old = stats.log_probs if batch.old_log_probs is None else batch.old_log_probs
    expected, _ = vanilla(stats.log_probs, old, batch.advantages, chosen, norm)
    np.testing.assert_allclose(metrics["pg_loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["entropy"], of_all["entropy"], rtol=1e-6)
    np.testing.assert_allclose(found, expected - 0.1 * of_all["entropy"], rtol=1e-5)


def test_truncated_rows_count_in_their_group_but_not_in_the_loss() -> None:
    p = program(**GRPO, algorithm__mask_truncated=True)
    batch = by_hand()
    scored = write_scores(batch, jnp.asarray(BY_HAND)[:, None], jnp.ones(B, bool), weights=(1.0,))
    masked, _, metrics = jax.jit(p.adv)(scored, jnp.float32(0))
    np.testing.assert_array_equal(masked.loss_mask.any(1), (ENDS == FINISH_STOP) & (LENGTHS > 0))
    np.testing.assert_allclose(masked.advantages[0, 0], -1, atol=1e-5)  # against the mean of 1, 3 and 5
    np.testing.assert_allclose(metrics["critic/score/max"], 5)


def test_a_jax_reward_fails_by_not_being_finite_and_scores_its_own_rows_alone() -> None:
    batch = by_hand()
    host = np.full((B, 2), 0.5, np.float32)
    host[:, 1] = np.where(np.arange(B) % 2, np.nan, 0)  # NaN: another data_source's row

    def by_row(responses: Any, mask: Any, records: Any) -> Any:
        return jnp.where(jnp.arange(B) == 4, jnp.nan, jnp.where(jnp.arange(B) == 5, jnp.inf, 3.0))

    def by_token(responses: Any, mask: Any, records: Any) -> Any:
        return jnp.where(mask, by_row(responses, mask, records)[:, None], jnp.nan)

    for function, factor in ((by_row, 1), (by_token, LENGTHS)):
        scored = write_scores(
            batch, jnp.asarray(host), jnp.arange(B) != 6, weights=(1.0, 2.0), jax_rewards={1: function}
        )
        assert scored.row_valid is not None and scored.token_level_scores is not None
        valid = ~np.isin(np.arange(B), [4, 6])  # row 5 is not its own
        np.testing.assert_array_equal(scored.row_valid, valid)
        np.testing.assert_array_equal(
            scored.scores, np.stack([0.5 * valid, valid * (np.arange(B) % 2 == 0) * 3 * factor], 1)
        )
        total = np.where(LENGTHS > 0, 0.5 * valid + 2 * valid * (np.arange(B) % 2 == 0) * 3 * factor, 0)
        np.testing.assert_allclose(scored.token_level_scores.sum(1), total, rtol=1e-6)


def test_greedy_scores_are_the_baselines_and_a_failed_one_fails_its_prompt() -> None:
    batch, n_prompts = by_hand(), B // N
    greedy = batch.select(jnp.arange(n_prompts)).regroup(N)
    one_each = jax.tree.map(lambda x: x[::N] if x.shape[0] == B else x, greedy)
    given = jnp.array([3.0, 5.0, 7.0, 9.0])[:, None]
    scored = write_scores(one_each, given, jnp.arange(n_prompts) != 1, weights=(0.5,))
    found = write_scores(batch, jnp.ones((B, 1)), jnp.ones(B, bool), weights=(0.5,), greedy=scored)
    expected = np.where(LENGTHS[::N] > 0, [1.5, 0, 3.5, 4.5], 0)
    np.testing.assert_array_equal(found.reward_baselines, np.repeat(expected, N))
    np.testing.assert_array_equal(found.row_valid, np.repeat(np.arange(n_prompts) != 1, N))


def test_the_last_of_its_own_tokens_bears_the_score() -> None:
    """Tool output after it does not."""
    mask = jnp.zeros((B, R), bool).at[0, jnp.array([0, 1, 4])].set(True)
    batch = by_hand().replace(response_mask=mask, response_length=jnp.full(B, 7, jnp.int32))
    scored = write_scores(batch, jnp.full((B, 1), 2.0), jnp.ones(B, bool), weights=(0.5,))
    assert scored.token_level_scores is not None
    np.testing.assert_array_equal(scored.token_level_scores, jnp.zeros((B, R)).at[0, 4].set(1.0))

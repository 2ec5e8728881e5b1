"""The whole step as one pure function."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import ESTIMATORS
from jaxrl_llm.algorithms.losses import POLICY_LOSSES
from jaxrl_llm.steps.phases import Program, make_program
from jaxrl_llm.steps.reference import sync_reference
from jaxrl_llm.steps.step import make_step, score_rows, step_key
from jaxrl_llm.types import EvidenceExists, MissingEvidence, RunState
from tests import tiny


@functools.cache
def program(**overrides: Any) -> Program:
    config = tiny.config(**overrides)
    critic = tiny.model(value_head=True) if config.algorithm.estimator == "gae" else None
    return make_program(config, tiny.model(), critic)


def start(p: Program, seed: int = 0) -> RunState:
    critic = tiny.params(seed + 50, value_head=True) if p.critic else None
    return jax.jit(p.init)(tiny.params(seed), critic)


@functools.cache
def compiled(p: Program) -> Any:
    return jax.jit(make_step(p, tiny.even_tokens))


# Adam takes a whole step even where a gradient is nothing but rounding; a larger eps than usual keeps it from that.
STEADY = {"optimizer__eps": 1e-4}
GRPO = {"actor__use_kl_loss": True}
PPO = {
    "algorithm__estimator": "gae",
    "algorithm__use_kl_in_reward": True,
    "algorithm__kl_ctrl__type": "adaptive",
    "actor__mini_batch_size": 2,
    "actor__epochs": 2,
    "critic__mini_batch_size": 2,
}


@pytest.mark.parametrize("overrides", [GRPO, pytest.param(PPO, marks=pytest.mark.long)], ids=["grpo", "ppo"])
def test_a_few_steps_raise_the_reward(overrides: dict[str, Any]) -> None:
    p = program(**overrides, rollout__n=8)
    step = compiled(p)
    state, scores = start(p), []
    for i in range(12):
        state, metrics, batch = step(state, tiny.prompts(seed=i), step_key(0, i))
        scores.append(float(metrics["critic/score/mean"]))
        for name in ("advantages", "returns", "loss_mask", "row_valid", "token_level_rewards"):
            assert getattr(batch, name) is not None
    assert np.mean(scores[-3:]) > np.mean(scores[:3]) + 0.15, scores
    assert int(state.step) == 12


@pytest.mark.long
def test_vmapped_over_seeds_equals_single_runs() -> None:
    p = program(**STEADY)
    step = make_step(p, tiny.even_tokens)
    states = [start(p, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *states)
    keys = jnp.stack([step_key(seed, 0) for seed in range(3)])
    many, metrics, batches = jax.jit(jax.vmap(step, (0, None, 0)))(stacked, tiny.prompts(), keys)
    one = compiled(p)
    for seed in range(3):
        state, single, batch = one(states[seed], tiny.prompts(), keys[seed])
        np.testing.assert_array_equal(batches.responses[seed], batch.responses)
        jax.tree.map(
            lambda a, b, seed=seed: np.testing.assert_allclose(a[seed], b, atol=2e-6),
            many.actor.params,
            state.actor.params,
        )
        np.testing.assert_allclose(metrics["actor/pg_loss"][seed], single["actor/pg_loss"], atol=1e-6)


@pytest.mark.long
def test_scanned_over_steps_equals_a_loop() -> None:
    p = program()
    step = make_step(p, tiny.even_tokens)
    prompts, first = tiny.prompts(), start(p)

    def body(state: RunState, key: Any) -> tuple[RunState, Any]:
        state, metrics, _ = step(state, prompts, key)
        return state, metrics["critic/score/mean"]

    keys = jnp.stack([step_key(0, i) for i in range(3)])
    scanned, scores = jax.jit(lambda s: jax.lax.scan(body, s, keys))(first)
    state, jitted = first, compiled(p)
    for i in range(3):
        state, metrics, _ = jitted(state, prompts, keys[i])
        np.testing.assert_allclose(scores[i], metrics["critic/score/mean"], atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), scanned.actor.params, state.actor.params)


def test_the_first_update_has_ratio_one() -> None:
    """Old and new are the same policy in the first mini-batch of the first epoch: no clip, no KL."""
    p = program(actor__mini_batch_size=2)
    state = start(p)
    assert p.old_log_prob is not None
    old_log_prob = p.old_log_prob

    @jax.jit
    def first_update(state: RunState) -> Any:
        batch = p.gen(p.update_weights(state.actor.params), tiny.prompts(), jax.random.key(3), p.stops)
        batch = old_log_prob(state.actor.params, score_rows(batch, tiny.even_tokens))
        batch, _, _ = p.adv(batch, state.kl_coef)
        return p.actor.update(state.actor, batch.select(jnp.array([1, 3])), jax.random.key(0))[1]

    metrics = first_update(state)
    assert metrics["pg_clipfrac"] == 0 and metrics["pg_clipfrac_lower"] == 0
    np.testing.assert_allclose(metrics["ppo_kl"], 0, atol=1e-6)


def test_one_update_needs_no_old_pass_and_gives_the_same_gradient() -> None:
    """With one epoch and one mini-batch, old log-probs held constant are the pass that is saved."""
    once = program()
    assert once.old_log_prob is None
    state, prompts, key = start(once), tiny.prompts(), step_key(0, 0)
    saved, _, _ = compiled(once)(state, prompts, key)
    bypass = program(algorithm__rollout_correction__bypass=True)
    passed, _, _ = compiled(bypass)(state, prompts, key)
    # rollout log-probs equal the scorer's up to rounding, so bypass and the saved pass must agree closely.
    for a, b in zip(jax.tree.leaves(saved.actor.opt_state), jax.tree.leaves(passed.actor.opt_state), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_the_reference_and_its_kl() -> None:
    """It stays as it was for two steps, is the actor then, and stays that."""
    p = program(actor__use_kl_loss=True, actor__kl_loss_coef=0.1, reference__sync_steps=2)
    states, kls = [start(p)], []
    step = compiled(p)
    for i in range(3):
        state, metrics, _ = step(states[-1], tiny.prompts(), step_key(0, i))
        states.append(state)
        kls.append(float(metrics["actor/kl_loss"]))
    assert abs(kls[0]) < 1e-6 < 1e-4 < kls[1] and abs(kls[2]) < 1e-6
    references = [jax.tree.map(np.asarray, state.reference) for state in states]
    expected = [states[0].actor.params] * 2 + [states[2].actor.params] * 2
    jax.tree.map(np.testing.assert_array_equal, references, jax.tree.map(np.asarray, expected))
    actor, reference = (jax.tree.leaves(tree) for tree in (states[2].actor.params, states[2].reference))
    shared = {x.unsafe_buffer_pointer() for x in actor} & {x.unsafe_buffer_pointer() for x in reference}
    assert not shared, "a donated actor would take the reference with it"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_reference_that_follows_the_actor(dtype: Any) -> None:
    reference, actor = ({"a": jnp.array(x, dtype)} for x in ([1.0, -2.0, 300.0], [3.0, 2.0, 301.0]))
    move = jax.jit(functools.partial(sync_reference, every=3, alpha=0.25))
    for step, expected in ((1, [1.0, -2.0, 300.0]), (3, [1.5, -1.0, 300.25]), (4, [1.0, -2.0, 300.0])):
        found = move(reference, actor, step)["a"]
        np.testing.assert_array_equal(found, jnp.array(expected, dtype))
        assert found.dtype == dtype
    copied = jax.jit(functools.partial(sync_reference, every=1, alpha=1.0))(reference, actor, 1)
    np.testing.assert_array_equal(copied["a"], actor["a"])
    assert copied["a"].unsafe_buffer_pointer() != actor["a"].unsafe_buffer_pointer()
    # An infinite reference is left behind, and not multiplied by 0.
    lost = {"a": jnp.full(3, jnp.inf, dtype)}
    assert jnp.isfinite(sync_reference(lost, actor, 1, every=1, alpha=1.0)["a"]).all()


@pytest.mark.long
def test_a_critic_does_not_change_what_grpo_does_to_the_actor() -> None:
    """But for the last bits: they are two programs, whose sums the compiler may order in two ways."""
    plain = program(**STEADY)
    config = tiny.config(critic__enable="yes", **STEADY)
    with_critic = make_program(config, tiny.model(), tiny.model(value_head=True))
    critic = tiny.params(9, value_head=True)
    a, _, _ = compiled(plain)(start(plain), tiny.prompts(), step_key(0, 0))
    b, metrics, _ = jax.jit(make_step(with_critic, tiny.even_tokens))(
        with_critic.init(tiny.params(), critic), tiny.prompts(), step_key(0, 0)
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a.actor.params, b.actor.params)
    assert metrics["critic/vf_loss"] > 0


def test_critic_warm_up_trains_the_critic_alone() -> None:
    p = program(**PPO, critic__warmup_steps=1)
    step = compiled(p)
    first = start(p)
    second, _, _ = step(first, tiny.prompts(), step_key(0, 0))
    third, _, _ = step(second, tiny.prompts(), step_key(0, 1))

    def moved(a: Any, b: Any) -> bool:
        return any((x != y).any() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))

    assert first.critic and second.critic
    assert not moved(first.actor, second.actor) and moved(first.critic.params, second.critic.params)
    assert moved(second.actor.params, third.actor.params)


def test_evidence_is_written_once_and_missing_evidence_is_named() -> None:
    p = program(actor__use_kl_loss=True)
    state = start(p)
    batch = p.gen(p.update_weights(state.actor.params), tiny.prompts(), jax.random.key(3), p.stops)
    with pytest.raises(MissingEvidence, match="phase 'adv' needs 'token_level_scores', which phase 'reward' writes"):
        p.adv(batch, state.kl_coef)
    assert p.ref
    batch = p.ref(state.reference, batch)
    with pytest.raises(EvidenceExists, match="'ref_log_prob' a second time"):
        p.ref(state.reference, batch)
    with pytest.raises(EvidenceExists, match="may not write 'values'"):
        batch.write("ref", values=batch.ref_log_prob)


@pytest.mark.long
def test_remax_compares_to_a_greedy_response_of_its_own() -> None:
    p = program(algorithm__estimator="remax")
    state, prompts = start(p), tiny.prompts()
    assert p.gen_max
    view = p.update_weights(state.actor.params)
    greedy = [p.gen_max(view, prompts, jax.random.key(seed), p.stops) for seed in (1, 2)]
    np.testing.assert_array_equal(greedy[0].responses, greedy[1].responses)
    _, _, batch = compiled(p)(state, prompts, step_key(0, 0))
    baselines = np.repeat(tiny.even_tokens(greedy[0].responses, greedy[0].response_mask, {}), batch.n)
    np.testing.assert_allclose(batch.reward_baselines, baselines, rtol=1e-6)
    scores = batch.token_level_scores.sum(1)
    expected = np.where(batch.response_mask, (scores - baselines)[:, None], 0)
    np.testing.assert_allclose(batch.advantages, expected, atol=1e-6)
    assert len(np.unique(baselines)) > 1 and (batch.advantages != 0).any()


PAIRS = list(itertools.zip_longest(ESTIMATORS, POLICY_LOSSES, fillvalue="vanilla"))


@pytest.mark.parametrize(("estimator", "loss"), PAIRS)
def test_every_estimator_and_every_loss_in_the_whole_step(estimator: str, loss: str) -> None:
    """Each is chosen by name in the config, and the step has the same types whichever it is."""
    p = program(algorithm__estimator=estimator, actor__policy_loss=loss, actor__mini_batch_size=2)
    state, metrics, batch = jax.eval_shape(
        make_step(p, tiny.even_tokens), jax.eval_shape(lambda: start(p)), tiny.prompts(), step_key(0, 0)
    )
    assert (batch.advantages.shape, batch.advantages.dtype) == ((16, 8), jnp.float32)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), state.actor.params, tiny.params())
    assert all(jax.tree.leaves(same)) and {"actor/pg_loss", "actor/ppo_kl", "actor/entropy"} <= set(metrics)


def test_equal_rewards_teach_nothing() -> None:
    """A constant reward: advantages are exactly 0, and the update moves parameters by weight decay alone."""
    p = program(optimizer__weight_decay=0.0)
    state = start(p)
    step = jax.jit(make_step(p, lambda responses, mask, records: jnp.full(responses.shape[0], 0.1)))
    after, metrics, batch = step(state, tiny.prompts(), step_key(0, 0))
    assert (batch.advantages == 0).all() and metrics["frac_reward_zero_std"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.actor.params, after.actor.params)


def test_the_config_decides_who_exists() -> None:
    p = program()
    assert (p.critic, p.values, p.ref) == (None, None, None)
    p = program(**PPO)
    assert p.critic and p.values and p.ref and p.old_log_prob
    with pytest.raises(ValueError, match="needs a critic model"):
        make_program(dataclasses.replace(p.config), tiny.model())


@pytest.mark.parametrize(
    "changes",
    [{"rollout__multi_turn__environment": "calculator"}, {"algorithm__filter_groups__enable": True}],
)
def test_what_a_pure_step_has_no_part_in_is_refused(changes: dict[str, Any]) -> None:
    """Rather than left out in silence."""
    changes = {**changes, "rollout__multi_turn__max_observation_length": 2}
    with pytest.raises(ValueError, match=f"config.{next(iter(changes)).replace('__', '.')} = .* jaxrl_llm.fit"):
        make_step(make_program(tiny.config(**changes), tiny.model()), tiny.even_tokens)

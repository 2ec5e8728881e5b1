"""Packed lines say what padded rows say: log-probs, values, losses, gradients and updates of ragged responses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.compiled import narrowest
from jaxrl_llm.models.attention import attend, attend_packed, finish
from jaxrl_llm.models.transformer import make_transformer, unstack_layers
from jaxrl_llm.steps.packing import Packing, needed_width, packed_widths
from jaxrl_llm.steps.phases import Program, make_program
from jaxrl_llm.steps.reward import write_scores
from jaxrl_llm.steps.scoring import score_responses, score_tokens, score_values
from jaxrl_llm.trainer import fit
from jaxrl_llm.types import Array, Batch, Packed, Params, RunState
from tests import tiny, tiny_folder
from tests.tiny_runs import GRPO, QUIET, Watched, compilations

G, N, R = 4, 3, 10
S = 24  # of 30: more than two chunks beside each other, so that not all slots see all slots
# Gemma's: a window in every other layer, soft caps on scores and logits.
pytestmark = pytest.mark.usefixtures("compile_once")
SHAPES = {
    "plain": tiny.SHAPE,
    "windows": dataclasses.replace(tiny.SHAPE, windows=(4, 0), attention_softcap=2.0, logit_softcap=3.0),
}
WAYS = {"unrolled": ("plain", False, "none"), "scanned and recomputed": ("windows", True, "full")}


def lengths(draw: Callable[[Any], Any]) -> tuple[np.ndarray, np.ndarray]:
    """Lengths [B] that lines of S slots hold, empty and full ones among them, and a mask of some of their tokens."""
    length = np.zeros((G, N), np.int32)
    for group, row in np.ndindex(G, N):
        length[group, row] = min(draw(st.sampled_from([0, 1, 2, 3, 5, 7, R])), S - length[group].sum())
    bits = np.array([draw(st.integers(0, 2**R - 1)) for _ in range(G * N)])[:, None] >> np.arange(R)[None, :]
    length = length.reshape(-1)
    return length, (bits % 2 == 1) & (np.arange(R)[None, :] < length[:, None])


def ragged(length: np.ndarray, mask: np.ndarray | None = None, spoiled: bool = False) -> Batch:
    """Responses of these lengths to prompts that are padded on the left. Where `spoiled`, other token ids, impossible
    ones among them, stand in the padding."""
    prompts, draw = tiny.prompts(G), np.random.default_rng(1)
    within = np.arange(R)[None, :] < length[:, None]
    responses, asked = draw.integers(0, tiny.VOCAB, (G * N, R), np.int32), np.asarray(prompts.prompts)
    if spoiled:
        responses = np.where(within, responses, 7_000_000 * draw.integers(-1, 2, responses.shape))
        asked = np.where(prompts.prompt_mask, asked, -5)
    return Batch(
        prompts=jnp.asarray(asked, jnp.int32),
        prompt_mask=prompts.prompt_mask,
        prompt_valid=prompts.prompt_valid,
        record_arrays={},
        uid=jnp.repeat(prompts.uid, N),
        responses=jnp.asarray(responses, jnp.int32),
        response_mask=jnp.asarray(within if mask is None else mask),
        response_length=jnp.asarray(length, jnp.int32),
        rollout_log_probs=None,
        finish_reason=jnp.ones(G * N, jnp.int32),
    )


@functools.cache
def graded(way: str, packed_width: int | None) -> Any:
    """(batch) -> what actor, critic and reward model say of it in float64, and the gradient of something of it all."""
    name, scanned, remat = WAYS[way]
    kind: dict[str, Any] = {"param_dtype": jnp.float64, "compute_dtype": jnp.float64, "remat": remat}
    actor, critic, judge = (
        make_transformer(SHAPES[name], **head, **kind) for head in ({}, {"value_head": True}, {"score_head": True})
    )
    # The trunk is one, so that what all three compute of it is compiled once.
    params = {**tiny.params(3, value_head=True), **tiny.params(3, score_head=True), **tiny.params()}
    # Fresh heads are zero, and would hide what lies beneath them.
    params = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=jnp.float64)).reshape(x.shape), params)

    def loss(params: Params, batch: Batch) -> tuple[Array, Any]:
        entered = params if scanned else unstack_layers(params)
        stats = score_tokens(
            actor,
            entered,
            batch,
            temperature=0.7,
            chunk_tokens=5 * G,
            with_sum_pi_squared=True,
            packed_width=packed_width,
        )
        values = score_values(critic, entered, batch, packed_width=packed_width)
        scores = score_responses(judge, entered, batch, packed_width=packed_width)
        found: tuple[Any, ...] = (*stats, values, scores)
        # No two tokens count alike.
        weights = [jnp.sin(1.0 + jnp.arange(x.size)).reshape(x.shape) for x in found]
        return sum(((w * x * x).sum() for w, x in zip(weights, found, strict=True)), jnp.zeros(())), found

    return functools.partial(jax.jit(jax.grad(loss, has_aux=True)), params)


@pytest.mark.parametrize("way", [pytest.param(w, marks=pytest.mark.long if w == "unrolled" else ()) for w in WAYS])
def test_packed_lines_say_what_padded_rows_say(way: str) -> None:
    @settings(max_examples=12)
    @given(st.data())
    def check(data: Any) -> None:
        length, mask = lengths(data.draw)
        expected = graded(way, None)(ragged(length, mask))
        found = graded(way, S)(ragged(length, mask, spoiled=True))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)

    with jax.enable_x64(True):
        check()
        # And what is said is of something.
        gradient, (log_probs, *_) = graded(way, S)(ragged(np.full(G * N, S // N, np.int32)))
        assert log_probs.dtype == jnp.float64 and (log_probs != 0).sum() == G * S
        assert all(jnp.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(("reach", "slots"), [(1, 5), (2, 9), (5, 9), (5, 31), (12, 31)])
def test_chunks_reach_as_far_as_responses(reach: int, slots: int) -> None:
    """Against attention in one piece, for responses that are as long as they may be."""
    width, n = 3, -(-slots // reach)
    q, k, v = (jax.random.normal(key, (2, width + slots, 2, 4)) for key in jax.random.split(jax.random.key(0), 3))
    slot = np.arange(slots)
    positions = np.concatenate([np.arange(width), width + slot % reach])[None].repeat(2, 0)
    own = np.concatenate([np.ones(width, int), slot // reach + 2])[None].repeat(2, 0)
    prefix = np.concatenate([np.zeros(width, int), np.ones(slots, int)])[None].repeat(2, 0)
    where = (jnp.asarray(positions), jnp.asarray(positions), jnp.asarray(own), jnp.asarray(own))
    expected = finish(attend(q, k, v, *where, scale=0.5, q_prefix=jnp.asarray(prefix)), q.dtype)
    segments = jnp.asarray(np.where(prefix == 1, own - 1, 1))
    packed = jax.jit(functools.partial(attend_packed, packed=Packed(width, n, reach), scale=0.5))
    found = packed(q, k, v, where[0], segments)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_where_tokens_lie() -> None:
    packing = Packing.of(ragged(np.array([2, 0, 3, 0, 0, 0, 1, 1, 1, 0, 4, 0])), 5)
    np.testing.assert_array_equal(packing.start, [[0, 2, 2], [0, 0, 0], [0, 1, 2], [0, 0, 4]])
    np.testing.assert_array_equal(
        packing.response, [[0, 0, 2, 2, 2], [3, 3, 3, 3, 3], [0, 1, 2, 3, 3], [1, 1, 1, 1, 3]]
    )
    numbered = jnp.arange(1, 1 + G * N * R, dtype=jnp.int32).reshape(G * N, R)
    packed = packing.into_lines(numbered)
    np.testing.assert_array_equal(packed[0], [1, 2, 21, 22, 23])
    np.testing.assert_array_equal(packed[1], [0] * 5)
    np.testing.assert_array_equal(packing.into_rows(packed, R)[2, :3], [21, 22, 23])


def test_widths_grow_and_the_longest_line_decides() -> None:
    assert packed_widths((0.5, 0.25, 0.26, 0.25), 2, 50) == (25, 26, 50)
    assert packed_widths((), 2, 50) == ()
    assert needed_width(np.array([3, 4, 9, 0, 5, 5]), 2) == 10
    assert needed_width(np.array([3, 4, 9, 0, 5, 5]), 3) == 16
    programs: Any = {9: "9 slots", 10: "10 slots", 16: "16 slots"}
    found = [narrowest("padded", programs, n, np.array([3, 4, 9, 0, 5, 5])) for n in (1, 2, 3, 6)]  # type: ignore[arg-type]
    assert found == ["9 slots", "10 slots", "16 slots", "padded"]


# Phases

PACKED: dict[str, Any] = {"model__use_remove_padding": True, "model__packed_widths": (0.8,)}
PPO: dict[str, Any] = {
    "algorithm__estimator": "gae",
    "actor__epochs": 2,  # so that old log-probs are computed
    "actor__use_kl_loss": True,
    "actor__entropy_coeff": 0.01,
    "actor__mini_batch_size": 2,
    "critic__mini_batch_size": 2,
    "critic__optimizer__lr": 1.0,
    "critic__optimizer__eps": 1.0,
    # Adam with a large eps moves a parameter by about its gradient, so that equal updates mean equal gradients.
    "optimizer__lr": 1.0,
    "optimizer__eps": 1.0,
    "rollout__n": N,
    "rollout__response_length": R,
}
IN_PARTS: dict[str, Any] = {
    "actor__micro_batch_size": 3,
    "critic__micro_batch_size": 2,  # of which no line can have more than one response
    "trainer__score_micro_batch_size": 6,
}


def one(by_width: Any) -> Any:
    (found,) = by_width.values()
    return found


def program(**overrides: Any) -> Program:
    return make_program(tiny.config(**PPO, **PACKED, **overrides), tiny.model(), tiny.model(value_head=True))


@pytest.mark.parametrize("parts", [pytest.param({}, id="whole"), pytest.param(IN_PARTS, id="in parts")])
@pytest.mark.long
def test_phases_and_updates_of_packed_lines_are_those_of_padded_rows(parts: dict[str, Any]) -> None:
    p = program(**parts)
    state = p.init(tiny.params(), tiny.params(50, value_head=True), tiny.params(8))
    # A group that fills its line and one that is empty; a row of another has failed.
    length = np.array([8, 0, 3, 1, 1, 1, 0, 0, 0, 8, 7, 8], np.int32)
    valid, scores = jnp.arange(G * N) != 9, jnp.cos(jnp.arange(G * N, dtype=jnp.float32))[:, None]

    def run(packed: bool) -> Any:
        def phase(name: str) -> Any:
            return one(p.packed[name]) if packed else getattr(p, name)

        @jax.jit
        def all_of_it(state: RunState, batch: Batch) -> Any:
            assert state.critic
            batch = write_scores(batch, scores, valid, weights=(1.0,))
            batch = phase("old_log_prob")(state.actor.params, batch)
            batch = phase("ref")(state.reference, batch)
            batch = phase("values")(state.critic.params, batch)
            batch = p.adv(batch, state.kl_coef)[0]
            found = {}
            for role, training in (("actor", p.actor), ("critic", p.critic)):
                assert training
                update = one(training.packed) if packed else training.update
                found[role] = update(getattr(state, role), batch.select(jnp.array([0, 3])), jax.random.key(0))
            return batch, found

        return all_of_it(state, ragged(length))

    expected, found = run(False), run(True)
    tiny.assert_close(found, expected)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), found[1]["actor"][0].params, state.actor.params)
    assert min(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.long
def test_a_run_of_packed_lines_is_the_run_of_padded_rows(grpo: Watched) -> None:
    """The first step's metrics, whose tokens are the same; and nothing compiles after the warm-up."""
    with fit(tiny_folder.config(**GRPO, **QUIET, **{**PACKED, "model__packed_widths": (0.1, 0.99)})) as run:
        with compilations() as events:
            (metrics, batch), _ = next(run), next(run)
        phases = run._phases.fit(np.asarray(batch.response_length))
        assert phases.ref and phases.ref.name == "ref in 32 slots" and phases.old_log_prob is None
        assert phases.update_actor.update.name == "update_actor in 32 slots"
    assert events == []
    compared = [name for name in grpo.metrics[0] if name.split("/")[0] in ("actor", "critic", "training", "rewards")]
    assert {"actor/grad_norm", "actor/kl_loss", "actor/entropy", "critic/advantages/mean"} <= set(compared)
    for name in compared:
        np.testing.assert_allclose(metrics[name], grpo.metrics[0][name], rtol=1e-4, atol=1e-6, err_msg=name)

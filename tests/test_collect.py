"""Which prompts a step learns from: dynamic sampling, curricula, parts; and rewards that shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm import collect
from jaxrl_llm.algorithms.shaping import overlong_penalty
from jaxrl_llm.compiled import pick_prompts
from jaxrl_llm.curriculum import Curriculum
from jaxrl_llm.errors import StorageError, UserError
from jaxrl_llm.samplers import Sampler
from jaxrl_llm.steps.phases import make_program
from jaxrl_llm.steps.step import make_step, step_key
from jaxrl_llm.trainer import Run, fit
from jaxrl_llm.types import Batch
from jaxrl_llm.writers import read_jsonl
from tests import tiny, tiny_folder

QUIET: dict[str, Any] = {
    "data__eval": (),
    "eval__interval": 0,
    "trainer__save_interval": 0,
    "reward__functions": ("tests.tiny_folder:starts_with_a_digit",),
}


def run_of(workdir: Path | None = None, **changes: Any) -> Run:
    with tiny_folder.compile_once():
        return fit(tiny_folder.config(**{**QUIET, **changes}), workdir)


def all_equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


# Dynamic sampling


def spread(batch: Batch) -> np.ndarray:
    scores = np.asarray(batch.scores)[:, 0].reshape(-1, batch.n)
    return scores.max(1) > scores.min(1)


def test_prompts_without_spread_are_replaced() -> None:
    """Of what the plain run draws one prompt after the other, the first ones with spread, in their order."""
    drawn = [jax.device_get(batch) for _, batch in run_of(trainer__steps=4, optimizer__lr=0.0, rollout__n=2)]
    wanted = [uid for batch in drawn for uid in batch.uid[:: batch.n][spread(batch)].tolist()]
    assert 4 <= len(wanted) < 16, "some have spread and some have none"
    run = run_of(trainer__steps=1, optimizer__lr=0.0, rollout__n=2, algorithm__filter_groups__enable=True)
    metrics, batch = next(run)
    batches = int(metrics["train/num_gen_batches"])
    # The draws of the later batches depend on the step's key, so that only the first batch's are the plain run's.
    first = drawn[0].uid[::2][spread(drawn[0])].tolist()
    uids = np.asarray(batch.uid)[::2].tolist()
    assert uids[: len(first)] == first and spread(jax.device_get(batch)).all()
    assert uids == sorted(uids) and len(set(uids)) == 4
    assert metrics["filter_groups/unfilled"] == 0 and metrics["filter_groups/discarded"] == 4 * (batches - 1)
    assert metrics["frac_reward_zero_std"] == 0


def test_rows_keep_what_belongs_to_them(tmp_path: Path) -> None:
    """Prompt, record and text of every row, after its group was put elsewhere."""
    run = run_of(tmp_path, trainer__steps=2, rollout__n=2, algorithm__filter_groups__enable=True)
    records, tokenizer = tiny_folder.records(), tiny_folder.tokenizer()
    for step, (_, batch) in enumerate(run, 1):
        rows = read_jsonl(tmp_path / "rollouts" / f"{step}.jsonl")
        for row, uid in zip(rows, np.asarray(batch.uid).tolist(), strict=True):
            assert row["uid"] == uid
            assert tokenizer.decode(row["prompt_ids"]).count(row["prompt"]) == 1
            assert row["prompt"] in {record["prompt"] for record in records}
            assert row["score"] == tiny_folder.starts_with_a_digit("", row["response"], {})
            own = np.array(row["responses"])[np.array(row["response_mask"])]
            assert tokenizer.decode(own, skip_special_tokens=True) == row["response"]


def test_the_bound_and_what_is_left_then(tmp_path: Path) -> None:
    """No group has spread: the step goes on with the newest prompts, which teach nothing, and the next step draws new
    ones."""
    changes: dict[str, Any] = {
        "reward__functions": ("tests.tiny_folder:constant",),
        "algorithm__filter_groups__enable": True,
    }
    run = run_of(
        None, **changes, trainer__steps=2, optimizer__weight_decay=0.0, algorithm__filter_groups__max_num_gen_batches=3
    )
    before = run.state().actor.params
    metrics, batch = next(run)
    assert metrics["train/num_gen_batches"] == 3 and metrics["filter_groups/unfilled"] == 4
    assert metrics["filter_groups/kept_ratio"] == 0
    assert np.asarray(batch.uid)[::4].tolist() == [8, 9, 10, 11]
    assert np.asarray(batch.advantages).any() == 0
    all_equal(before, run.state().actor.params)
    _, batch = next(run)
    assert np.asarray(batch.uid)[::4].tolist() == [20, 21, 22, 23]


def test_the_metric_is_named_and_raw() -> None:
    """Groups are chosen by a value beside the score, where that is asked for; and an unknown one is named."""
    changes: dict[str, Any] = {"reward__functions": ("tests.tiny_folder:digits",), "rollout__n": 2, "trainer__steps": 1}
    on: dict[str, Any] = {"algorithm__filter_groups__enable": True}
    metrics, _ = next(run_of(**changes, **on, algorithm__filter_groups__metric="digits/letters"))
    assert metrics["filter_groups/unfilled"] == 0
    with pytest.raises(UserError, match=r"filter_groups.metric = 'digits/lettres': no response has it; did you mean"):
        next(run_of(**changes, **on, algorithm__filter_groups__metric="digits/lettres"))


def test_failures_are_counted_over_all_that_was_sampled() -> None:
    changes: dict[str, Any] = {"reward__functions": ("tests.tiny_folder:picky",), "rollout__n": 2, "trainer__steps": 1}
    metrics, batch = next(run_of(**changes, algorithm__filter_groups__enable=True))
    assert metrics["train/num_gen_batches"] > 1, "or nothing is shown"
    assert metrics["reward/failed_ratio"] > 1 - float(np.asarray(batch.row_valid).mean())


def test_pick_prompts() -> None:
    program = tiny_program()
    step = jax.jit(make_step(program, tiny.even_tokens))
    state = program.init(tiny.params())
    _, _, first = step(state, tiny.prompts(first_uid=0), step_key(0, 0))
    _, _, second = step(state, tiny.prompts(first_uid=4), step_key(0, 1))
    picked = pick_prompts(first, second, jnp.array([5, 0, 3, 6]))
    assert picked.uid[::4].tolist() == [5, 0, 3, 6]
    both = [np.concatenate([a, b]) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)]
    groups = np.array([5, 0, 3, 6])
    rows = (groups[:, None] * 4 + np.arange(4)).reshape(-1)
    for whole, leaf in zip(both, jax.tree.leaves(picked), strict=True):
        np.testing.assert_array_equal(leaf, whole[groups if len(whole) == 8 else rows])


def tiny_program() -> Any:
    return make_program(tiny.config(), tiny.model())


# Parts


def test_parts_are_the_whole() -> None:
    """Sampled in two parts, each row draws what it drew; in other shapes sums differ in the last bits."""
    _, whole = next(run_of(trainer__steps=1))
    _, parts = next(run_of(trainer__steps=1, rollout__parts=2))
    assert (np.asarray(whole.uid) == np.asarray(parts.uid)).all()
    same = (np.asarray(whole.responses) == np.asarray(parts.responses)).all(1)
    assert same.mean() > 0.9
    a, b = np.asarray(whole.rollout_log_probs)[same], np.asarray(parts.rollout_log_probs)[same]
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_a_part_is_scored_while_the_next_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parts are under way on the device before the first is waited for, and its scoring has begun before the
    second is."""
    order: list[str] = []
    start_scoring, start = collect.start_scoring, Sampler.start

    def scoring(*given: Any) -> Any:
        order.append("score")
        return start_scoring(*given)

    def sampling(*given: Any) -> Any:
        order.append("sample")
        finish = start(*given)
        return lambda: order.append("wait") or finish()

    monkeypatch.setattr(collect, "start_scoring", scoring)
    monkeypatch.setattr(Sampler, "start", sampling)
    next(run_of(trainer__steps=1, rollout__parts=2))
    assert order == ["sample", "sample", "wait", "score", "wait", "score"]


def test_parts_must_be_equal() -> None:
    with pytest.raises(UserError, match=r"rollout.parts = 3, config.data.train_batch_size = 4"):
        tiny_folder.config(rollout__parts=3)


# Curricula


CURRICULUM: dict[str, Any] = {"data__curriculum__sampler": "frontier", "trainer__steps": 4, "trainer__save_interval": 2}


@pytest.mark.long
def test_a_resumed_curriculum_draws_what_it_would_have_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [np.asarray(batch.uid).tolist() for _, batch in run_of(tmp_path / "whole", **CURRICULUM)]
    prompts = [record_prompts(tmp_path / "whole", step) for step in range(1, 5)]
    for _ in run_of(tmp_path / "parts", **{**CURRICULUM, "trainer__steps": 2}):
        pass
    rest = [np.asarray(batch.uid).tolist() for _, batch in run_of(tmp_path / "parts", **CURRICULUM)]
    assert rest == whole[2:]
    assert [record_prompts(tmp_path / "parts", step) for step in range(1, 5)] == prompts
    other = Curriculum.new(9, sampler="hard", smoothing=0.5, floor=0.1, seed=0)
    monkeypatch.setattr("jaxrl_llm.resume._new_curriculum", lambda *_: other)
    with pytest.raises(StorageError, match="a curriculum of 12 prompts, and there are 9"):
        run_of(tmp_path / "parts", **CURRICULUM)


def record_prompts(workdir: Path, step: int) -> list[str]:
    return [row["prompt"] for row in read_jsonl(workdir / "rollouts" / f"{step}.jsonl")]


def test_every_prompt_comes_before_one_comes_twice() -> None:
    """Prompts not drawn yet weigh most; of twelve, three steps of four draw each about once."""
    c = Curriculum.new(12, sampler="hard", smoothing=0.5, floor=0.01, seed=1)
    drawn: list[int] = []
    for step in range(3):
        new = c.draw(4 * step, 4)
        assert len(set(new)) == 4
        drawn += new
        c = c.learn(new, [1.0] * 4)
    assert len(set(drawn)) >= 11


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=20), st.integers(0, 5), st.data())
@settings(deadline=None, max_examples=50)
def test_properties_of_a_curriculum(kept: list[float | None], cursor: int, data: Any) -> None:
    fresh = Curriculum.new(len(kept), sampler="frontier", smoothing=0.3, floor=0.05, seed=7)
    c = fresh.with_json(kept)
    assert c.to_json() == kept
    assert ((c.weights >= 0.05) & (c.weights <= 1)).all()
    count = data.draw(st.integers(1, len(kept)))
    drawn = c.draw(cursor, count)
    assert len(set(drawn)) == count and drawn == c.draw(cursor, count)
    assert set(c.draw(cursor, len(kept))[:count]) == set(drawn), "without replacement: more draws, the same first ones"
    learned = c.learn([drawn[0]], [1.0])
    before = kept[drawn[0]]
    assert learned.success[drawn[0]] == pytest.approx(1.0 if before is None else before + 0.3 * (1 - before))
    np.testing.assert_array_equal(np.delete(learned.success, drawn[0]), np.delete(c.success, drawn[0]))


def test_draws_follow_the_weights() -> None:
    c = Curriculum.new(3, sampler="hard", smoothing=1.0, floor=0.01, seed=0).learn([0, 1, 2], [0.0, 0.5, 0.75])
    counts = np.bincount([c.draw(cursor, 1)[0] for cursor in range(4000)], minlength=3) / 4000
    np.testing.assert_allclose(counts, np.array([4, 2, 1]) / 7, atol=0.03)


def test_a_success_is_in_0_to_1() -> None:
    with pytest.raises(UserError, match=r"curriculum.metric: a success is in \[0, 1\], found"):
        next(run_of(**{**CURRICULUM, "trainer__save_interval": 0, "reward__weights": (3.0,)}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__curriculum__sampler": "hard", "trainer__epochs": 1}, "once an epoch"),
        ({"data__curriculum__sampler": "hard", "data__weights": (1.0,)}, "how often a prompt is drawn"),
        ({"algorithm__filter_groups__enable": True, "trainer__epochs": 1}, "once an epoch"),
        ({"reward__overlong_buffer__enable": True, "reward__overlong_buffer__len": 9}, "cannot be longer"),
        (
            {"algorithm__filter_groups__enable": True, "algorithm__filter_groups__metric": "digit/letters"},
            r"filter_groups.metric = 'digit/letters': .* did you mean 'digits'\?",
        ),
        ({"data__curriculum__sampler": "hard", "data__curriculum__metric": "acc"}, "valid: digits, score"),
    ],
)
def test_rules(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        tiny_folder.config(**changes)


# Overlong responses


@given(st.integers(1, 40), st.data())
@settings(deadline=None, max_examples=50)
@pytest.mark.long
def test_the_overlong_penalty(limit: int, data: Any) -> None:
    buffer, factor = data.draw(st.integers(1, limit)), data.draw(st.floats(0, 2))
    found = np.asarray(overlong_penalty(jnp.arange(limit + 1), limit=limit, buffer=buffer, factor=factor))
    assert (found[: limit - buffer + 1] == 0).all() and found[limit] == pytest.approx(-factor)
    assert (np.diff(found) <= 0).all()


def test_overlong_responses_are_punished_in_the_reward_and_not_in_the_score() -> None:
    buffer = {"enable": True, "len": 2, "penalty_factor": 0.5}
    changes = {f"reward__overlong_buffer__{name}": value for name, value in buffer.items()}
    metrics, batch = next(run_of(trainer__steps=1, **changes))
    plain, _ = next(run_of(trainer__steps=1))
    length = np.asarray(batch.response_length)
    penalty = np.asarray(overlong_penalty(jnp.asarray(length), limit=tiny_folder.WIDTH, buffer=2, factor=0.5))
    assert 0 < (penalty < 0).sum() < 16
    shaped, raw = (np.asarray(x).sum(1) for x in (batch.token_level_rewards, batch.token_level_scores))
    np.testing.assert_allclose(shaped, raw + penalty, atol=1e-6)
    assert metrics["critic/score/mean"] == plain["critic/score/mean"]
    assert metrics["critic/rewards/mean"] == pytest.approx(plain["critic/rewards/mean"] + penalty.mean(), abs=1e-6)
    assert metrics["reward/overlong_penalty/mean"] == pytest.approx(penalty.mean())

"""`fit` end to end on a tiny folder: what a run leaves behind, resumes, survives and refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.errors import RunAborted, UserError
from jaxrl_llm.loading import build_program, load_inputs, make_layout
from jaxrl_llm.metrics import CLOCKS
from jaxrl_llm.steps.step import make_step, step_key
from jaxrl_llm.trainer import fit
from jaxrl_llm.writers import read_jsonl
from tests import tiny_folder
from tests.tiny_runs import COMPILED, GRPO, PPO, QUIET, Watched, compilations, on_host

pytestmark = pytest.mark.usefixtures("compile_once")
HOST_PHASES = {"step", "data", "save_checkpoint"}  # in which no program of the run's own is called


@pytest.fixture(params=["grpo", "ppo"])
def either(request: pytest.FixtureRequest) -> Watched:
    return request.getfixturevalue(request.param)


def assert_equal(a: Any, b: Any) -> None:
    """Bit for bit, leaf by leaf."""
    jax.tree.map(np.testing.assert_array_equal, a, b)


def differ(a: Any, b: Any) -> bool:
    return any((x != y).any() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


# What a run leaves behind


def test_a_run_fills_its_folder(either: Watched) -> None:
    assert [line["step"] for line in either.lines()] == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in (either.folder / "rollouts").iterdir()) == [f"{i}.jsonl" for i in (1, 2, 3, 4)]
    assert sorted(path.name for path in (either.folder / "checkpoints").iterdir()) == ["2", "4", "newest"]
    assert {row["step"] for row in read_jsonl(either.folder / "samples.jsonl")} == {1, 2, 4}
    assert json.loads((either.folder / "config.json").read_text())["trainer"]["steps"] == 4
    for line, metrics in zip(either.lines()[1:], either.metrics, strict=True):
        assert line == {"step": line["step"], **metrics}
    evaluated = [line["step"] for line in either.lines() if any(name.startswith("val-core/") for name in line)]
    assert evaluated == [0, 2, 4]


def test_every_phase_has_its_timer(grpo: Watched, ppo: Watched) -> None:
    common = {"step", "data", "update_weights", "gen", "reward", "ref", "adv", "update_actor"}
    common |= {"testing", "save_checkpoint"}
    for watched, expected in ((grpo, common), (ppo, common | {"old_log_prob", "values", "update_critic"})):
        found = {name.removeprefix("timing_s/") for name in watched.metrics[1] if name.startswith("timing_s/")}
        assert found == expected


def test_what_runs_on_devices_runs_in_a_phase_of_its_name_and_no_two_overlap(either: Watched) -> None:
    """So that the phases' seconds are the step's, but for what the host does between them."""
    phases = {name.removeprefix("timing_s/") for metrics in either.metrics for name in metrics if "timing_s/" in name}
    assert {program for program, phase in either.ran if phase == program} == phases - HOST_PHASES
    assert {program for program, phase in either.ran if phase != program} == {"update_weights", "reward of testing"}
    assert {phase for program, phase in either.ran if phase != program} == {"testing"}
    for metrics in either.metrics:
        timing = {name: value for name, value in metrics.items() if name.startswith("timing_s/")}
        step = timing.pop("timing_s/step")
        assert sum(timing.values()) <= step


def test_training_moves_all_that_is_trained_and_nothing_else(either: Watched) -> None:
    first, last = either.states[0], either.states[-1]
    assert differ(first.actor.params, last.actor.params)
    assert (int(last.step), int(last.actor.updates), int(last.actor.skipped)) == (4, 4, 0)
    if last.critic:
        assert first.critic and differ(first.critic.params, last.critic.params) and int(last.critic.updates) == 16

    def digest(params: Any) -> str:
        return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))).hexdigest()

    references = [digest(state.reference) for state in either.states]
    assert references[0] == digest(first.actor.params)
    moved = 3 if either.config.reference.sync_steps else None  # after the third step, once
    assert [i for i in range(1, 5) if references[i] != references[i - 1]] == ([moved] if moved else [])
    if moved:
        start, actor, found = first.reference, either.states[moved].actor.params, last.reference
        mixed = jax.tree.map(lambda a, b: 0.25 * a.astype(np.float64) + 0.75 * b, actor, start)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), found, mixed)


def test_nothing_compiles_after_the_warm_up(either: Watched) -> None:
    """The run evaluates, saves, dumps and shows samples while it is counted."""
    assert either.compiled == 0
    with compilations() as events:
        jax.jit(lambda x: x * 3.25 + either.compiled)(jnp.arange(7.0))
    assert events, f"{COMPILED} is not reported any more: nothing was counted above"


# Killed and resumed


def test_a_killed_run_resumes_bit_for_bit(either: Watched) -> None:
    """Killed in the fourth step, it goes on from the checkpoint of step 2, and no file tells."""
    with fit(either.config, either.killed) as run:
        assert run.step == 2
        resumed = list(run)
        final = on_host(run)
    assert [int(metrics["actor/skipped_updates"]) for metrics, _ in resumed] == [0, 0]
    assert_equal(final, either.states[-1])
    lines, expected = read_jsonl(either.killed / "metrics.jsonl"), either.lines()
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    for line, wanted in zip(lines, expected, strict=True):
        assert without_clocks(line) == without_clocks(wanted)
    for name in ("samples.jsonl", "rollouts/3.jsonl", "rollouts/4.jsonl"):
        assert (either.killed / name).read_bytes() == (either.folder / name).read_bytes()


def without_clocks(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith(CLOCKS)}


def test_a_finished_run_can_be_made_longer(grpo: Watched, tmp_path: Path) -> None:
    longer = tmp_path / "longer"
    shutil.copytree(grpo.folder, longer)
    with fit(tiny_folder.config(**GRPO, trainer__steps=5), longer) as run:
        steps = [run.step for _ in run]
        assert steps == [5] and int(run.state().step) == 5
    assert [line["step"] for line in read_jsonl(longer / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
    with compilations() as events, fit(tiny_folder.config(**GRPO, trainer__steps=5), longer) as run:
        assert list(run) == []
    assert not events  # what is done needs no program
    assert "nothing is left to do: step 5 of 5" in (longer / "events.jsonl").read_text()


def test_another_configuration_is_refused_and_named(grpo: Watched) -> None:
    before = (grpo.folder / "config.json").read_bytes()
    with pytest.raises(UserError) as caught:
        fit(tiny_folder.config(**GRPO, optimizer__lr=0.5, trainer__steps=9), grpo.folder)
    assert "config.optimizer.lr: was 0.01, now 0.5" in str(caught.value)
    assert "trainer.steps" not in str(caught.value)
    assert (grpo.folder / "config.json").read_bytes() == before


def test_a_workdir_that_is_a_file_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="--workdir .*file: is a file; expected a folder"):
        fit(tiny_folder.config(**GRPO), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_epochs_instead_of_steps() -> None:
    """12 prompts, 4 a step: after two epochs each was drawn twice, and no uid came back."""
    run = fit(tiny_folder.config(**GRPO, **QUIET, trainer__epochs=2))
    assert run.total_steps == 6
    batches = [batch for _, batch in run]
    prompts = [
        np.asarray(row)[mask].tobytes() for b in batches for row, mask in zip(b.prompts, b.prompt_mask, strict=True)
    ]
    assert len(prompts) == 24 and set(prompts[:12]) == set(prompts[12:]) and len(set(prompts)) == 12
    np.testing.assert_array_equal(np.concatenate([b.uid for b in batches]), np.repeat(np.arange(24), 4))


# Time


def test_a_slow_reward_lengthens_the_reward_and_nothing_else() -> None:
    """The least of three steps, so that a busy machine does not decide."""
    seconds = 0.5
    config = tiny_folder.config(
        **{**GRPO, **QUIET, "reward__functions": (f"tests.tiny_folder:sleeping(seconds={seconds})", "exact")},
        trainer__steps=3,
    )
    timings = [
        {name.removeprefix("timing_s/"): value for name, value in metrics.items() if name.startswith("timing_s/")}
        for metrics, _ in fit(config)
    ]
    least = {name: min(timing[name] for timing in timings) for name in timings[0]}
    assert seconds <= least["reward"] < 1.3 * seconds
    others = {name: value for name, value in least.items() if name not in ("reward", "step")}
    assert max(others.values()) < 0.5 * seconds, others
    unaccounted = [timing["step"] - sum(timing[name] for name in (*others, "reward")) for timing in timings]
    assert 0 <= min(unaccounted) < 0.05 * seconds


# The first update, the critic


def test_the_first_update_has_ratio_one(grpo: Watched, ppo: Watched) -> None:
    """Without a pass of its own for the old log-probs (GRPO here), and with one (PPO)."""
    assert "timing_s/old_log_prob" in ppo.metrics[0] and "timing_s/old_log_prob" not in grpo.metrics[0]
    for metrics in (*grpo.metrics, *ppo.metrics):
        assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_lower"] == 0
    assert all(metrics["actor/ppo_kl"] == 0 for metrics in grpo.metrics)
    assert all(abs(metrics["actor/ppo_kl"]) < 1e-6 for metrics in ppo.metrics)


def test_grpo_with_a_critic_trains_the_same_actor(grpo: Watched, tmp_path: Path) -> None:
    config = tiny_folder.config(**GRPO, **QUIET, critic__enable="yes", trainer__steps=2)
    with fit(config, tmp_path) as run:
        found = list(run)
        state = on_host(run)
    assert_equal(state.actor, grpo.states[2].actor)
    assert state.critic and int(state.critic.updates) == 2
    # One update a step: the new value is the old one, so clipping does nothing, and the returns are the advantages.
    for step, (metrics, _) in enumerate(found, 1):
        rows = read_jsonl(tmp_path / "rollouts" / f"{step}.jsonl")
        errors = np.concatenate([np.subtract(row["values"], row["returns"]) for row in rows])
        np.testing.assert_allclose(metrics["critic/vf_loss"], 0.5 * np.square(errors).mean(), rtol=1e-5)


REMAX = {"algorithm__estimator": "remax", **tiny_folder.KL_LOSS, "reference__sync_steps": 1}


LORA = {
    **PPO,
    "model__lora_rank": 2,
    "model__scan_layers": False,
    "critic__freeze_trunk": True,
    "reference__sync_steps": 0,
    "reference__sync_alpha": 1.0,
}
STEPS = {"grpo": GRPO, "ppo, critic warm-up": {**PPO, "critic__warmup_steps": 1}, "remax": REMAX, "lora": LORA}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(case, id=name, marks=() if name.startswith("ppo") else pytest.mark.long)
        for name, case in STEPS.items()
    ],
)
def test_the_pure_step_is_the_trainers(overrides: dict[str, Any]) -> None:
    """`make_step`, jitted as one program, and the phases that the trainer runs one by one, each from the same state."""
    jax_reward = {"reward__functions": ("tests.tiny_folder:near_answer",), "reward__weights": ()}
    config = tiny_folder.config(**{**overrides, **QUIET, **jax_reward}, trainer__steps=3)
    inputs, layout = load_inputs(config), make_layout(config)
    assert inputs.train is not None
    program = build_program(config, inputs, layout, total_steps=3)
    step = jax.jit(make_step(program, tiny_folder.near_answer))
    with fit(config) as run:
        state, cursor = run.state(), 0
        for number, (metrics, batch) in enumerate(run):
            given = inputs.train.batch(cursor, config.data.train_batch_size)
            cursor = given.cursor
            state, found, same = step(state, given.prompts, step_key(config.seed, number))
            np.testing.assert_array_equal(same.responses, batch.responses)
            for name in ("token_level_rewards", "advantages", "returns", "values", "ref_log_prob", "reward_baselines"):
                theirs, ours = getattr(batch, name), getattr(same, name)
                assert (theirs is None) == (ours is None), name
                if ours is not None:
                    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=name)
            warming_up = number < config.critic.warmup_steps
            names = {name for name in found if not (warming_up and name.startswith("actor/"))}
            assert names <= set(metrics) | {"rewards/near_answer/mean"}
            for name in names & set(metrics):
                np.testing.assert_allclose(found[name], metrics[name], rtol=2e-3, atol=2e-5, err_msg=name)
            live = run.state()
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), state, live)
            state = live


# Leaving early


def test_state_is_a_copy_that_outlives_the_steps() -> None:
    run = fit(tiny_folder.config(**GRPO, **QUIET))
    next(run)
    first, params = run.state(), run.state().actor.params
    kept = jax.tree.map(np.array, first)
    assert_equal(params, kept.actor.params)
    next(run)
    assert_equal(first, kept)
    assert_equal(params, kept.actor.params)
    assert differ(run.state().actor.params, kept.actor.params)
    run.close()


def test_the_state_survives_a_loop_that_is_left(grpo: Watched, tmp_path: Path) -> None:
    config = tiny_folder.config(**GRPO, **QUIET)
    run = fit(config)
    for _ in run:
        break
    assert_equal(on_host(run), grpo.states[1])
    with pytest.raises(ZeroDivisionError), run:
        for _ in run:
            raise ZeroDivisionError
    assert_equal(on_host(run), grpo.states[2])
    del run

    def loop() -> None:
        for _ in fit(config, tmp_path):
            break

    loop()
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [1]


def test_an_error_within_a_step_leaves_the_state_of_the_last(grpo: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fit(tiny_folder.config(**GRPO, **QUIET))
    next(run)

    def fail(*_: Any) -> Any:
        raise UserError("a reward that is no score")

    monkeypatch.setattr("jaxrl_llm.collect.start_scoring", fail)
    with pytest.raises(UserError):
        next(run)
    assert run.step == 1
    assert_equal(on_host(run), grpo.states[1])


def test_an_interrupted_update_leaves_a_whole_state(ppo: Watched) -> None:
    """The critic has been trained, its old buffers are gone, and the actor is as it was."""

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    run = fit(tiny_folder.config(**PPO, **QUIET))
    update = dataclasses.replace(run._phases.update_actor, update=interrupt)
    run._phases = dataclasses.replace(run._phases, update_actor=update)
    with pytest.raises(KeyboardInterrupt):
        next(run)
    state = on_host(run)
    assert_equal(state.critic, ppo.states[1].critic)
    assert_equal(state.actor, ppo.states[0].actor)


# Giving up


def test_a_reward_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    config = tiny_folder.config(**tiny_folder.KL_LOSS, **QUIET, reward__functions=("tests.tiny_folder:broken",))
    with pytest.raises(RunAborted, match="step 1: the reward failed on every response") as caught:
        list(fit(config, tmp_path))
    assert "the scorer is down" in str(caught.value) and caught.value.exit_code == 3
    (line,) = read_jsonl(tmp_path / "metrics.jsonl")  # the step that ended it is on record
    assert line["step"] == 1 and line["reward/failed_ratio"] == 1 and line["timing_s/step"] > 0
    assert read_jsonl(tmp_path / "events.jsonl")[-1]["outcome"] == "aborted"
    assert "the scorer is down" in (tmp_path / "report.html").read_text()


def test_updates_that_are_never_finite_end_the_run() -> None:
    """From a model whose numbers are NaN: no update is applied, and after two the run is over."""
    config = tiny_folder.config(**GRPO, **QUIET, trainer__max_skipped_updates=2)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(tiny_folder.folder(True))))
    run = fit(config)
    first = on_host(run)
    metrics, _ = next(run)
    assert metrics["actor/skipped_updates"] == 1
    with pytest.raises(RunAborted, match="step 2: 2 updates of the actor in a row"):
        next(run)
    state = on_host(run)
    assert_equal((state.actor.params, state.actor.opt_state), (first.actor.params, first.actor.opt_state))
    assert (int(state.actor.updates), int(state.actor.skipped)) == (0, 2)

"""Sampling one step ahead of the updates: whose responses they are, what overlaps, and that a run goes on the same."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.collect import Collector
from jaxrl_llm.config import notices
from jaxrl_llm.errors import RunAborted, TryAgain, UserError
from jaxrl_llm.resume import SampledAhead
from jaxrl_llm.trainer import Run, fit
from jaxrl_llm.types import WRITTEN_BY, Batch
from jaxrl_llm.writers import read_jsonl
from tests import tiny_folder
from tests.faulty import digest, without_clocks
from tests.tiny_runs import GRPO, QUIET, calls, on_host

NOTICE = "config.trainer.one_step_off_policy = True: hides rewards that workers work out, and there are none"
pytestmark = [
    pytest.mark.usefixtures("compile_once"),
    pytest.mark.filterwarnings("ignore:config.trainer.one_step_off_policy = True"),  # most tests here have no workers
]
BYPASS: dict[str, Any] = {"algorithm__rollout_correction__bypass": True}
WEIGHED: dict[str, Any] = {"algorithm__rollout_correction__rollout_is": "token"}
ON: dict[str, Any] = {"trainer__one_step_off_policy": True}
REMAX: dict[str, Any] = {"algorithm__estimator": "remax", "rollout__parts": 2}
CURRICULUM: dict[str, Any] = {"data__curriculum__sampler": "frontier"}


def run_of(workdir: Path | None = None, **changes: Any) -> Run:
    return fit(tiny_folder.config(**{**QUIET, **changes}), workdir)


def kept(run: Run) -> SampledAhead:
    assert run._ahead
    found = run._ahead.kept()
    assert found
    return found


def all_equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


# Whose responses they are


def test_off_by_default() -> None:
    run = run_of(trainer__steps=1)
    assert not run.config.trainer.one_step_off_policy and isinstance(run._collect, Collector)
    metrics, _ = next(run)
    assert "training/off_policy_steps" not in metrics


@pytest.mark.long
@pytest.mark.parametrize("changes", [GRPO, REMAX], ids=["grpo", "remax"])
def test_the_first_step_is_the_one_without(changes: dict[str, Any]) -> None:
    plain, run = (run_of(**changes, **BYPASS, **on, trainer__steps=3) for on in ({}, ON))
    (before, expected), (metrics, batch) = next(plain), next(run)
    assert metrics.pop("training/off_policy_steps") == 0
    generated = ("perf/model_tflops/gen", "perf/real_token_ratio/gen", "perf/per_device_tflops")  # for two steps here
    same = without_clocks([before, metrics])
    one, two = ({name: value for name, value in m.items() if name not in generated} for m in same)
    assert {n: v for n, v in one.items() if "memory" not in n} == {n: v for n, v in two.items() if "memory" not in n}
    all_equal(batch, expected)
    all_equal(run.state(), plain.state())
    (_, expected), (metrics, batch) = next(plain), next(run)
    assert metrics["training/off_policy_steps"] == 1
    np.testing.assert_array_equal(batch.uid, expected.uid)  # the same prompts, answered by another policy
    assert (np.asarray(batch.rollout_log_probs) != np.asarray(expected.rollout_log_probs)).any()


def test_responses_are_of_the_parameters_one_step_before() -> None:
    """The sampler's log-probs are those that the parameters before the last update give, and not the ones after it.
    What is sampled ahead is none of the buffers that updates take over: it is there, as it was, a step later."""
    run = run_of(**WEIGHED, **ON, trainer__steps=4, optimizer__lr=3e-2)
    states, ahead = [run.state()], {}
    for step, (metrics, batch) in enumerate(run):
        assert metrics["training/off_policy_steps"] == min(step, 1)
        if ahead:
            all_equal({name: getattr(batch, name) for name in ahead}, ahead)
        late = [name for name, phase in WRITTEN_BY.items() if phase in ("old_log_prob", "ref", "values", "adv")]
        early = batch.replace(**dict.fromkeys(late))
        mask = np.asarray(batch.response_mask)
        assert run._phases.old_log_prob

        def off(state: Any, early: Batch = early, mask: np.ndarray = mask) -> float:
            """The largest difference to what these parameters say."""
            assert run._phases.old_log_prob
            found = run._phases.old_log_prob(run._program.policy(state), early)
            return float(np.abs(np.asarray(found.old_log_probs) - np.asarray(early.rollout_log_probs))[mask].max())

        assert off(states[max(step - 1, 0)]) < 1e-4
        if step:
            assert off(states[step]) > 1e-2
        states.append(run.state())
        if step < 3:
            ahead = jax.device_get(dict(kept(run).written["gen"]))
    assert run._ahead and run._ahead.kept() is None, "nothing is sampled for a step that never comes"


# What overlaps


@pytest.mark.parametrize("on", [True, pytest.param(False, marks=pytest.mark.long)])
def test_rewards_are_worked_out_while_a_step_updates(tmp_path: Path, on: bool) -> None:
    """The second step's rewards wait for the first step's update, which waits for them to have begun: no clock decides.
    Without sampling ahead nobody would have sampled what they are of."""

    def updating(name: str) -> None:
        if name == "update_actor" and on:
            end = time.monotonic() + 60
            while not (tmp_path / "begun").exists() and time.monotonic() < end:
                time.sleep(0.01)
            (tmp_path / "updating").touch()

    run = run_of(
        **BYPASS,
        trainer__one_step_off_policy=on,
        trainer__steps=2,
        data__train=f"tests.hostile_rewards:waiting_records(folder={str(tmp_path)!r})",
        data__shuffle=False,
        reward__functions=("tests.hostile_rewards:patient",),
        reward__num_workers=1,
        reward__timeout=60.0 if on else 0.5,
    )
    with run, calls(updating):
        assert next(run)[0]["reward/failed_ratio"] == 0
        assert (tmp_path / "begun").exists() == on
        if on:
            assert next(run)[0]["reward/failed_ratio"] == 0
        else:
            with pytest.raises(RunAborted, match="no answer within"):
                next(run)


def test_clocks_and_counts_are_of_what_a_step_does() -> None:
    """The first step samples for two, the last one for none."""
    metrics = [m for m, _ in run_of(**BYPASS, **ON, trainer__steps=3)]
    for name in ("timing_s/gen", "perf/model_tflops/gen"):
        assert [name in m for m in metrics] == [True, True, False]
    assert metrics[0]["perf/model_tflops/gen"] > 1.5 * metrics[1]["perf/model_tflops/gen"]
    for m in metrics:
        phases = {name: s for name, s in m.items() if name.startswith("timing_s/") and name != "timing_s/step"}
        assert sum(phases.values()) <= m["timing_s/step"]
        assert {"timing_s/reward", "timing_s/update_actor"} <= set(phases)
    tokens = 1000 * metrics[1]["timing_s/gen"] / metrics[1]["timing_per_token_ms/gen"]
    assert tokens == pytest.approx(metrics[2]["perf/response_tokens"]), "of those that the third step learns from"


# A run goes on as it would have


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({**GRPO, **BYPASS}, id="grpo"),
        pytest.param({**REMAX, **BYPASS}, id="remax in parts", marks=pytest.mark.long),
        pytest.param({**CURRICULUM, **WEIGHED}, id="curriculum, weighed", marks=pytest.mark.long),
    ],
)
def test_ten_steps_are_five_and_five(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Made longer at its end, which is no multiple of save_interval; and stopped by a signal in between."""
    given = {**changes, **ON, "trainer__save_interval": 3}
    with run_of(tmp_path / "whole", **given, trainer__steps=10) as run:
        assert [m["training/off_policy_steps"] for m, _ in run] == [0] + 9 * [1]
        whole = on_host(run)
    with run_of(tmp_path / "parts", **given, trainer__steps=5) as run:
        for _ in range(2):
            next(run)
        run._guard.signals.received = "SIGTERM"
        with pytest.raises(TryAgain, match="after step 2 of 5; it is saved"):
            next(run)
    for steps, start in ((5, 2), (10, 5)):
        with run_of(tmp_path / "parts", **given, trainer__steps=steps) as run:
            assert run.step == start
            assert [m["training/off_policy_steps"] for m, _ in run] == (steps - start) * [1]
            parts = on_host(run)
    assert digest(parts) == digest(whole)
    lines, expected = (without_clocks(read_jsonl(tmp_path / name / "metrics.jsonl")) for name in ("parts", "whole"))
    assert lines == expected
    for step in range(1, 11):
        one, other = ((tmp_path / name / "rollouts" / f"{step}.jsonl").read_bytes() for name in ("parts", "whole"))
        assert one == other


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    """With it the responses that are under way; without it none."""
    for name, on in (("on", ON), ("off", {})):
        list(run_of(tmp_path / name, **BYPASS, **on, trainer__steps=1, trainer__save_interval=1))
        leaves = Checkpoints(tmp_path / name / "checkpoints").leaves(1)
        found = {leaf for leaf in leaves if leaf.startswith("ahead.")}
        assert found == ({f"ahead.gen.{n}" for n, phase in WRITTEN_BY.items() if phase == "gen"} if on else set())


def test_what_was_sampled_of_other_data_is_left_out(tmp_path: Path) -> None:
    """Its prompts are drawn again, of the data as it is."""
    file = tmp_path / "train.jsonl"
    records = tiny_folder.records()
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    given = {**BYPASS, **ON, "trainer__save_interval": 1, "data__train": str(file), "data__shuffle": False}
    list(run_of(tmp_path / "run", **given, trainer__steps=2))
    file.write_text("".join(json.dumps(record) + "\n" for record in records[:5]))
    ((metrics, batch),) = run_of(tmp_path / "run", **given, trainer__steps=3)
    assert metrics["training/off_policy_steps"] == 0
    np.testing.assert_array_equal(np.asarray(batch.uid)[::4], [8, 9, 10, 11])


# What it is for, and what it is not for


@pytest.mark.long
def test_it_learns() -> None:
    changes = {"reward__functions": ("tests.tiny_folder:starts_with_a_digit",), "optimizer__lr": 3e-3}
    scores = [m["critic/score/mean"] for m, _ in run_of(**BYPASS, **ON, **changes, rollout__n=8, trainer__steps=20)]
    assert np.mean(scores[-3:]) > np.mean(scores[:3]) + 0.2, scores


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "rollout_correction.bypass = False, .*rollout_is = 'none': .* nothing corrects for it"),
        ({**BYPASS, "actor__policy_loss": "gpg"}, "actor.policy_loss = 'gpg': this loss has no ratio"),
        ({**BYPASS, "algorithm__filter_groups__enable": True}, "filter_groups.enable = True: the prompts that replace"),
        (
            {**BYPASS, "rollout__multi_turn__environment": "tests.tiny_folder:counting"},
            "one_step_off_policy = True, config.rollout.multi_turn.environment = '.*': turns would wait",
        ),
    ],
)
def test_rules(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        tiny_folder.config(**ON, **changes)


def test_a_config_that_gains_nothing_is_told() -> None:
    assert [notice[: len(NOTICE)] for notice in notices(tiny_folder.config(**ON, **BYPASS))] == [NOTICE]
    assert not notices(tiny_folder.config(**ON, **BYPASS, reward__num_workers=1))

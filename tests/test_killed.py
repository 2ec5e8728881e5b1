"""Runs that are killed go on as if nothing had been, on other meshes too; and a long one compiles nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.sharding import abstract_like
from jaxrl_llm.trainer import fit
from jaxrl_llm.writers import read_jsonl
from tests import faulty, tiny_folder, tiny_runs
from tests.faulty import digest, start, without_clocks
from tests.tiny_runs import GRPO, compilations

ROOT = Path(__file__).resolve().parents[1]


pytestmark = pytest.mark.usefixtures("compile_once")


def kill_while_saving(tmp_path: Path, times: int) -> None:
    """After each kill the newest checkpoint is whole, and none that was complete is lost."""
    draw, folder, before = np.random.default_rng(0), tmp_path / "checkpoints", 0
    for _ in range(times):
        with start(tmp_path, "save", str(folder)) as process:
            assert process.stdout and process.stdout.readline() == "ready\n"
            deadline = time.monotonic() + 60  # what comes before the first save does not count
            while max(Checkpoints(folder).steps(), default=0) <= before and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 1))
            process.kill()
        step, problems = Checkpoints(folder).newest_good(strict=True)
        assert step is not None and step > before and not problems
        expected = faulty.state_of(step, faulty.SIZE)
        found, meta = Checkpoints(folder).restore(abstract_like(expected), step)
        assert meta == {"step": step} and digest(found) == digest(expected)
        before = step


def test_killed_while_saving(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, times=1)


@pytest.mark.long
def test_killed_while_saving_ten_times(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, times=10)


TEN = {**tiny_runs.PPO, "trainer__steps": 10, "trainer__save_interval": 5, "eval__interval": 5}


@pytest.fixture(scope="module")
def ten_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recipe of ten steps, and the folder of the run that nothing happened to."""
    tmp_path = tmp_path_factory.mktemp("ten")
    recipe, folder = tmp_path / "recipe.py", tmp_path / "whole"
    recipe.write_text(faulty.recipe(TEN | {"model__path": str(tiny_folder.folder())}))
    with start(tmp_path, "train", "none", "0", f"--config={recipe}", f"--workdir={folder}") as process:
        _, told = process.communicate()
    assert process.returncode == 0, told
    return recipe, folder


PHASES = ("data", "update_weights", "gen", "reward", "old_log_prob", "ref", "values", "adv")
PHASES += ("update_critic", "update_actor", "update_reference", "testing", "save_checkpoint", "step")
# In the fifth step a checkpoint is saved, the first one; in the tenth the third comes, and the first goes.
KILLS = [*((phase, 7) for phase in PHASES if phase not in ("testing", "save_checkpoint", "update_reference"))]
KILLS += [("update_reference", 5), ("testing", 9), ("testing", 4), ("save_checkpoint", 9), ("save_checkpoint", 4)]
KILLS += [("checksums", 4), ("newest", 4), ("checksums", 9), ("newest", 9)]


@pytest.mark.long
@pytest.mark.parametrize(("phase", "step"), KILLS, ids=[f"{phase}-{step}" for phase, step in KILLS])
def test_killed_in_a_phase(ten_steps: tuple[Path, Path], tmp_path: Path, phase: str, step: int) -> None:
    """Then resumed: 10 steps are those of the run that nothing happened to, by SHA-256 of state and batches."""
    recipe, whole = ten_steps
    options = [f"--config={recipe}", f"--workdir={tmp_path / 'run'}"]
    with start(tmp_path, "train", phase, str(step), *options) as process:
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    with start(tmp_path, "train", "none", "0", *options) as process:
        _, told = process.communicate()
    assert process.returncode == 0, told
    found, expected = tmp_path / "run", whole
    lines = read_jsonl(found / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(11))
    assert without_clocks(lines) == without_clocks(read_jsonl(expected / "metrics.jsonl"))
    for number in range(1, 11):
        name = f"rollouts/{number}.jsonl"
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    assert state_digest(found, 10) == state_digest(expected, 10)


def state_digest(run: Path, step: int) -> str:
    """Of every leaf in a checkpoint."""
    store = Checkpoints(run / "checkpoints")
    signatures = {name: re.fullmatch(r"(\w+)\[(.*)\]", text) for name, text in store.leaves(step).items()}
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {
        name: jax.ShapeDtypeStruct(tuple(map(int, filter(None, found[2].split(", ")))), found[1], sharding=device)
        for name, found in signatures.items()
        if found
    }
    state, _ = store.restore(target, step)
    return digest(state)


# 13: other meshes


@pytest.mark.long
def test_another_mesh_restores(tmp_path: Path) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    with start(tmp_path, "meshes", str(tmp_path), XLA_FLAGS=flags) as process:
        out, told = process.communicate()
    assert process.returncode == 0, told
    found = json.loads(out.splitlines()[-1])
    saved = found.pop("2x4")[0]
    assert [read for read, _ in found.values()] == 3 * [saved]
    assert len({prompts for _, prompts in found.values()}) == 1


# 20: nothing compiles


@pytest.mark.long
def test_fifty_steps_of_varying_lengths_compile_nothing(tmp_path: Path) -> None:
    """Evaluation, checkpoints and samples among them."""
    often: dict[str, Any] = {"trainer__steps": 50, "trainer__save_interval": 7, "eval__interval": 11}
    with fit(tiny_folder.config(**GRPO, **often), tmp_path) as run:
        next(run)
        with compilations() as events:
            lengths = {tuple(np.asarray(batch.prompt_mask).sum(1).tolist()) for _, batch in run}
    assert not events and len(lengths) > 3
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 51

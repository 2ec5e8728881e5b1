"""The trace of a few steps: that it is there and names the phases, and what is said where there cannot be one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from jaxrl_llm import train
from jaxrl_llm.errors import StorageError, UserError
from jaxrl_llm.profiling import Profile, Steps

RECIPE = """
from tests import tiny_folder

def get_config():
    return tiny_folder.raw_config(**tiny_folder.KL_LOSS, data__eval=(), eval__interval=0, trainer__steps=4)
"""
pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.mark.long
def test_a_trace_names_steps_and_phases(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(RECIPE)
    run = tmp_path / "run"
    given = [f"--config={tmp_path / 'recipe.py'}", f"--workdir={run}"]
    assert train.main([*given, "--profile_steps=2:3"]) == 0
    (trace,) = run.glob("profile/plugins/profile/*/perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    steps = [event["args"]["step_num"] for event in events if event.get("name") == "step"]
    assert sorted(map(int, steps)) == [2, 3]
    for phase in ("data", "update_weights", "gen", "reward", "ref", "adv", "update_actor"):
        assert names.count(phase) >= 2, phase
    told = (run / "events.jsonl").read_text()
    assert f"profile of steps 2 to 3: open {trace}" in told and "https://ui.perfetto.dev" in told
    # Of a run that is done there is nothing to trace, and that is no error.
    assert train.main([*given, "--profile"]) == 0


def test_steps_that_a_run_does_not_have_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for text in ("0", "a", "3:2", "1:", ":4", "1:2:3", "-1"):
        with pytest.raises(UserError, match="--profile_steps="):
            Steps.parse(text)
    for start in (6, 7):
        with pytest.raises(UserError, match=f"this start does steps {start + 1} to 9"):
            Steps(5, start).of_run(start, 9)
    (tmp_path / "recipe.py").write_text(RECIPE)
    assert train.main([f"--config={tmp_path / 'recipe.py'}", "--profile_steps=x"]) == 2
    assert "--profile_steps=x: expected a step" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    with pytest.raises(StorageError, match="profile cannot be written"):
        Profile(Steps(), tmp_path, step=0, total=9, note=print)


def test_a_trace_that_cannot_be_written_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    told: list[str] = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda *args, **kwargs: None)
    monkeypatch.setattr("jax.profiler.stop_trace", full)
    profile = Profile(Steps(1, 1), tmp_path, step=0, total=9, note=told.append)
    profile.before(1)
    profile.after(1)
    profile.close()  # a second time there is nothing to write
    assert told == ["the profile is not written: OSError: [Errno 28] No space left on device"]

"""`--dry_run` of the trainer: all is checked and compiled, no weight is read, nothing is written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxrl_llm.dry_run import DryRun, dry_run, shard_bytes
from jaxrl_llm.errors import UserError
from jaxrl_llm.train import main
from jaxrl_llm.trainer import fit
from tests import tiny_folder

RECIPE = """
from tests import tiny_folder

def get_config():
    return tiny_folder.raw_config(model__path={path!r})
"""


@pytest.fixture(autouse=True)
def compiled_once() -> Iterator[None]:
    with tiny_folder.compile_once():
        yield


def without_weights(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors*")))


def assert_counted(said: list[str]) -> None:
    """Each program is told as it begins, with its number of all, and that it is ready."""
    begun = [line for line in said if line.startswith("compiling ")]
    assert [line.rpartition(" (")[2] for line in begun] == [f"{i + 1} of {len(begun)})" for i in range(len(begun))]
    assert sum(line.startswith("compiled ") for line in said) == len(begun) + 1
    assert said[-1].startswith(f"compiled {len(begun)} programs in ")


def phase_names(run: DryRun) -> set[str]:
    return {phase.name for phase in run.phases}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--device_memory=3"], "--device_memory=3: is for --dry_run to compare with"),
        (["--device_memory=-1", "--dry_run"], "--device_memory=-1: expected GB of one device, above 0"),
        (["--device_memory=nan", "--dry_run"], "--device_memory=nan: expected GB"),
    ],
)
def test_a_devices_memory_is_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], expected: str
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(path=str(tiny_folder.folder())))
    assert main(["--config", str(recipe), *given]) == 2
    assert expected in capsys.readouterr().err


def test_the_command_needs_no_weights_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(path=str(without_weights(tiny_folder.folder(), tmp_path / "model"))))
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert main(["--config", str(recipe), "--workdir", str(tmp_path / "run"), "--dry_run"]) == 0
    text = capsys.readouterr().out
    assert "compiled update_actor in" in text and "collectives: none" in text
    assert_counted([line for line in text.splitlines() if line.startswith("compil")])
    assert "one device of data=1 fsdp=1 tensor=1 (1 device): memory" in text
    assert "(a device's memory is not known here: --device_memory GB)" in text
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)] == before


def test_what_does_not_fit_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(path=str(tiny_folder.folder())))
    assert main(["--config", str(recipe), "--dry_run", "--device_memory", "0.0001"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("peak: 0.00") and "of a device's 0.0 GB: DOES NOT FIT" in last


def test_what_is_wrong_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(path=str(tiny_folder.folder())))
    assert main(["--config", str(recipe), "--dry_run", "--config.data.train=nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"12 of 12 prompts are longer than rollout\.prompt_length = 4"):
        dry_run(tiny_folder.config(rollout__prompt_length=4), report=lambda text: None)


@pytest.mark.long
def test_it_says_what_a_run_then_holds() -> None:
    """PPO with a reward model beside the functions, on the trainer's own state."""
    given = {"algorithm__estimator": "gae", "algorithm__use_kl_in_reward": True, "eval__temperature": 1.0}
    reward = {"reward__model__path": str(tiny_folder.reward_folder()), "eval__n": 2, "eval__greedy": True}
    config, said = tiny_folder.config(**given, **reward), list[str]()
    found = dry_run(config, report=said.append)
    assert_counted(said)
    assert {"gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"} <= phase_names(found)
    assert {"testing, greedy", "testing, sampled", "reward_model"} <= phase_names(found)
    with fit(config) as run:
        state = run._state
        parts = {"actor: parameters": state.actor.params, "actor: moments": state.actor.opt_state}
        parts |= {"critic: parameters": state.critic.params, "reference": state.reference} if state.critic else {}
        assert {name: found.held[name] for name in parts} == {name: shard_bytes(x) for name, x in parts.items()}
        assert found.state == shard_bytes(state) + found.held["reward model"]
    phases = {phase.name: phase for phase in found.phases}
    updated = phases["update_actor"]
    # The state is taken over, so that what is new is but metrics; nothing of it is counted twice.
    assert updated.alias >= shard_bytes(state.actor) - 8 and updated.peak < found.state + 2 * updated.temp
    assert found.highest.peak == max(phase.peak for phase in found.phases) > found.state
    assert phases["gen"].token_flops > 0 == phases["ref"].token_flops


@pytest.mark.long
def test_lora_and_turns_are_known() -> None:
    lora = {"model__lora_rank": 2, "model__quantize_base": "int8", **tiny_folder.KL_LOSS}
    turns = {
        "rollout__multi_turn__environment": "tests.tiny_folder:counting",
        "rollout__multi_turn__max_assistant_turns": 2,
        "rollout__multi_turn__max_observation_length": 6,
        "rollout__response_length": 20,
    }
    said: list[str] = []
    found = dry_run(tiny_folder.config(**lora, **turns), report=said.append)
    assert_counted(said)
    assert found.held["frozen base"] > found.held["actor: parameters"] > 0 == found.held["reference"]
    assert {"gen, begin", "gen, go_on", "gen, finish", "testing, begin"} <= phase_names(found)

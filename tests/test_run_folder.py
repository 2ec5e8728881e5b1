"""What a run finds in its folder, and what happens around it: none of that may cost a run, or go unsaid."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm import train, writers
from jaxrl_llm.checkpoint import EXPORTED, Checkpoints
from jaxrl_llm.errors import TryAgain, UserError
from jaxrl_llm.memory import tell_of_killed
from jaxrl_llm.run_files import LOCK
from jaxrl_llm.run_mark import Killed, RunMark
from jaxrl_llm.signals import StopSignals
from jaxrl_llm.trainer import fit
from jaxrl_llm.writers import RunWriter, read_jsonl
from tests import faulty, tiny, tiny_folder
from tests.tiny_runs import GRPO, Watched

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("compile_once")


def notes(folder: Path) -> list[str]:
    return [row["text"] for row in read_jsonl(folder / "events.jsonl") if row["kind"] == "note"]


def open_run(folder: Path, resumed_step: int = -1, progress: str = "none") -> RunWriter:
    config = tiny.config(logging__progress=progress, logging__report=False)
    return RunWriter(folder, config, total_steps=9, resumed_step=resumed_step)


# Lines of JSON

LINES = [json.dumps({"step": step}).encode() for step in (1, 2, 3)]
DAMAGE = {
    "cut": b'{"st',
    "zeros, as a power cut leaves them": bytes(40),
    "no text": b'{"step": "\xff\xfe"}',
    "no step": b'{"a": 1}',
    "no object": b"[1]",
}


@pytest.mark.parametrize("damaged", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_line_is_told_and_the_others_stay(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([LINES[0], damaged, *LINES[1:], b'{"step": 4, "cr']))
    before = path.read_bytes()
    with open_run(tmp_path, resumed_step=3) as run:
        run.step(4, {"a": 1})
    assert [row["step"] for row in read_jsonl(path)] == [1, 2, 3, 4]
    assert (tmp_path / "damaged-metrics.jsonl").read_bytes() == before
    assert [text for text in notes(tmp_path) if "1 of 4 lines are damaged, the first: 2" in text]


def test_a_damaged_log_ends_no_run(tmp_path: Path) -> None:
    """Not even by way of the report, which reads it."""
    (tmp_path / "events.jsonl").write_text("{broken\n")
    with open_run(tmp_path, resumed_step=0):
        pass
    assert [row["kind"] for row in read_jsonl(tmp_path / "events.jsonl")] == ["start", "note", "end"]


def test_lines_that_are_missing_are_told(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(LINES[0] + b"\n" + LINES[2])  # the last one cut by its end of line
    with open_run(tmp_path, resumed_step=3):
        pass
    assert (
        f"notice: {tmp_path}/metrics.jsonl lacks 2 of 3 lines, the first of step 2; the run goes on without"
        in notes(tmp_path)
    )


def test_a_report_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with RunWriter(tmp_path, tiny.config(logging__progress="none"), total_steps=2, resumed_step=0) as run:
        run.step(1, {})
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1}]
    assert "report.html is not written: StorageError: " in "".join(notes(tmp_path))


# What people put there


def test_copies_that_people_make_are_no_steps(grpo: Watched, tmp_path: Path) -> None:
    run = tmp_path / "a folder of José's, 日本"
    shutil.copytree(grpo.folder, run)
    for name in ("4.bak", "4 (copy)", "04x"):
        shutil.copytree(run / "checkpoints" / "4", run / "checkpoints" / name)
    (run / "checkpoints" / "9").write_text("a file")
    shutil.copy(run / "rollouts" / "4.jsonl", run / "rollouts" / "4 (copy).jsonl")
    (tmp_path / "link").symlink_to(run)
    with fit(grpo.config, tmp_path / "link") as resumed:
        assert resumed.step == 4
    assert Checkpoints(run / "checkpoints").steps() == [2, 4]
    assert (run / "checkpoints" / "4.bak").is_dir() and (run / "rollouts" / "4 (copy).jsonl").exists()


UNUSABLE = {
    "a file": "is a file; expected a folder",
    "dangling": "links to .*nowhere.*, and nothing is there",
    300 * "x": "File name too long",
    "\udcc3\udcbc": "not UTF-8",
    "run": "checkpoints in it is a file",
    "exported": "model in it is a file",
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_can_be_no_runs_folder_is_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "a file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for folder, file in (("run", "checkpoints"), ("exported", "model")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("")
    with pytest.raises(UserError, match=f"^--workdir .*{UNUSABLE[name]}"):
        fit(tiny_folder.config(trainer__export=name == "exported"), tmp_path / name)


@pytest.mark.parametrize("text", [None, "", "[1]", "null", '{"seed": '])
def test_a_config_that_is_lost_is_that_of_the_newest_checkpoint(
    grpo: Watched, tmp_path: Path, text: str | None
) -> None:
    shutil.copytree(grpo.folder, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match="another configuration"):
        fit(tiny_folder.config(**GRPO, seed=7), tmp_path / "run")
    with fit(grpo.config, tmp_path / "run") as run:
        assert run.step == 4
    assert path.read_bytes() == (grpo.folder / "config.json").read_bytes()
    assert "notice: the configuration is that of the newest checkpoint" in "".join(notes(tmp_path / "run"))


def test_what_a_full_disk_leaves_of_a_start_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.json.tmp", LOCK):
        (tmp_path / name).write_text("{")
    assert writers.previous_config(tmp_path) is None
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match=r"holds no run \(no config.json\) but notes.txt; "):
        writers.previous_config(tmp_path)


def test_other_data_is_told(grpo: Watched, tmp_path: Path) -> None:
    for name, source, expected in (
        ("same", "records", None),
        ("fewer", "records(count=9)", "12 prompts then, 9 now"),
        ("other", "records(skip=1)", "as many prompts, of other tokens"),
    ):
        shutil.copytree(grpo.folder, tmp_path / name)
        config = tmp_path / name / "config.json"
        named = f"tests.tiny_folder:{source}"
        config.write_text(config.read_text().replace('"tests.tiny_folder:records"', json.dumps(named)))
        with fit(tiny_folder.config(**GRPO, data__train=named), tmp_path / name):
            pass
        told = [text for text in notes(tmp_path / name) if "is not what it was at step 4" in text]
        assert len(told) == (expected is not None) and (expected or "") in "".join(told)


def test_a_model_whose_export_was_cut_off_is_exported(grpo: Watched, tmp_path: Path) -> None:
    shutil.copytree(grpo.folder, tmp_path / "run")
    weights = tmp_path / "run" / "model" / "model.safetensors"

    def written_at() -> int:
        with fit(tiny_folder.config(**GRPO, trainer__export=True), tmp_path / "run") as run:
            list(run)
        return weights.stat().st_mtime_ns

    first = written_at()
    assert written_at() == first  # and not again
    os.utime(weights.with_name("config.json"), (0, 0))  # a clock that was set back, or a copy, tells nothing
    assert written_at() == first
    (tmp_path / "run" / "checkpoints" / EXPORTED).write_text("3\n")  # of the run when it was shorter
    assert written_at() > first


# Several processes, and killed ones

HOLD = (
    "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A run's folder that another process writes."""
    where = json.dumps({"process": "process 7 on elsewhere", "phase": "gen", "step": 3, "held": 0})
    (tmp_path / LOCK).write_text(where)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / LOCK], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout and process.stdout.readline() == "held\n"
        yield tmp_path
        process.kill()


def test_a_folder_belongs_to_one_process_at_a_time(grpo: Watched, held: Path, capsys: Any) -> None:
    shutil.copytree(grpo.folder, held, dirs_exist_ok=True, ignore=lambda *_: [LOCK])
    recipe, before = held.with_name("recipe.py"), sorted(held.rglob("*"))
    recipe.write_text(faulty.recipe(GRPO))
    assert train.main([f"--config={recipe}", f"--workdir={held}"]) == 75
    assert "another process (process 7 on elsewhere) writes this run; one at a time can" in capsys.readouterr().err
    assert sorted(held.rglob("*")) == before


def test_what_a_killed_process_leaves_tells_where_it_was(tmp_path: Path) -> None:
    first = RunMark(tmp_path)
    assert first.killed is None
    first.at(12, "update_actor")  # and no more
    second = RunMark(tmp_path)
    assert second.killed and (second.killed.step, second.killed.phase) == (12, "update_actor")
    assert second.killed.process.startswith(f"process {os.getpid()} on ") and second.killed.held > 1 << 20
    second.close()
    assert (tmp_path / LOCK).read_bytes() == b""
    assert RunMark(tmp_path).killed is None


def test_who_held_much_memory_may_have_been_killed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrl_llm.memory.host_memory", lambda: 16 << 30)
    little, much = (
        tell_of_killed(tiny.config(), Killed("process 7 on a", "update_actor", 12, size))
        for size in (1 << 30, 15 << 30)
    )
    assert little == (
        "process 7 on a ended without a word in update_actor with step 12 done; it had held up to 1.00 GiB of "
        "16.00 GiB of memory"
    )
    assert "what takes less: actor.micro_batch_size, model.remat, model.param_dtype" in much


@pytest.mark.parametrize("text", ["{", "[]", '{"process": 1}', "\0\0"])
def test_a_damaged_mark_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text)
    assert RunMark(tmp_path).killed is None


def test_two_processes_that_begin_at_once(held: Path) -> None:
    with pytest.raises(TryAgain):
        RunMark(held)


# Where nobody listens any more


class Gone:
    encoding = "utf-8"

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        raise BrokenPipeError("nobody reads")

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("stdout", [Gone(), None], ids=["broken", "none"])
def test_a_run_that_nobody_watches_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdout: Any) -> None:
    monkeypatch.setattr(sys, "stdout", stdout)
    with open_run(tmp_path, progress="plain") as run:
        run.samples(1, [{"prompt": "a", "response": "b"}])
        run.step(1, {"a": 1})
    monkeypatch.undo()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1}]
    told = "progress is no longer shown: BrokenPipeError: nobody reads"
    assert notes(tmp_path) == ([told] if stdout else [])


ENDS = """
import sys
from jaxrl_llm.errors import exit_code, leave, say
def body():
    with open(sys.argv[1], "w") as file:
        for _ in range(20_000):
            say("said")
        file.write("written")
leave(exit_code(body))
"""


@pytest.mark.parametrize("how", ["exec {} >&-", "exec {} >&- 2>&- <&-", "{} | head -1 >&2; exit ${{PIPESTATUS[0]}}"])
def test_what_is_said_goes_nowhere_else(tmp_path: Path, how: str) -> None:
    """A closed stream's number is not taken by a file; a pipe that is closed changes no exit code."""
    command = how.format(f"{sys.executable} -W error -c '{ENDS}' {tmp_path / 'file'}".replace('"', '"'))
    ran = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0 and (tmp_path / "file").read_text() == "written", ran.stderr
    assert "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr


def test_a_terminal_that_is_closed_asks_to_stop_unless_that_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        for ignored in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGHUP, ignored)
            stop = StopSignals()
            with stop.installed():
                stop.stepping = True
                os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received == ("" if ignored is signal.SIG_IGN else "SIGHUP")
            assert signal.getsignal(signal.SIGHUP) is ignored
    finally:
        signal.signal(signal.SIGHUP, before)

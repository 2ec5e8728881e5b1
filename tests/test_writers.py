"""What a run leaves behind, and what a person sees."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import io
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from configs import base
from jaxrl_llm import live, meters, progress, writers
from jaxrl_llm.config import Config, from_config_dict, to_json
from jaxrl_llm.errors import StorageError, UserError


def make_config(eval_data: tuple[str, ...] = (), **logging: Any) -> Config:
    raw = base.get_config()
    raw.model.path, raw.data.train, raw.reward.functions = "m", "t.jsonl", "number"
    raw.data.eval = eval_data
    raw.logging.update({"name": "trial", "progress": "none", **logging})
    return from_config_dict(raw)


def open_run(workdir: Path, resumed_step: int = -1, **logging: Any) -> writers.RunWriter:
    return writers.RunWriter(workdir, make_config(**logging), total_steps=10, resumed_step=resumed_step)


def test_metrics_are_valid_json_line_by_line(tmp_path: Path):
    with open_run(tmp_path) as run:
        run.step(1, {"a": jnp.array(0.1, jnp.float32), "b": float("nan"), "c": float("inf"), "n": np.int32(3)})
        assert (tmp_path / "metrics.jsonl").read_text().endswith("\n")  # flushed before the run is closed
        run.step(2, {"a": 1.0})
    lines = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines == [{"step": 1, "a": float(np.float32(0.1)), "b": None, "c": None, "n": 3}, {"step": 2, "a": 1.0}]


def test_resume_leaves_each_step_once(tmp_path: Path):
    with open_run(tmp_path) as run:
        for step in range(6):
            run.step(step, {"a": step})
            run.samples(step, [{"prompt": "p", "response": f"{step}\n\u2028", "score": 1.0}])
            run.rollouts(step, [{"response": "r"}])
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 6, "a"')  # killed in the middle of a line
    with open_run(tmp_path, resumed_step=3) as run:
        run.step(4, {"a": 40})
    rows = writers.read_jsonl(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["a"]) for row in rows] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]
    assert [row["step"] for row in writers.read_jsonl(tmp_path / "samples.jsonl")] == [0, 1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [f"{step}.jsonl" for step in range(4)]


def test_a_fresh_start_sets_the_old_files_aside(tmp_path: Path):
    for value in (1, 2, 3):
        with open_run(tmp_path) as run:
            run.step(0, {"a": value})
            run.rollouts(1, [])
    for name, value in (("earlier-1", 1), ("earlier-2", 2), ("", 3)):
        assert writers.read_jsonl(tmp_path / name / "metrics.jsonl") == [{"step": 0, "a": value}]
        assert (tmp_path / name / "rollouts" / "1.jsonl").exists() and (tmp_path / name / "config.json").exists()


def test_any_text_survives(tmp_path: Path):
    text = "\ud800 \u2028 \x00 \r\n é 字"
    with open_run(tmp_path) as run:
        run.samples(1, [{"response": text}])
    assert writers.read_jsonl(tmp_path / "samples.jsonl") == [{"step": 1, "response": text}]


def test_rollouts(tmp_path: Path):
    row = {"response": "é", "advantages": np.array([0.5, np.nan], np.float32), "ids": jnp.arange(2), "raw": b"x"}
    with open_run(tmp_path) as run:
        run.rollouts(3, iter([row]))
        run.rollouts(3, iter([row]))  # a resumed run writes the step again
    (written,) = writers.read_jsonl(tmp_path / "rollouts" / "3.jsonl")
    assert written == {"step": 3, "response": "é", "advantages": [0.5, None], "ids": [0, 1], "raw": "b'x'"}


def test_config_of_a_run_comes_back(tmp_path: Path):
    assert writers.previous_config(tmp_path) is None
    with open_run(tmp_path):
        assert writers.previous_config(tmp_path) == make_config()
    (tmp_path / "config.json").write_text(to_json(make_config()).replace('"gamma": 1.0', '"gamma": 2.0'))
    with pytest.raises(UserError, match=r"config\.json: .*\n.*algorithm\.gamma: must be in \[0, 1\]"):
        writers.previous_config(tmp_path)


def test_when_samples_are_wanted(tmp_path: Path):
    with open_run(tmp_path) as run:
        assert [step for step in range(1, 11) if run.wants_samples(step)] == [1, 10]
    config = make_config()
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, sample_interval=0))
    with writers.RunWriter(tmp_path, config, total_steps=10) as run:
        assert not any(run.wants_samples(step) for step in range(11))


# Loggers


def test_tensorboard_holds_the_scalars(tmp_path: Path):
    with open_run(tmp_path, tensorboard=True) as run:
        run.step(1, {"critic/score/mean": 0.5})
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"critic/score/mean" in events.read_bytes()


@pytest.mark.parametrize(
    ("key", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("trackio", "trackio")]
)
def test_a_missing_logger_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, package: str
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=f"config.logging.{key} = True: {package} is not installed\n.*install {package}"
    ):
        open_run(tmp_path / "run", **{key: True})
    assert not (tmp_path / "run").exists()


class FakeLogger(types.ModuleType):
    """Stands for wandb and for trackio: what it was called with, and what each of its runs holds."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.inits: list[dict[str, Any]] = []
        self.runs: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        self.broken = ""  # a method that fails
        self.finished = 0

    def init(self, **options: Any) -> FakeLogger:
        if self.broken == "init":
            raise ConnectionError("no key")
        self.inits.append(options)
        self._steps = self.runs.setdefault(options.get("id") or options["name"], [])
        return self

    def log(self, numbers: dict[str, Any], *, step: int) -> None:
        if self.broken == "log":
            raise ConnectionError("no network")
        self._steps.append((step, numbers))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture(params=["wandb", "trackio"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeLogger:
    module = FakeLogger(request.param)
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def test_a_logger_gets_each_step_once_also_after_a_resume(tmp_path: Path, fake: FakeLogger):
    """Steps 4 and 5 came after the checkpoint of step 3 that the run resumes from; the logger has them already."""
    options = {fake.__name__: True, "project": "sums"}
    with open_run(tmp_path, **options) as run:
        for step in range(6):
            run.step(step, {"a": step})
    with open_run(tmp_path, resumed_step=3, **options) as run:
        for step in range(4, 8):
            run.step(step, {"a": step})
    (steps,) = fake.runs.values()
    assert steps == [(step, {"a": step}) for step in range(8)] and fake.finished == 2
    first, second = fake.inits
    assert first == second and first["project"] == "sums" and first["resume"] == "allow" and "trial" in first["name"]
    assert first["config"]["rollout"]["n"] == 8 and "mode" not in first
    with open_run(tmp_path, **options) as run:  # anew in the same folder: another run
        run.step(0, {"a": 0})
    assert len(fake.runs) == 2 and (tmp_path / "earlier-1" / "loggers.json").exists()


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake = FakeLogger("wandb")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    open_run(tmp_path, wandb=True, offline=True).close()
    assert fake.inits[0]["mode"] == "offline" and fake.inits[0]["dir"] == str(tmp_path)


def test_a_logger_that_cannot_start_is_a_user_error(tmp_path: Path, fake: FakeLogger):
    fake.broken = "init"
    with pytest.raises(UserError, match=f"config.logging.{fake.__name__} = True: ConnectionError: no key"):
        open_run(tmp_path, **{fake.__name__: True})


def test_a_logger_that_fails_later_ends_no_run(tmp_path: Path, fake: FakeLogger):
    with open_run(tmp_path, **{fake.__name__: True}) as run:
        run.step(1, {"a": 1})
        fake.broken = "log"
        for step in (2, 3):
            run.step(step, {"a": step})
    assert [row["step"] for row in writers.read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    notes = [row["text"] for row in writers.read_jsonl(tmp_path / "events.jsonl") if row["kind"] == "note"]
    assert notes == [f"logging.{fake.__name__} is given up: ConnectionError: no network"]


def test_unwritable_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        open_run(tmp_path / "file" / "run")


METRICS = {
    "critic/score/mean": 0.25,
    "response_length/mean": 12.0,
    "perf/time_per_step": 2.0,
    "perf/total_num_tokens": 3000,
    "actor/ppo_kl": float("nan"),
    "actor/entropy": 1.5,
    "response/truncated_ratio": 0.25,
}


def test_plain_lines():
    stream = io.StringIO()
    display = progress.PlainDisplay("trial", 10, 5, stream)
    for step in range(1, 11):
        evaluated = {"val-core/sums/reward/mean@1": 0.5, "val-aux/sums/failed_ratio": 0.25}
        display.step(step, METRICS if step != 7 else METRICS | evaluated)
    lines = stream.getvalue().splitlines()
    numbers = "reward 0.250  entropy 1.500  length 12.0  truncated 25.0%  s/step 2.00  tokens/s 1,500"
    assert lines == [
        "run trial: 10 steps",
        f"step  5/10  {numbers}  left 10s",
        f"step  7/10  {numbers}  eval sums 0.500 (the reward failed on 25%, which count as 0)  left 6s",
        f"step 10/10  {numbers}",
    ]


def test_time_left_ignores_the_step_that_compiles():
    left = meters.TimeLeft(100)
    assert left.after(0, {"val-core/sums/reward/mean@1": 0.5}) == ""
    assert left.after(1, {"perf/time_per_step": 300.0}) == ""
    assert left.after(2, {"perf/time_per_step": 1.0, "timing_s/step": 2.0}) == "3m16s"  # evaluation takes time too


SAMPLES = [{"prompt": "[bold]1+1?", "response": "2 [/red]" + "x" * 2000, "score": 1.0, "length": 3}]


def test_plain_samples():
    stream = io.StringIO()
    progress.PlainDisplay("trial", 10, 1, stream).samples(3, SAMPLES)
    text = stream.getvalue()
    assert "sample of step 3  score 1.00  length 3" in text
    assert "'[bold]1+1?'" in text
    stream = io.StringIO()
    progress.PlainDisplay("trial", 10, 1, stream).samples(3, [{"prompt": "p", "response": "r", "valid": False}])
    assert "sample of step 3  score failed" in stream.getvalue()
    assert len(text) < 1200


def test_plain_text_is_harmless():
    """What a terminal would obey, and what the stream cannot say."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="latin-1", write_through=True)
    display = progress.PlainDisplay("trial", 10, 1, stream)
    display.note("a\x1b]0;title\x07 \ud800 字 é")
    display.samples(1, [{"prompt": "p", "response": "\x1b[2J \ud800 字", "score": 1.0}])
    display.close(["the end 字"])
    text = raw.getvalue().decode("latin-1")
    assert "\x1b" not in text and "\\ud800" in text and "é" in text and "the end \\u5b57" in text


def test_a_meter_of_small_numbers():
    kl = next(meter for meter in meters.METERS if meter.label == "kl")
    assert [kl.text(value) for value in (0.0, 0.01234, -3e-6)] == ["0.0000", "0.0123", "-3e-06"]
    # With one update a batch it is 0 by construction, which is not worth a line.
    assert kl.value({"actor/ppo_kl": 0.0}) is None and kl.value({"actor/ppo_kl": 0.5}) == 0.5


def test_rich_display_shows_text_as_it_is(capsys: pytest.CaptureFixture[str]):
    display = progress.make_display("rich", name="tri[bold]al", total_steps=10, log_interval=1)
    display.step(3, METRICS | {"val-core/sums/reward/mean@1": 0.5})
    display.samples(3, [*SAMPLES, {"prompt": "\ud800", "response": "\x1b[2J", "score": None, "finish_reason": "stop"}])
    display.note("a note with [brackets]\x1b[31m")
    display.close(["eval: [sums]"])
    text = capsys.readouterr().out
    evaluated = "eval sums 0.500"
    for expected in (
        "tri[bold]al",
        "3/10",
        "0.250",
        evaluated,
        "[bold]1+1?",
        "[/red]x",
        "[brackets]␛[31m",
        "[sums]",
        "␛[2J",
    ):
        assert expected in text
    assert "\x1b[2J" not in text


@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_board_fits_its_terminal(width: int):
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    board = live.Board("trial", 500)
    console.print(board)  # before the first step
    score = {"val-core/sums/reward/mean@1": 0.5, "val-aux/sums/reward/low95": 0.4, "val-aux/sums/reward/high95": 0.6}
    timing = {"timing_s/gen": 3.0, "timing_s/update_actor": 1.0, "timing_s/step": 4.0}
    for step in range(300):
        found = METRICS | timing | {"critic/score/mean": step / 300}
        board.step(step, (score if step % 50 == 0 else {}) | (found if step else {}))
    console.print(board)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    if width >= 80:
        text = "\n".join(lines)
        reward = next(line for line in lines if "reward" in line)
        assert "0.997" in reward and "▁" in reward and "█" in reward
        assert "gen 75%" in text and "update_actor 25%" in text and "left" in text
        assert "sums 0.500 [0.400, 0.600]" in text and "at step 250" in text


def test_the_last_lines_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    score = {"val-core/sums/reward/mean@1": 0.2, "val-aux/sums/problems": 100}
    known = {"val-aux/sums/reward/low95": 0.62, "val-aux/sums/reward/high95": 0.79}
    folder = tmp_path / "a run"
    (folder / "checkpoints" / "10").mkdir(parents=True)
    (folder / "checkpoints" / "12").mkdir()  # of a save that was interrupted
    (folder / "checkpoints" / "10" / "checksums.json").touch()
    with open_run(folder, progress="plain", eval_data=("e.jsonl",)) as run:
        run.step(0, score)
        run.step(10, score | {"val-core/sums/reward/mean@1": 0.71} | known)
    held_out = "eval: sums 0.200 before, 0.710 [0.620, 0.790] after step 10 (100 problems)"
    assert capsys.readouterr().out.splitlines()[-4:] == [
        held_out,
        f"report: {folder}/report.html",
        f"checkpoint: {folder}/checkpoints/10",
        f"next: python -m jaxrl_llm.evaluate --run '{folder}'",
    ]
    with open_run(folder, progress="plain") as run:
        run.step(10, score | {"val-aux/sums/failed_ratio": 0.5, "val-aux/sums/brief/mean@1": 0.75})
        run.step(11, {"critic/score/mean": 0.0, "reward/failed_ratio": 0.25})
    shown = capsys.readouterr().out
    assert "(100 problems); brief 0.750; the reward failed on 50.0% of the responses, which count as 0" in shown
    assert "the reward failed on 25.0% of the responses in training (events.jsonl tells why)" in shown
    with open_run(folder, resumed_step=5, progress="plain") as run:
        run.step(6, {"a": 1})
    assert capsys.readouterr().out.splitlines()[-1] == f"to go on: the same command again, with --workdir '{folder}'"


def test_display_by_kind(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def kind(name: str) -> str:
        return type(progress.make_display(name, name="trial", total_steps=1, log_interval=1)).__name__

    assert [kind("none"), kind("plain"), kind("auto")] == ["NoDisplay", "PlainDisplay", "PlainDisplay"]
    assert capsys.readouterr().out == "run trial: 1 steps\n" * 2
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert kind("rich") == "PlainDisplay"

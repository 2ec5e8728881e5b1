"""What a run leaves behind, and what a person sees."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from jaxrl_llm import progress, writers
from jaxrl_llm.config import Config, from_config_dict, to_json
from jaxrl_llm.errors import StorageError, UserError


def make_config(**logging: Any) -> Config:
    raw = base.get_config()
    raw.model.path, raw.data.train, raw.reward.functions = "m", "t.jsonl", "number"
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


def test_a_broken_line_is_named(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(StorageError, match=r"metrics\.jsonl:2: not JSON"):
        open_run(tmp_path, resumed_step=3)


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


def test_tensorboard_holds_the_scalars(tmp_path: Path):
    with open_run(tmp_path, tensorboard=True) as run:
        run.step(1, {"critic/score/mean": 0.5})
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"critic/score/mean" in events.read_bytes()


def test_missing_tensorboard_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install tensorboardX"):
        open_run(tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()


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
}


def test_plain_lines():
    stream = io.StringIO()
    display = progress.PlainDisplay("trial", 10, 5, stream)
    for step in range(1, 11):
        display.step(step, METRICS if step != 7 else METRICS | {"val-core/sums/reward/mean@1": 0.5})
    lines = stream.getvalue().splitlines()
    numbers = "reward 0.250  length 12.0  s/step 2.00  tokens/s 1,500"
    assert lines == [
        "run trial: 10 steps",
        f"step  5/10  {numbers}  left 10s",
        f"step  7/10  {numbers}  val-core/sums/reward/mean@1 0.500  left 6s",
        f"step 10/10  {numbers}",
    ]


def test_time_left_ignores_the_step_that_compiles():
    left = progress.TimeLeft(100)
    assert left.after(1, 300.0) == ""
    assert left.after(2, 1.0) == "1m38s"


SAMPLES = [{"prompt": "[bold]1+1?", "response": "2 [/red]" + "x" * 2000, "score": 1.0, "length": 3}]


def test_plain_samples():
    stream = io.StringIO()
    progress.PlainDisplay("trial", 10, 1, stream).samples(3, SAMPLES)
    text = stream.getvalue()
    assert "sample of step 3  score 1.00  length 3" in text
    assert "'[bold]1+1?'" in text
    assert len(text) < 1200


def test_rich_display_shows_text_as_it_is(capsys: pytest.CaptureFixture[str]):
    display = progress.make_display("rich", name="trial", total_steps=10, log_interval=1)
    display.step(3, METRICS | {"val-core/sums/reward/mean@1": 0.5})
    display.samples(3, SAMPLES)
    display.note("a note with [brackets]")
    display.close()
    text = capsys.readouterr().out
    evaluated = "val-core/sums/reward/mean@1 0.500"
    for expected in ("trial", "3/10", "0.250", evaluated, "[bold]1+1?", "[/red]x", "a note with [brackets]"):
        assert expected in text


def test_display_by_kind(capsys: pytest.CaptureFixture[str]):
    def kind(name: str) -> str:
        return type(progress.make_display(name, name="trial", total_steps=1, log_interval=1)).__name__

    assert [kind("none"), kind("plain"), kind("auto")] == ["NoDisplay", "PlainDisplay", "PlainDisplay"]
    assert capsys.readouterr().out == "run trial: 1 steps\n" * 2

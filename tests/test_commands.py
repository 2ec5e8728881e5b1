"""The commands, from their arguments to their exit codes and what they leave behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm import evaluate, train
from jaxrl_llm.command_line import load_config
from jaxrl_llm.writers import read_jsonl
from tests import tiny_folder
from tests.tiny_runs import checkpointed

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """
from tests import tiny_folder

def get_config():
    return tiny_folder.raw_config(
        **tiny_folder.KL_LOSS, logging__name="", trainer__steps=2, trainer__save_interval=1
    )
"""


@pytest.fixture(scope="module", autouse=True)
def _compile_once() -> Iterator[None]:
    with tiny_folder.compile_once():
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "sums.py"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def run(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "sums"
    assert train.main([f"--config={recipe}", f"--workdir={folder}"]) == 0
    return folder


class Ran:
    """What a command did."""

    def __init__(self, code: int, captured: Any) -> None:
        self.code, self.out, self.err = code, captured.out, captured.err


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(main: Any, *arguments: str) -> Ran:
        capsys.readouterr()
        return Ran(main(arguments), capsys.readouterr())

    return call


# train


def test_train_writes_a_run_and_resumes_it(command: Any, recipe: Path, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    shutil.copytree(run, folder)
    assert json.loads((folder / "config.json").read_text())["logging"]["name"] == "sums"
    ran = command(
        train.main,
        f"--config={recipe}",
        f"--workdir={folder}",
        "--config.trainer.steps=3",
        "--config.logging.progress=plain",
    )
    assert (ran.code, ran.err) == (0, "")
    assert "resumed from step 2" in ran.out and "compiling the phases" in ran.out and "step 3/3" in ran.out
    assert f"done: {folder} holds metrics.jsonl" in ran.out
    assert [line["step"] for line in read_jsonl(folder / "metrics.jsonl")] == [0, 1, 2, 3]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["2", "3", "newest"]


def test_train_names_a_folder_itself(
    command: Any, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = ["--config.data.train=jaxrl_llm.tasks:addition(digits=1)", "--config.reward.functions=last_integer"]
    ran = command(train.main, f"--config={recipe}", *task, "--config.trainer.steps=1", "--config.eval.before=False")
    assert ran.code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"sums-\d{8}-\d{6}", folder.name) and (folder / "config.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config.trainer.step=3"], "config.trainer.step: no such key; did you mean 'trainer.steps'?"),
        (["config.trainer.steps=3"], "config.trainer.steps=3 has no dashes: write --config.trainer.steps=3"),
        (["--config.actor.clip_ratio=-1"], "config.actor.clip_ratio: must be at least 0, found -1"),
        (["--config.rollout.n=1"], "a group estimator compares responses to one prompt: n must be at least 2"),
        (["--config.model.path=./nowhere"], "./nowhere: no such folder"),
        (["--config.reward.functions=last_intger"], "no built-in reward 'last_intger'; did you mean 'last_integer'?"),
        (["--config.reward.functions=tests.tiny_folder:digit"], "did you mean 'digits'?"),
        (
            ["--config.rollout.prompt_length=30"],
            "4 of 12 prompts are longer than rollout.prompt_length = 30 tokens; the first: tests.tiny_folder:records "
            "[0] with 31",
        ),
        (["--config.data.train=tests.tiny_folder:recrds"], "no 'recrds' in tests.tiny_folder; did you mean 'records'?"),
        (["--config.data.train=missing.jsonl"], "there is no file 'missing.jsonl'"),
        (["--config.mesh.data=3"], "config.mesh.data = 3, config.mesh.fsdp = 1, config.mesh.tensor = 1"),
        (["--config.reward.data_sources=words"], "reward.data_sources: no function scores 'signs' (known: words)"),
    ],
)
def test_what_train_refuses(command: Any, recipe: Path, tmp_path: Path, arguments: list[str], expected: str) -> None:
    """Before anything is compiled or written."""
    ran = command(train.main, f"--config={recipe}", f"--workdir={tmp_path / 'run'}", *arguments)
    assert ran.code == 2
    assert ran.err.startswith("error: ") and expected in ran.err and "Traceback" not in ran.err
    assert ran.out == "" and not (tmp_path / "run").exists()


def test_train_refuses_another_configuration_in_a_folder(command: Any, recipe: Path, run: Path) -> None:
    ran = command(train.main, f"--config={recipe}", f"--workdir={run}", "--config.rollout.temperature=0.5")
    assert ran.code == 2
    assert "config.rollout.temperature: was 1.0, now 0.5" in ran.err and "use another --workdir" in ran.err


def test_train_refuses_a_folder_that_holds_something_else(command: Any, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    ran = command(train.main, f"--config={recipe}", f"--workdir={tmp_path}")
    assert ran.code == 2 and f"--workdir={tmp_path}: holds no run (no config.json) but thesis.tex; expected" in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_reward_that_is_no_score_is_a_user_error(command: Any, recipe: Path, tmp_path: Path) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text("def score(prompt, response, record):\n    return 'good'\n")
    ran = command(
        train.main, f"--config={recipe}", f"--workdir={tmp_path / 'run'}", f"--config.reward.functions={scorer}:score",
        "--config.eval.before=False",
    )  # fmt: skip
    assert ran.code == 2 and "reward 'score' returned 'good' (str); expected a number" in ran.err


def test_train_gives_up_with_3(command: Any, recipe: Path, tmp_path: Path) -> None:
    options = [f"--config={recipe}", f"--workdir={tmp_path / 'run'}", "--config.eval.before=False"]
    ran = command(
        train.main, *options, "--config.reward.functions=tests.tiny_folder:broken", "--config.logging.progress=plain"
    )
    assert ran.code == 3
    assert "error: step 1: the reward failed on every response" in ran.err
    assert (ran.out + ran.err).count("RuntimeError: the scorer is down") == 1
    assert "the reward failed on 100.0% of the responses in training" in ran.out


def test_train_tells_a_wrong_folder_with_2_and_a_damaged_one_with_4(
    command: Any, recipe: Path, run: Path, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    ran = command(train.main, f"--config={recipe}", f"--workdir={in_the_way / 'run'}")
    assert ran.code == 2 and f"{in_the_way / 'run'}': Not a directory; give another folder" in ran.err
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    victim = max((damaged / "checkpoints" / "2").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    victim.write_bytes(victim.read_bytes()[:-1])
    options = [f"--config={recipe}", f"--workdir={damaged}", "--config.trainer.steps=3"]
    ran = command(train.main, *options, "--strict_resume")
    assert ran.code == 4 and "wrong checksum" in ran.err and victim.name in ran.err
    assert "step 1 is whole; without --strict_resume the run goes on from step 1" in ran.err
    ran = command(train.main, *options, "--config.logging.progress=plain")
    assert ran.code == 0 and "a checkpoint is damaged" in ran.out and victim.name in ran.out
    assert "resumed from step 1" in ran.out
    assert [line["step"] for line in read_jsonl(damaged / "metrics.jsonl")] == [0, 1, 2, 3]
    assert (damaged / "checkpoints" / "damaged-2").is_dir()
    for path in (damaged / "checkpoints").glob("[0-9]*/meta/*"):
        path.unlink()
    ran = command(train.main, *options)
    assert ran.code == 4 and "nothing is left to go on from" in ran.err


# evaluate


def accuracy(lines: list[str], name: str) -> dict[str, float]:
    """By source, of the lines of that name."""
    found = {}
    for line in lines:
        match = re.fullmatch(
            r"(\w+) +(\w+)  (-?[\d.]+) \[(-?[\d.]+), (-?[\d.]+)\]  [24] problems x \d, (?:best@2 ([\d.]+), )?"
            r"mean length [\d.]+, \d+% truncated",
            line,
        )
        assert match, line
        mean, low, high = map(float, match.groups()[2:5])
        assert low <= mean <= high and (match[6] is None) == (match[1] == "greedy")
        assert match[6] is None or float(match[6]) >= mean, "the best of two"
        if match[1] == name:
            found[match[2]] = mean
    return found


def test_evaluate_a_model(command: Any, recipe: Path, run: Path, tmp_path: Path) -> None:
    """Greedy, what is printed is what training measured before its first step."""
    output = tmp_path / "answers.jsonl"
    ran = command(evaluate.main, f"--config={recipe}", "--samples=2", f"--output={output}")
    assert ran.code == 0
    rows = read_jsonl(output)
    for name, count in (("greedy", 6), ("sampled", 12)):
        own = [row for row in rows if row["mode"] == name]
        assert len(own) == count and {row["uid"] for row in own} == set(range(6))
        for row in own:
            assert row["score"] == pytest.approx(tiny_folder.digits("", row["response"], {})["score"], rel=1e-6)
            assert row["extras"]["digits/letters"] == sum(map(str.isalpha, row["response"]))
            assert row["data_source"] == ("words" if row["prompt"].startswith("What") else "signs")
        means = accuracy(ran.out.splitlines(), name)
        assert sorted(means) == ["signs", "words"]
        for source, mean in means.items():
            scores = [row["score"] for row in own if row["data_source"] == source]
            assert mean == pytest.approx(sum(scores) / len(scores), abs=6e-4)
    before = read_jsonl(run / "metrics.jsonl")[0]
    assert_scores(rows, before)
    assert len({row["response"] for row in rows if row["mode"] == "sampled"}) > 6


def assert_scores(rows: list[dict[str, Any]], metrics: dict[str, float]) -> None:
    """That the greedy rows are those of an evaluation in training."""
    for source in ("words", "signs"):
        scores = [row["score"] for row in rows if row["mode"] == "greedy" and row["data_source"] == source]
        assert sum(scores) / len(scores) == pytest.approx(metrics[f"val-core/{source}/reward/mean@1"], abs=1e-6)


def test_evaluate_tells_of_skipped_records_and_writes_any_text(command: Any, recipe: Path, tmp_path: Path) -> None:
    data, output = tmp_path / "held_out.jsonl", tmp_path / "answers.jsonl"
    data.write_text('{"prompt": "1+2=?", "answer": "3"}\n{"prompt": ""}\n')
    (tmp_path / "half.py").write_text(
        "def half(prompt, response, record):\n    return {'score': 1, 'pred': '\\ud800'}\n"
    )
    settings = (f"data.eval={data}", "data.on_bad_record=skip", f"reward.functions={tmp_path / 'half.py'}:half")
    given = [f"--config.{text}" for text in settings]
    ran = command(evaluate.main, f"--config={recipe}", *given, "--samples=3", f"--output={output}")
    assert ran.code == 0
    assert (
        "notice: 1 of 2 records of config.data.eval" in ran.err and "held_out.jsonl:2: the prompt is empty" in ran.err
    )
    *_, sampled = ran.out.splitlines()
    assert "1 problems x 3, pass@2 1.000, pass@3 1.000, maj@3 1.000, mean length" in sampled
    assert {row["extras"]["half/pred"] for row in read_jsonl(output)} == {"\ud800"}


def test_evaluate_a_checkpoint(command: Any, recipe: Path, tmp_path: Path) -> None:
    """`--step` reads an older one; of several rewards each is told."""
    rewards = ["reward.functions=('exact', 'tests.tiny_folder:digits')", "reward.weights=(0.0, 1.0)"]
    config = load_config(recipe, rewards)
    checkpointed(tmp_path / "run", config, (1, 3))
    ran = command(evaluate.main, f"--run={tmp_path / 'run'}", "--step=1", "--samples=0")
    assert ran.code == 0 and "checkpoint of step 1" in ran.err
    model = command(evaluate.main, f"--config={recipe}", *(f"--config.{text}" for text in rewards), "--samples=0")
    assert ran.out == model.out and ran.out.count("exact 0.000, digits ") == 2


def test_evaluate_a_run(command: Any, run: Path, tmp_path: Path) -> None:
    """Of its newest checkpoint, with its own config."""
    output = tmp_path / "answers.jsonl"
    ran = command(evaluate.main, f"--run={run}", "--samples=0", f"--output={output}")
    assert ran.code == 0 and "checkpoint of step 2" in ran.err
    assert sorted(accuracy(ran.out.splitlines(), "greedy")) == ["signs", "words"]
    first, *_, last = read_jsonl(run / "metrics.jsonl")
    assert_scores(read_jsonl(output), last)
    sources = ("words", "signs")
    assert any(first[f"val-core/{s}/reward/mean@1"] != last[f"val-core/{s}/reward/mean@1"] for s in sources)


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ([], 2, "--config"),
        (["--config={recipe}", "--config.data.eval=()", "--config.eval.interval=0"], 2, "config.data.eval: must be"),
        (["--config={recipe}", "--sample=3"], 2, "--sample=3: no such flag; did you mean '--samples'?"),
        (["--config={recipe}", "--samples=-1"], 2, "--samples=-1: must be at least 0"),
        (["--config={recipe}", "--samples=many"], 2, "argument --samples: invalid int value: 'many'"),
        (["--config={recipe}", "--output=nowhere/a.jsonl"], 2, "--output=nowhere/a.jsonl: there is no folder"),
        (["--config={recipe}", "config.seed=1"], 2, "config.seed=1 has no dashes"),
        (["--config={recipe}", "--run=nowhere"], 2, "nowhere: is not a run's folder (no such folder)"),
        (["--run=test"], 2, "test: is not a run's folder (no such folder; did you mean 'tests'?)"),
        (["--run={run}/checkpoints/2"], 2, "is not a run's folder (but a part of one: give '{run}')"),
        (["--run={run}", "--step=7"], 4, "checkpoints/7: no complete checkpoint; there are [1, 2]"),
        (["--config={recipe}", "--step=2"], 2, "--step=2: is of a run's checkpoints; give --run DIR as well"),
        (["{run}"], 2, "'{run}' stands alone: give --config FILE (the model it names is evaluated), --run DIR"),
    ],
)  # fmt: skip
def test_what_evaluate_refuses(
    command: Any, recipe: Path, run: Path, arguments: list[str], code: int, expected: str
) -> None:
    ran = command(evaluate.main, *(argument.format(recipe=recipe, run=run) for argument in arguments))
    assert ran.code == code
    assert ran.err.startswith("error: ") and expected.format(run=run) in ran.err and ran.out == ""


def test_evaluate_tells_of_failed_rewards(command: Any, recipe: Path) -> None:
    """They count as 0, and not in silence."""
    ran = command(
        evaluate.main, f"--config={recipe}", "--samples=0", "--config.reward.functions=tests.tiny_folder:broken"
    )
    assert ran.code == 0
    assert ran.out.startswith("greedy   words  0.000 ") and "the reward failed on 4 of 4 responses" in ran.out


# What is printed


@pytest.mark.parametrize(("stdout", "code"), [("/dev/full", 4), ("closed pipe", 0)])
def test_a_result_that_cannot_be_printed(stdout: str, code: int) -> None:
    """A reader who has seen enough is no failure; a full disk is one, and no traceback."""
    command = [sys.executable, "-m", "jaxrl_llm.plan", "--config", "configs/quickstart.py", "--json"]
    read, write = os.pipe()
    os.close(read)
    with open(write if stdout == "closed pipe" else stdout, "w") as file:
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.PIPE, text=True)
    if stdout != "closed pipe":
        os.close(write)
    assert done.returncode == code
    told = "error: standard output: cannot be written: [Errno 28] No space left on device\n"
    assert done.stderr == (told if code else "")

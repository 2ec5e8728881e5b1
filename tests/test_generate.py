"""The command that asks a model: what it samples is what a rollout samples, and what it is given is checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm import generate
from jaxrl_llm.quickstart import FOLDER
from jaxrl_llm.sft import sft
from jaxrl_llm.steps.sampling import Sampling
from tests import tiny_folder

MODEL = ["--max-new-tokens=20", "--model=TINY"]


def run(*arguments: str) -> int:
    return generate.main([argument.replace("TINY", str(tiny_folder.folder())) for argument in arguments])


@pytest.fixture(scope="module", autouse=True)
def _compile_once() -> Iterator[None]:
    with tiny_folder.compile_once():
        yield


def responses(prompts: list[str], **options: Any) -> list[str]:
    options = {"max_new_tokens": 20, "sampling": Sampling(temperature=0.8), **options}
    *_, last = generate.generate(str(tiny_folder.folder()), prompts, **options)
    assert all(ended for _, ended in last)
    return [text for text, _ in last]


def test_looking_in_between_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of any size sample the same, and each look extends the one before."""
    prompts = ["1+2=?", "What is 3+4?"]
    looks = list(
        generate.generate(str(tiny_folder.folder()), prompts, samples=3, max_new_tokens=20, sampling=Sampling(0.8))
    )
    assert len(looks) > 1
    for before, after in itertools.pairwise(looks):
        assert all(b.startswith(a) for (a, _), (b, _) in zip(before, after, strict=True))
    whole = [text for text, _ in looks[-1]]
    monkeypatch.setattr(generate, "CHUNK", 20)
    assert responses(prompts, samples=3) == whole and len(set(whole)) > 1
    assert responses(prompts, samples=3, seed=1) != whole


def test_the_command_shows_prompts_and_samples_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("1+2=?\n\n3+4=?\n")
    assert run(*MODEL, f"--file={tmp_path / 'prompts.txt'}", "--samples=2", "--temperature=0") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith((">", "["))]
    assert [line[:3].strip() for line in lines] == ["> 1", "[1]", "[2]", "> 3", "[1]", "[2]"]
    assert lines[1][3:] == lines[2][3:]  # greedy
    assert run(*MODEL, "1+2=?", "--temperature=0") == 0
    assert capsys.readouterr().out.rstrip("\n") == f"> 1+2=?\n{lines[1][4:]}".rstrip("\n")


def test_without_a_limit_it_answers_as_long_as_the_model_has_positions() -> None:
    """The packaged model has 128, fewer than the limit that is meant for others."""
    *_, ((text, ended),) = generate.generate(str(FOLDER), ["12+34="], sampling=Sampling(temperature=0.0))
    assert (text, ended) == ("46", True)


def test_a_run_is_asked_by_its_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_folder.config(data__response_key="answer", data__eval=(), eval__interval=0, trainer__steps=1)
    with sft(config, tmp_path) as trained:
        assert len(list(trained)) == 1
    assert run(f"--model={tmp_path}", "--max-new-tokens=4", "1+2=?") == 0
    found = capsys.readouterr()
    assert found.out.startswith("> 1+2=?\n") and f"{tmp_path}, step 1" in found.err
    assert run(f"--model={tmp_path}", "--step=1", "--max-new-tokens=4", "1+2=?") == 0
    assert capsys.readouterr().out == found.out
    assert run(f"--model={tmp_path}", "--step=2", "1+2=?") == 4
    assert "no complete checkpoint; there are [1]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=nowhere", "x"], "nowhere: no such folder"),
        (MODEL, "no prompt"),
        ([*MODEL, "--step=1", "x"], "is no run"),
        ([*MODEL, "--samples=0", "x"], "both at least 1"),
        ([*MODEL, "--top-p=0", "x"], "--top-p in (0, 1]"),
        ([*MODEL, "--file=nowhere.txt"], "--file=nowhere.txt"),
        ([*MODEL, "--max-new-tokens=1000", "x"], "256 positions"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err

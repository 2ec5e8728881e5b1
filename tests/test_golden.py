"""All cases that an independent implementation computed, and that the runner notices what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.golden.__main__ import main, run
from tests.golden.adapters import ADAPTERS
from tests.golden.cases import Case, Outcome, Verdict, read_cases
from tests.golden.design import judge

DATA = Path(__file__).parent / "golden" / "data"


@cache
def outcome_of(id: str) -> Outcome:
    return run(cases()[id])


@cache
def cases() -> dict[str, Case]:
    return {case.id: case for case in read_cases(DATA)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn", sorted({entry["fn"] for entry in json.loads((DATA / "index.json").read_text())["cases"]})
)
def test_every_case(fn: str) -> None:
    outcomes = [outcome_of(case.id) for case in cases().values() if case.fn == fn]
    assert outcomes
    assert [f"{o.case.id}: {o.why}" for o in outcomes if o.verdict is Verdict.FAILED] == []


def first(fn: str, verdict: Verdict, **kwargs: object) -> Case:
    """The first case of a function with such a verdict."""
    return next(
        case
        for case in cases().values()
        if case.fn == fn and kwargs.items() <= case.kwargs.items() and outcome_of(case.id).verdict is verdict
    )


@pytest.mark.parametrize(
    ("fn", "output"),
    [("kl_penalty", "grad_logprob"), ("agg_loss", "loss"), ("value_loss", "scalars"), ("rloo", "advantages")],
)
def test_a_wrong_expectation_is_noticed(fn: str, output: str) -> None:
    case = first(fn, Verdict.PASSED)
    wrong = case.outputs[output] + 1e-3
    outcome = run(replace(case, outputs=case.outputs | {output: wrong}))
    assert outcome.verdict is Verdict.FAILED and output in outcome.why


def test_rows_that_no_rule_excuses_are_still_compared() -> None:
    case = first("grpo", Verdict.BY_DESIGN)
    advantages = case.outputs["advantages"].copy()
    sizes = (case.inputs["index"][:, None] == case.inputs["index"][None, :]).sum(-1)
    rows = np.flatnonzero((sizes > 1) & case.mask.any(-1))
    advantages[rows[0], np.argmax(case.mask[rows[0]])] += 0.1
    outcome = run(replace(case, outputs=case.outputs | {"advantages": advantages}))
    assert outcome.verdict is Verdict.FAILED and f"advantages[{rows[0]}, " in outcome.why


def test_our_own_rule_is_checked_where_a_case_is_excused() -> None:
    """An implementation that gives a group of one its raw reward would agree with the case, and fail."""
    case = first("rloo", Verdict.BY_DESIGN)
    uncorrected = ADAPTERS["rloo"]

    def adapter(case: Case, inputs: dict) -> dict:
        found = uncorrected(case, inputs)
        return found | {"advantages": found["advantages"] + 1e-3 * inputs["mask"]}

    assert judge(case, adapter).verdict is Verdict.FAILED


def test_a_function_without_adapter_fails() -> None:
    outcome = run(replace(first("kl_penalty", Verdict.PASSED), fn="nobody"))
    assert outcome.verdict is Verdict.FAILED and "no adapter for fn 'nobody'" in outcome.why


def write_index(folder: Path, ids: list[str]) -> None:
    index = json.loads((DATA / "index.json").read_text())
    index["cases"] = [entry for entry in index["cases"] if entry["id"] in ids]
    (folder / "index.json").write_text(json.dumps(index))
    for file in {entry["file"] for entry in index["cases"]}:
        (folder / file).symlink_to(DATA / file)


def test_the_last_line_counts_and_the_exit_code_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passing, excused = first("kl_penalty", Verdict.PASSED), first("agg_loss", Verdict.BY_DESIGN)
    write_index(tmp_path, [passing.id, excused.id])
    assert main(tmp_path) == 0
    assert capsys.readouterr().out.splitlines() == ["1 differ by design", "2 passed, 0 failed"]
    index = json.loads((tmp_path / "index.json").read_text())
    index["cases"][-1]["kwargs"]["kind"] = "k2" if passing.kwargs["kind"] != "k2" else "k1"
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert main(tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"FAILED {passing.id}: ") and lines[1:] == ["1 differ by design", "1 passed, 1 failed"]


def test_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"schema": 2, "cases": []}')
    with pytest.raises(ValueError, match="schema 2, expected 1"):
        list(read_cases(tmp_path))


def test_the_command_wants_a_folder() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.golden"], capture_output=True, text=True, cwd=DATA.parents[2])
    assert done.returncode == 1 and "usage" in done.stderr

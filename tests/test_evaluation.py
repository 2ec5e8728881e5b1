"""What several responses to a problem are worth: best@k, pass@k, maj@n, and their intervals."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.errors import UserError
from jaxrl_llm.evaluation import best_of, evaluation_metrics, majority, score_interval
from jaxrl_llm.meters import evaluated_scores
from jaxrl_llm.report_numbers import evaluated
from jaxrl_llm.trainer import fit
from jaxrl_llm.writers import read_jsonl
from tests import tiny_folder


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=7), st.data())
@settings(deadline=None, max_examples=60)
def test_the_best_of_k_is_the_mean_over_all_choices(scores: list[float], data: Any) -> None:
    k = data.draw(st.integers(1, len(scores)))
    plain = np.mean([max(chosen) for chosen in itertools.combinations(scores, k)])
    assert best_of(scores, k) == pytest.approx(plain, abs=1e-9)


@given(st.integers(0, 12), st.integers(1, 12))
@settings(deadline=None)
def test_of_right_and_wrong_it_is_pass_at_k(right: int, k: int) -> None:
    n = 12
    right = min(right, n)
    expected = 1 - math.comb(n - right, k) / math.comb(n, k)
    assert best_of([1.0] * right + [0.0] * (n - right), k) == pytest.approx(expected)


@pytest.mark.parametrize("k", [0, 3])
def test_more_than_there_are(k: int) -> None:
    with pytest.raises(ValueError, match=f"the best of {k} of 2 scores"):
        best_of([0.0, 1.0], k)


@given(st.lists(st.sampled_from(["7", "8", "9", None]), min_size=1, max_size=9))
@settings(deadline=None)
def test_majority_votes(answers: list[str | None]) -> None:
    scores = [float(answer == "7") for answer in answers]
    votes = Counter(answer for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    assert majority(scores, answers) == pytest.approx(("7" in winners) / len(winners) if winners else 0.0)


def rows(scores: list[list[float | None]], preds: list[list[str | None]] | None = None) -> list[dict[str, Any]]:
    return [
        {
            "uid": uid,
            "data_source": "sums",
            "score": score,
            "scores": {"number": score or 0.0},
            "extras": {} if preds is None else {"number/pred": preds[uid][i]},
            "length": 2,
            "finish_reason": "stop",
        }
        for uid, own in enumerate(scores)
        for i, score in enumerate(own)
    ]


def test_the_figures_of_an_evaluation() -> None:
    found = evaluation_metrics(
        rows([[1.0, 0.0, 0.0, 0.0], [None, 1.0, 1.0, 1.0]], [["7", "8", "8", "8"], [None, "3", "3", "4"]])
    )
    core = {name.removeprefix("val-core/sums/reward/"): x for name, x in found.items() if name.startswith("val-core")}
    expected = {"mean@4": 0.5, "best@2": 0.75, "pass@2": 0.75, "best@4": 1.0, "pass@4": 1.0, "maj@4": 0.5}
    assert core == pytest.approx(expected)
    assert found["val-aux/sums/failed_ratio"] == 0.125
    for name, mean in expected.items():
        low, high = (found[f"val-aux/sums/reward/{name}/{end}95"] for end in ("low", "high")) if name != "mean@4" else (
            found["val-aux/sums/reward/low95"], found["val-aux/sums/reward/high95"])  # fmt: skip
        assert low <= mean <= high


def test_scores_that_are_not_right_or_wrong_pass_nothing() -> None:
    found = evaluation_metrics(rows([[0.5, 0.25, 0.0]]))
    names = {name for name in found if name.startswith("val-core")}
    assert names == {f"val-core/sums/reward/{name}" for name in ("mean@3", "best@2", "best@3")}
    assert found["val-core/sums/reward/best@2"] == pytest.approx((0.5 + 0.5 + 0.25) / 3)


def test_intervals_are_over_problems_and_not_over_responses() -> None:
    once, often = (score_interval(rows([[float(i % 2)] * n for i in range(40)])) for n in (1, 8))
    assert once == pytest.approx(often)


def test_greedy_and_sampled_in_one_run(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"eval__greedy": True, "eval__n": 4, "eval__temperature": 1.0, "eval__interval": 0}
    config = tiny_folder.config(**changes, trainer__steps=1, trainer__save_interval=0)
    with tiny_folder.compile_once():
        for _ in fit(config, tmp_path):
            pass
    for step in (0, 1):
        line = next(line for line in read_jsonl(tmp_path / "metrics.jsonl") if line["step"] == step)
        assert {f"val-core/words/reward/{name}" for name in ("mean@1", "mean@4", "best@2", "best@4")} <= line.keys()
        found = read_jsonl(tmp_path / "evaluations" / f"{step}.jsonl")
        modes = Counter((row["mode"], row["data_source"]) for row in found)
        assert modes[("greedy", "words")] * 4 == modes[("sampled", "words")] == 8
        means = [
            np.mean([row["score"] for row in found if row["mode"] == mode and row["data_source"] == "words"])
            for mode in ("greedy", "sampled")
        ]
        assert means == pytest.approx([line["val-core/words/reward/mean@1"], line["val-core/words/reward/mean@4"]])
        # Each has an interval of its own, as people see them as well.
        for mode, mean, aux in zip(("greedy", "sampled"), means, ("words/greedy", "words"), strict=True):
            own = [row for row in found if row["mode"] == mode and row["data_source"] == "words"]
            ends = [line[f"val-aux/{aux}/reward/{end}95"] for end in ("low", "high")]
            assert [mean, *ends] == pytest.approx(score_interval(own))
            assert line[f"val-aux/{aux}/response_length/mean"] == pytest.approx(np.mean([row["length"] for row in own]))
        shown = {score.source: score.text for score in evaluated_scores(line)}
        assert list(shown) == ["words greedy", "signs greedy", "words", "signs"]
        low, high = (line[f"val-aux/words/greedy/reward/{end}95"] for end in ("low", "high"))
        assert shown["words greedy"] == f"{means[0]:.3f} [{low:.3f}, {high:.3f}]"
        told = {row["source"]: row["last"] for row in evaluated([line])}
        assert (told["words greedy"].low, told["words"].low) == (low, line["val-aux/words/reward/low95"])


def test_one_sampled_response_would_have_the_greedy_ones_name() -> None:
    with pytest.raises(UserError, match=r"eval.greedy = True, config.eval.n = 1: .* n at least 2"):
        tiny_folder.config(eval__greedy=True, eval__temperature=1.0)

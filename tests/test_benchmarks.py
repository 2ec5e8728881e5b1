"""The benchmarks' own parts: lengths, cases, work in FLOPs, and the table of peers. Nothing is timed here."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import products, rollout, scoring, step, update
from benchmarks.measure import clock, lengths, options
from benchmarks.measure.cases import config_of, costs_of, model_folder
from benchmarks.measure.presets import PRESETS
from benchmarks.measure.work import model_flops
from benchmarks.peers import __main__ as peers
from benchmarks.peers.table import ROWS, Figure, Program, Row
from jaxrl_llm.costs import Mesh, forward_flops
from tests.tiny_folder import compile_once

TINY = [
    "--preset",
    "tiny",
    "--num-layers",
    "1",
    "--prompts",
    "2",
    "--prompt-length",
    "3",
    "--response-length",
    "4",
    "--repeats",
    "2",
]


def case(*changes: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    (found,) = options.each_case(parser.parse_args([*TINY, *changes]))
    return found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(clock, "PEAK_SIZE", 64)
    with compile_once():
        yield


# Lengths


@pytest.mark.parametrize(("rows", "limit", "mean"), [(64, 256, 64), (64, 64, 16), (7, 100, 90), (1, 9, 4)])
def test_log_normal_lengths(rows: int, limit: int, mean: int) -> None:
    found = lengths.draw(f"lognormal:{mean}", rows, limit)
    assert found.dtype == np.int32 and found.shape == (rows,)
    assert found.min() >= 1 and found.max() <= limit
    assert abs(found.mean() - mean) <= 0.5
    other = lengths.draw(f"lognormal:{mean}", rows, limit, seed=1)
    assert sorted(found) == sorted(other)
    assert rows == 1 or (found != other).any()
    assert (found == lengths.draw(f"lognormal:{mean}", rows, limit)).all()


def test_log_normal_lengths_have_a_long_tail() -> None:
    found = lengths.draw("lognormal:64", 64, 256)
    assert found.max() == 256 and np.median(found) < 48


@pytest.mark.parametrize("text", ["", "fixed", "fixed:0", "fixed:-1", "lognormal:1.5", "uniform:3", "full:3"])
def test_what_is_no_length(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected one of full, fixed:TOKENS"):
        lengths.spec(text)


@pytest.mark.parametrize(
    ("main", "given", "told"),
    [
        (rollout.main, ["--lengths", "fixed:5"], "expected at most the response length, 4"),
        (update.main, ["--lengths", "geometric:2"], "only sampling draws it"),
        (step.main, ["--lengths", "fixed:2"], "expected full or geometric:MEAN"),
        (rollout.main, ["--prompts", "0"], "expected a whole number, at least 1"),
        (rollout.main, ["--model", "nowhere", "--width", "64"], "sizes cannot be changed"),
        (rollout.main, ["--set", "rollout.top_q=1"], "rollout.top_q"),
    ],
)
def test_arguments_that_are_wrong(main: Any, given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([*TINY, *given])
    assert raised.value.code == 2
    assert told in capsys.readouterr().err


# Cases


def test_several_values_make_a_case_of_each_combination() -> None:
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    given = ["--prompts", "2", "4", "--layers", "scan", "unrolled", "--set", "actor.epochs=2", "model.remat=full"]
    found = list(options.each_case(parser.parse_args(given)))
    assert [(c.prompts, c.layers) for c in found] == [(2, "scan"), (2, "unrolled"), (4, "scan"), (4, "unrolled")]
    assert all(c.changes == ["actor.epochs=2", "model.remat=full"] for c in found)


def test_work_is_what_has_to_be_computed() -> None:
    one = case("--prompts", "1", "--prompt-length", "1")
    with model_folder(one) as folder:
        costs = costs_of(config_of(one, folder), folder)
    kernels = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64  # q, k, v; o; gate, up, down
    head = 2 * 32 * 64
    # A prompt of one token and a response of one: the token passes once and sees itself.
    layer = 2 * kernels + 4 * 32
    assert model_flops(one, costs, np.array([1])) == layer + head
    # A second response to the same prompt of two tokens: its first token sees three, itself included.
    two = case("--prompts", "1", "--n", "2", "--prompt-length", "2")
    single, both = (model_flops(two, costs, np.array(drawn)) for drawn in ([2], [2, 2]))
    assert both - single == 2 * kernels + 4 * 3 * 32 + 2 * head


@pytest.mark.parametrize(
    ("main", "more"),
    [
        (rollout.main, ["--lengths", "lognormal:2"]),
        (scoring.main, ["--n", "2", "--lengths", "lognormal:2"]),
        (scoring.main, ["--part", "head"]),
    ],
)
def test_a_line(main: Any, more: list[str], quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    main([*TINY, *more, "--json"])
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line["model"] == "tiny" and line["prompts"] == 2 and line["dtype"] == "float32"
    assert len(line["all_seconds"]) == 2
    rows, of_prompts = 2 * line["n"], 0 if "head" in more else 3
    if main is rollout.main:
        assert line["tokens"] == rows * 2
    else:
        assert line["tokens"] == rows * (of_prompts + (4 if "head" in more else 2))
    for key in ("seconds", "compile_s", "temp_mb", "argument_mb", "output_mb", "rss_mb", "gflop", "of_peak"):
        assert line[key] >= 0, key


def test_the_products_of_an_update_are_all_of_its_kernels(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    products.main(["--preset", "tiny", "--tokens", "8", "--head-tokens", "3", "--repeats", "1", "--json"])
    *lines, together = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["product"] for line in lines[::2]] == ["q", "k", "v", "o", "gate", "up", "down", "head"]
    assert together["of_peak"] > 0
    one = case()
    with model_folder(one) as folder:
        costs = costs_of(config_of(one, folder), folder)
    layer = sum(math.prod(shape) for _, shape, times in products.kernels(PRESETS["tiny"]) if times > 1)
    assert 2 * 8 * layer == forward_flops(costs, Mesh(), tokens=8, pairs=0)  # of one layer


# Peers


def test_rows_are_measured_with_options_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "model_folder", lambda given: contextlib.nullcontext(Path()))
    cases = []
    for program in {program for row in ROWS.values() for program in row.programs if program.where == "ours"}:
        module = importlib.import_module(program.module)
        monkeypatch.setattr(module, "measure", lambda case, folder: cases.append(case) or {})
        module.main(program.command("python", Path("folder"))[5:])
    assert cases and all(c.json and c.dtype == "float32" for c in cases)


OURS, THEIRS = Program("ours", "x", "a"), Program("tunix", "y", "b")


def test_a_row_is_the_ratio_of_two_medians() -> None:
    row = Row("name", "work", "peer", 1.5, Figure(THEIRS, part="b"), Figure(OURS, "phases.gen"))
    printed: Any = {
        THEIRS: [[{"part": "a", "seconds": 9.0}, {"part": "b", "seconds": s}] for s in (4.0, 2.0, 100.0)],
        OURS: [[{"phases": {"gen": s}}] for s in (2.0, 0.1, 2.0)],
    }
    found = peers.result(row, printed)
    assert found["medians"] == [4.0, 2.0] and found["ratio"] == 2.0 and found["reached"]
    assert "| 4 | 2 | 2.00 | ≥ 1.5 | reached |" in peers.table([found])


@pytest.mark.parametrize(("at_most", "fine"), [(True, [True, True, False]), (False, [False, True, True])])
def test_a_bound(at_most: bool, fine: list[bool]) -> None:
    row = Row("name", "work", "itself", 2.0, Figure(OURS), at_most=at_most)
    assert [row.fine(value) for value in (1.9, 2.0, 2.1)] == fine


def test_programs_that_rows_share_run_once_and_together() -> None:
    third, fourth = Program("ours", "x", "c"), Program("ours", "x", "d")
    pairs = [(THEIRS, OURS), (third, fourth), (THEIRS, third), (OURS, OURS)]
    rows = [Row("name", "work", "peer", 1, Figure(top), Figure(bottom)) for top, bottom in pairs]
    assert peers.groups(rows[:2]) == [[THEIRS, OURS], [third, fourth]]
    assert peers.groups(rows) == [[THEIRS, OURS, third, fourth]]

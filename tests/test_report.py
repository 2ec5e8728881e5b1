"""report.html: what is on the page, and that nothing on it is taken for more than text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm import report, writers
from jaxrl_llm.config import to_json
from jaxrl_llm.errors import RunAborted, StorageError, UserError
from jaxrl_llm.run_files import append_jsonl, read_jsonl
from tests import tiny_folder, tiny_runs
from tests.test_writers import make_config, open_run
from tests.tokenizers_for_tests import SPECIAL

HOSTILE = (
    '</script><script>alert(1)</script><!--<img src=x onerror="alert(2)">&amp; \u2028 \x00 \ud800 \u202e é 字 {{ 7*7 }}'
)
EVALUATED = {
    "val-core/sums/reward/mean@1": 0.5,
    "val-aux/sums/problems": 100,
    "val-aux/sums/reward/low95": 0.404,
    "val-aux/sums/reward/high95": 0.596,
}
CRITIC = {"critic/vf_loss": 0.1, "critic/vf_explained_var": 0.5, "critic/values/mean": 0.2, "critic/returns/mean": 0.3}


def line(step: int, **more: Any) -> dict[str, Any]:
    """A step's metrics."""
    return {
        "step": step,
        "critic/score/mean": step / 8,
        "actor/ppo_kl": None if step == 2 else 0.25,
        "timing_s/gen": 3.0,
        "timing_s/update_actor": 0.5,
        "timing_s/step": 4.0,
        "perf/time_per_step": 4.0,
        "perf/total_num_tokens": 1000,
        "my/own": float(step),
        **more,
    }


def make_run(folder: Path, lines: list[dict[str, Any]], samples: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(to_json(make_config()))
    append_jsonl(folder / "metrics.jsonl", *lines)
    append_jsonl(folder / "samples.jsonl", *(samples or []))
    return folder


class Page(HTMLParser):
    """The elements of a page, its text, and its scripts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._raw = False
        self.source = path.read_bytes().decode("utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._raw = tag in ("script", "style")
        self.text += " "
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._raw = False
        self.text += " "

    def handle_data(self, data: str) -> None:
        if not self._raw:
            self.text += data
        elif self.tags[-1][0] == "script":
            self.scripts[-1] += data

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


def page_of(folder: Path) -> Page:
    page = Page(report.write_report(folder))
    page.text = " ".join(page.text.split())
    return page


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    """No element loads anything, and no script may run but the page's own two."""
    page = page_of(make_run(tmp_path, [line(1)]))
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "srcset", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    (policy,) = [a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy and "default-src 'none'" in policy
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.scripts[1:]]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes and len(hashes) == 2
    assert "unsafe-inline" not in policy.partition("script-src")[2]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    sample = {"step": 1, "prompt": HOSTILE, "response": HOSTILE, "score": 0.0, "extras": {HOSTILE: HOSTILE}}
    sample |= {"tokens": [HOSTILE, "\ud83d"], "advantages": [1.0, None]}
    folder = make_run(tmp_path, [line(1, **{HOSTILE: 1.0, f"val-core/{HOSTILE}/reward/mean@1": 0.5})], [sample])
    config = json.loads((folder / "config.json").read_text())
    config["logging"]["name"] = config["rollout"]["stop"] = HOSTILE
    (folder / "config.json").write_text(json.dumps(config))
    machine = {"devices": HOSTILE}
    append_jsonl(folder / "events.jsonl", {"kind": "start", "time": "now", "machine": machine})
    append_jsonl(folder / "events.jsonl", {"kind": "note", "time": "now", "text": HOSTILE})
    append_jsonl(folder / "events.jsonl", {"kind": "end", "time": "now", "outcome": "aborted", "why": HOSTILE})
    page = page_of(folder)
    assert len(page.scripts) == 3 and not {"img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "</script" not in page.scripts[0] and "<!--" not in page.scripts[0]
    (row,) = page.data["samples"][0]["rows"]
    assert (row["prompt"], row["response"]) == (HOSTILE, HOSTILE) and row["tokens"] == [HOSTILE, "\ud83d"]
    assert HOSTILE in page.data["dense"]
    shown = " ".join(HOSTILE.replace("\ud800", "\ufffd").split())
    assert page.text.count(shown) >= 5, "name, end, held-out score, machine and note"


def test_what_the_page_says(tmp_path: Path) -> None:
    after = {name: value + 0.25 * ("core" in name) for name, value in EVALUATED.items()}
    lines = [{"step": 0, **EVALUATED}, *(line(step) for step in (1, 2)), line(3, **after)]
    page = page_of(make_run(tmp_path, lines))
    for text in (
        "trial",
        "3 of 100",
        "0.125 → 0.375 first and last step",
        "12.0 s 75% of it gen",
        "250 tokens/s 4 s a step",
        "evaluation: sums 0.500 → 0.750",
        "step 0: 0.500 [0.404, 0.596] step 3: 0.750",
        "100 problems × 1, 95% intervals",
        "gen 9.0 s 75.0%",
        'model.path "m" ""',
        "as of step 3",
    ):
        assert text in page.text, text
    assert "aborted" not in page.text and "Each point is the mean" not in page.text
    data = page.data
    assert data["x"] == [1, 2, 3] and data["per_point"] == 1
    assert data["dense"]["critic/score/mean"] == [0.125, 0.25, 0.375]
    assert data["dense"]["actor/ppo_kl"] == [0.25, None, 0.25]
    assert data["dense"]["my/own"] == [1, 2, 3], "a metric that no chart names is in the table"
    assert data["sparse"]["val-core/sums/reward/mean@1"] == [[0, 3], [0.5, 0.75]]
    charts = {chart["title"]: chart["series"] for chart in data["charts"]}
    assert list(charts) == ["Reward", "Evaluation score", "KL of the update"]
    (series,) = charts["Evaluation score"]
    assert (series["label"], series["low"]) == ("sums", "val-aux/sums/reward/low95")
    assert [phase["name"] for phase in data["phases"]] == ["gen", "update_actor"]


def test_a_critic_has_its_curves(tmp_path: Path) -> None:
    without = page_of(make_run(tmp_path / "without", [line(1, **{"critic/returns/mean": 0.3})])).data
    assert "Critic" not in {chart["section"] for chart in without["charts"]}, "its metrics have this name anyway"
    data = page_of(make_run(tmp_path / "with", [line(1, **CRITIC)])).data
    critic = [chart["title"] for chart in data["charts"] if chart["section"] == "Critic"]
    assert critic == ["Value loss", "Explained variance", "Values and returns"]


def test_a_long_run_is_thinned_and_says_so(tmp_path: Path) -> None:
    spike = {2000: 100.0}
    lines = [
        line(step, **{"actor/grad_norm": spike.get(step, 1.0)}, **(EVALUATED if step % 2 == 0 else {}))
        for step in range(1, 3001)
    ]
    samples = [{"step": step, "response": "r", "tokens": ["x"] * 3000} for step in range(0, 3001, 10)]
    page = page_of(make_run(tmp_path, lines, samples))
    data = page.data
    assert len(data["x"]) <= report.POINTS and (data["x"][0], data["x"][-1], data["per_point"]) == (6, 3000, 6)
    assert data["dense"]["my/own"][:2] == [3.5, 9.5]
    assert max(data["high"]["actor/grad_norm"]) == 100 and min(data["low"]["actor/grad_norm"]) == 1
    steps, _ = data["sparse"]["val-core/sums/reward/mean@1"]
    assert len(steps) <= report.POINTS and steps[-1] == 3000
    shown = [group["step"] for group in data["samples"]]
    assert (shown[0], shown[-1]) == (0, 3000) and len(shown) == report.SAMPLED_STEPS
    assert "Each point is the mean of 6 steps" in page.text and "Of 12 of the 301 steps with samples" in page.text
    assert len(page.source) < 2_000_000


def test_long_samples_are_fewer(tmp_path: Path) -> None:
    samples = [{"step": step, "response": "r", "tokens": ["x"] * 15_000} for step in (1, 2, 3, 4)]
    groups = page_of(make_run(tmp_path, [line(1)], samples)).data["samples"]
    assert [group["step"] for group in groups] == [1, 4]


def test_many_phases_share_few_colours() -> None:
    timing = {f"timing_s/phase_{i}": i + 1.0 for i in range(14)}
    phases = report._drawn_phases(report._phases([{**timing, "timing_s/step": 105.0}]))
    assert len(phases) == report.DRAWN_PHASES + 1
    assert phases[-1]["name"] == "other phases" and len(phases[-1]["of"]) == 6


def test_a_run_without_steps_has_a_page(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, []))
    assert "0 of 100" in page.text and "Curves" not in page.text and "Samples" not in page.text


def test_config_changes() -> None:
    plain = json.loads(to_json(make_config()))
    plain["actor"]["clip_ratio"] = plain["actor"]["clip_ratio_low"] = plain["actor"]["clip_ratio_high"] = 0.1
    plain["rollout"]["n"], plain["new"] = 16, {"key": {}}
    changes = {key: (value, default) for key, value, default in report.config_changes(plain)}
    assert changes["rollout.n"] == ("16", "8") and changes["actor.clip_ratio"] == ("0.1", "null")
    assert changes["new.key"] == ("{}", "") and changes["reward.functions"] == ('["number"]', "[]")
    assert not {"actor.clip_ratio_low", "actor.mini_batch_size", "rollout.temperature"} & set(changes)


# While a run goes on


def test_a_run_writes_its_report(tmp_path: Path) -> None:
    writer = writers.RunWriter(tmp_path, make_config(), total_steps=2, machine={"devices": "2 x abacus"})
    writer.step(1, {"critic/score/mean": 0.5})
    assert "as of step 1" in Page(tmp_path / "report.html").text
    writer.note("a note")
    writer.step(2, {"critic/score/mean": 0.5})
    writer.close()
    writer.close()
    page = Page(tmp_path / "report.html")
    for text in ("done", "2 of 2", "2 x abacus", "a note"):
        assert text in page.text
    kinds = [event["kind"] for event in read_jsonl(tmp_path / "events.jsonl")]
    assert kinds == ["start", "note", "end"]


@pytest.mark.parametrize(
    ("error", "outcome", "why"),
    [(RunAborted("step 1: enough"), "aborted", "RunAborted: step 1: enough"), (KeyboardInterrupt(), "stopped", "")],
)
def test_a_run_that_ends_early_says_why(tmp_path: Path, error: BaseException, outcome: str, why: str) -> None:
    with pytest.raises(type(error)), open_run(tmp_path) as run:
        run.step(1, {"critic/score/mean": 0.5})
        raise error
    assert read_jsonl(tmp_path / "events.jsonl")[-1]["outcome"] == outcome
    text = Page(tmp_path / "report.html").text
    assert outcome in text and why in text
    with open_run(tmp_path, resumed_step=1) as run:
        run.step(2, {"critic/score/mean": 0.5})
        assert why == "" or why not in Page(tmp_path / "report.html").text.partition("Curves")[0]


def test_reports_cost_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step a second: a report every half minute, and rarer where it takes long."""
    clock, written, cost = [0.0], [], [0.1]

    def write(_: Path) -> None:
        written.append(clock[0])
        clock[0] += cost[0]

    monkeypatch.setattr(writers, "write_report", write)
    monkeypatch.setattr(writers.time, "monotonic", lambda: clock[0])
    with open_run(tmp_path) as run:
        for step in range(200):
            run.step(step, {"a": 1})
            clock[0] += 1
        assert 6 <= len(written) <= 8
        cost[0], so_far = 5.0, len(written)
        for step in range(200, 1400):
            run.step(step, {"a": 1})
            clock[0] += 1
        assert 2 <= len(written) - so_far <= 4
        count = len(written)
    assert len(written) == count + 1


def test_a_report_that_fails_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(writers, "write_report", fail)
    with open_run(tmp_path) as run:
        run.step(1, {"a": 1})
    texts = [event.get("text") for event in read_jsonl(tmp_path / "events.jsonl")]
    assert "report.html is not written: ZeroDivisionError: a bug" in texts


def test_no_report_is_wanted(tmp_path: Path) -> None:
    with open_run(tmp_path, report=False) as run:
        run.step(1, {"a": 1})
    assert not (tmp_path / "report.html").exists()


def test_the_report_of_a_real_run() -> None:
    with tiny_folder.compile_once():
        watched = tiny_runs.ppo()
    page = Page(watched.folder / "report.html")
    assert (
        "done" in page.text and "4 of 4" in page.text and "4 problems × 1, 95% intervals" in " ".join(page.text.split())
    )
    notes = [event["text"] for event in read_jsonl(watched.folder / "events.jsonl") if event["kind"] == "note"]
    assert not any("report" in note for note in notes)
    data = page.data
    assert data["x"] == [1, 2, 3, 4] and {chart["section"] for chart in data["charts"]} >= {"Policy", "Critic", "Time"}
    assert [group["step"] for group in data["samples"]] == [1, 2, 4]
    for row in (row for group in data["samples"] for row in group["rows"]):
        columns = [row[name] for name in ("tokens", "advantages", "log_probs", "ref_log_prob")]
        assert {len(column) for column in columns} == {row["length"]}
        assert "".join(token for token in row["tokens"] if token not in SPECIAL) == row["response"]


# The command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", [line(1)])
    assert report.main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert report.main([str(folder), f"--output={tmp_path / 'page.html'}"]) == 0
    assert "trial" in Page(tmp_path / "page.html").text
    capsys.readouterr()
    assert report.main([str(tmp_path)]) == 2
    assert "not a run's folder" in capsys.readouterr().err
    assert report.main([str(folder), f"--output={tmp_path / 'no' / 'page.html'}"]) == 4
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("{broken}\n")
    assert report.main([str(folder)]) == 4
    assert "metrics.jsonl:2: not JSON" in capsys.readouterr().err


def test_what_collect_refuses(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        report.collect(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StorageError, match="config.json: not JSON"):
        report.collect(tmp_path)


def test_what_says_nothing_is_not_drawn_and_failures_are_told(tmp_path: Path) -> None:
    """One update a batch leaves KL and clipping at 0 by construction; a reward that failed is no reward of 0."""
    still = {"actor/ppo_kl": 0.0, "actor/pg_clipfrac": 0.0}
    lines = [{"step": 0, **EVALUATED, "val-aux/sums/failed_ratio": 0.25}]
    lines += [line(step, **still, **{"reward/failed_ratio": 0.5 * step}) for step in (1, 2)]
    page = page_of(make_run(tmp_path / "failing", lines))
    assert [chart["title"] for chart in page.data["charts"]] == ["Reward", "Evaluation score", "Failed rewards"]
    assert "failed on 75.0% of the responses" in page.text
    assert "the reward failed on 25.0%, which count as 0" in page.text
    page = page_of(make_run(tmp_path / "whole", [line(1, **{"reward/failed_ratio": 0.0})]))
    assert "failed" not in page.text.lower().replace("reward/failed_ratio", "").replace("max_failed_ratio", "")

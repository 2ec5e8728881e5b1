"""Named sets to evaluate on, prompts that come twice, and what a run says of its data."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxrl_llm.data import PromptData
from jaxrl_llm.dotted import split_name
from jaxrl_llm.errors import UserError
from jaxrl_llm.repeats import repeat_notices
from jaxrl_llm.sft import sft
from jaxrl_llm.trainer import fit
from jaxrl_llm.writers import read_jsonl
from tests import tiny_folder
from tests import tokenizers_for_tests as made

TOKENIZER: Any = made.characters()
ADDITION = "jaxrl_llm.tasks:addition(split='test')"


def make(sources, **kwargs):
    given = {"prompt_length": 60, "response_length": 6, "chat_template": False, "shuffle": False, **kwargs}
    return PromptData(sources, TOKENIZER, **given)


def listed(*texts, **fields):
    return [{"prompt": text, **fields} for text in texts]


# --- names


def test_a_named_set_is_grouped_by_its_name_and_routed_by_its_data_source(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "data_source": "mine"}\n{"prompt": "b"}\n')
    data = make([f"sums={ADDITION}", str(path)], named=True, limit=2)
    batches = list(data.eval_batches(3))
    assert [name for batch in batches for name in batch.sets] == ["sums", "sums", "mine", "all", "", ""]
    assert [r.get("data_source") for b in batches for r in b.records][:3] == ["addition", "addition", "mine"]
    assert make(ADDITION).batch(0, 1).sets == ["addition"]


@pytest.mark.parametrize(
    "text, name, source",
    [
        ("held-out.2=a.jsonl", "held-out.2", "a.jsonl"),
        (f"s={ADDITION}", "s", ADDITION),
        (ADDITION, "", ADDITION),
        ("dir/split=test/a.parquet", "", "dir/split=test/a.parquet"),
        ("hf:x:split=y", "", "hf:x:split=y"),
        ("~x=y", "", "~x=y"),
        ("a.jsonl", "", "a.jsonl"),
    ],
)
def test_what_is_a_name_and_what_a_source(text, name, source):
    assert split_name(text) == (name, source)


def test_the_path_of_what_exists_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "split=test.jsonl").write_text('{"prompt": "a"}')
    assert split_name("split=test.jsonl") == ("", "split=test.jsonl")
    assert make("split=test.jsonl", named=True).batch(0, 1).sets == ["all"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("my set=a.jsonl", "'my set' is no name of a set .*; did you mean 'my_set'"),
        ("=a.jsonl", "'' is no name of a set .*; expected a name as in test=a.jsonl"),
        ("a=", "no source behind the name; expected a=SOURCE"),
        ("é=a.jsonl", "'é' is no name of a set"),
    ],
)
def test_a_bad_name_is_named(text, message):
    with pytest.raises(UserError, match=message):
        split_name(text)


def test_a_name_that_would_mix_two_sets_is_refused():
    with pytest.raises(
        UserError, match="data: the name 'addition' of addition=.*seed=1.* is also the data_source of records of jax"
    ):
        make([ADDITION, f"addition={ADDITION[:-1]}, seed=1)"], named=True)
    assert set(make([ADDITION, ADDITION[:-1] + ", seed=1)"], named=True).batch(0, 20).sets) == {"addition"}


# --- repeats


def test_repeats_and_leakage_are_counted_and_the_first_is_named(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n\n{"prompt": "a"}\n{"prompt": "a"}\n')
    held = tmp_path / "test.jsonl"
    held.write_text('{"prompt": "x"}\n{"prompt": "b"}\n{"prompt": "x", "answer": "1"}\n')
    more = tmp_path / "more.jsonl"
    more.write_text('{"prompt": "a", "data_source": "s"}\n{"prompt": "y", "data_source": "s"}\n')
    train, held_out = make(str(path)), make([f"test={held}", str(more)], named=True)
    assert repeat_notices(train, held_out) == [
        f"2 of 4 training prompts repeat an earlier one; first: {path}:4 repeats {path}:1",
        f"1 of 3 held-out prompts of test repeat an earlier one; first: {held}:3 repeats {held}:1",
        f"1 of 3 held-out prompts of test are also training prompts; first: {held}:2, in training {path}:2",
        f"1 of 2 held-out prompts of s are also training prompts; first: {more}:1, in training {path}:1",
    ]
    assert repeat_notices(None, held_out) == repeat_notices(train, held_out)[1:2]
    assert repeat_notices(train, None) == repeat_notices(train, held_out)[:1]


def test_what_differs_in_one_token_is_no_repeat():
    assert repeat_notices(make(listed("a", "b", "ab")), make(listed("ba", "abc"))) == []
    assert repeat_notices(None, None) == []


def test_the_tasks_do_not_leak():
    for task in ("addition", "arithmetic", "sorting", "countdown", "word_problems"):
        name = f"jaxrl_llm.tasks:{task}"
        train, test = (make(f"{name}(split='{split}')", limit=300, prompt_length=999) for split in ("train", "test"))
        assert repeat_notices(train, test) == [], task


# --- a run


def test_a_run_tells_what_it_skipped_and_what_repeats_and_names_its_sets(tmp_path, capsys):
    path, workdir = tmp_path / "train.jsonl", tmp_path / "run"
    good = [json.dumps(record) for record in tiny_folder.records(5)]
    path.write_text("\n".join([*good, good[2], "{", '{"prompt": ""}', "]"]))
    config = tiny_folder.config(
        data__train=(str(path),),
        data__eval=("seen=tests.tiny_folder:records(count=3)", "tests.tiny_folder:records(count=12)"),
        data__on_bad_record="skip",
        eval__max_prompts=9,
        eval__interval=0,
        trainer__steps=1,
        trainer__save_interval=0,
        logging__progress="plain",
    )
    with fit(config, workdir) as run:
        assert len(list(run)) == 1
    said = capsys.readouterr().out
    for line in (
        f"3 of 9 records of config.data.train {path} were skipped (data.on_bad_record): 33.3%; 2 not JSON, the first: "
        f"{path}:7: not a JSON object on one line",
        f"1 empty prompt, the first: {path}:8: the prompt is empty",
        f"1 of 6 training prompts repeat an earlier one; first: {path}:6 repeats {path}:3",
        "3 of 3 held-out prompts of seen are also training prompts; first: tests.tiny_folder:records(count=3) [0], in "
        f"training {path}:1",
    ):
        assert said.count(line) == 1, line
    first = read_jsonl(workdir / "metrics.jsonl")[0]
    problems = {name: n for name, n in first.items() if name.endswith("/problems")}
    assert problems == {"val-aux/seen/problems": 3, "val-aux/words/problems": 3, "val-aux/signs/problems": 6}
    assert "val-core/seen/reward/mean@1" in first


def test_without_a_folder_what_was_skipped_is_a_warning(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join([*(json.dumps(record) for record in tiny_folder.records(5)), "{"]))
    config = tiny_folder.config(data__train=(str(path),), data__eval=(), data__on_bad_record="skip", eval__interval=0)
    with pytest.warns(UserWarning, match=r"1 of 6 records of config.data.train .* were skipped .*train.jsonl:6"):
        fit(config).close()


def test_a_missing_response_is_found_before_the_first_step(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "1+1=?", "response": "2"}\n{"prompt": "2+2=?"}\n{"prompt": "3+3=?", "response": 6}\n')
    given = {"data__train": (str(path),), "data__eval": (), "eval__interval": 0}
    with pytest.raises(UserError, match=r"train.jsonl:2: data.response_key: no field 'response'"):
        sft(tiny_folder.config(**given))
    with pytest.warns(UserWarning, match=r"2 of 3 .* were skipped .*2 no response, the first: .*train.jsonl:2"):
        sft(tiny_folder.config(**given, data__on_bad_record="skip")).close()


def test_a_record_that_no_reward_scores_is_named(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "1+1=?", "data_source": "a"}\n{"prompt": "2+2=?", "data_source": "b"}\n')
    config = tiny_folder.config(data__train=(str(path),), reward__data_sources=("a",), data__eval=(), eval__interval=0)
    with pytest.raises(UserError, match=r"train.jsonl:2: reward.data_sources: no function scores 'b' \(known: a\)"):
        fit(config)

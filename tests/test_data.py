from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import grain
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm import dotted
from jaxrl_llm.data import PromptData
from jaxrl_llm.errors import UserError
from jaxrl_llm.order import epoch_steps
from jaxrl_llm.records import format_prompt
from tests import tokenizers_for_tests as made

TOKENIZER: Any = made.characters()
P, R = 48, 6


def make(sources, **kwargs):
    return PromptData(
        sources, TOKENIZER, **{"prompt_length": P, "response_length": R, "chat_template": False, **kwargs}
    )


def numbered(count, **fields):
    return [{"prompt": str(i), "i": i, **fields} for i in range(count)]


def write_jsonl(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def drawn(data, cursor, count):
    return [record["i"] for record in data.batch(cursor, count).records]


def fails(message, sources, **kwargs):
    with pytest.raises(UserError, match=message):
        make(sources, **kwargs)


# --- the arrays


def test_a_batch_is_left_padded_and_masked():
    batch = make([{"prompt": "ab"}, {"prompt": "abcd"}], prompt_length=4, shuffle=False).batch(0, 2)
    a, b, c, d = TOKENIZER("abcd", add_special_tokens=False).input_ids
    pad = TOKENIZER.pad_token_id
    prompts = batch.prompts
    np.testing.assert_array_equal(prompts.prompts, [[pad, pad, a, b], [a, b, c, d]])
    np.testing.assert_array_equal(prompts.prompt_mask, [[False, False, True, True], [True] * 4])
    np.testing.assert_array_equal(prompts.uid, [0, 1])
    np.testing.assert_array_equal(prompts.max_new_tokens, [R, R])
    assert prompts.prompt_valid.all() and batch.texts == ["ab", "abcd"] and batch.cursor == 2
    assert [x.dtype for x in (prompts.prompts, prompts.prompt_mask, prompts.uid, prompts.prompt_valid)] == [
        np.int32, np.bool_, np.int32, np.bool_,
    ]  # fmt: skip
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(prompts))


def test_pad_may_equal_eos_and_is_told_by_the_mask():
    assert TOKENIZER.pad_token_id == TOKENIZER.eos_token_id
    batch = make(numbered(3), chat_template=True).batch(0, 3)
    prompts, mask = np.asarray(batch.prompts.prompts), np.asarray(batch.prompts.prompt_mask)
    assert (prompts[mask] == TOKENIZER.eos_token_id).sum() == 3  # <|im_end|> of each user message


def test_evaluation_sees_every_prompt_once_and_fills_up_the_last_batch():
    batches = list(make(numbered(5)).eval_batches(2))
    records = [record for batch in batches for record in batch.records]
    assert [record.get("i") for record in records] == [0, 1, 2, 3, 4, None]
    last = batches[-1].prompts
    np.testing.assert_array_equal(last.prompt_valid, [True, False])
    np.testing.assert_array_equal(last.max_new_tokens, [R, 0])
    np.testing.assert_array_equal(last.uid, [4, 5])
    assert np.asarray(last.prompt_mask)[:, -1].all()  # a filler is no empty prompt
    assert batches[-1].texts == ["4", ""]
    assert len({str(jax.tree.map(lambda x: (x.shape, x.dtype), b.prompts)) for b in batches}) == 1


def test_record_arrays_have_one_dtype_and_follow_their_prompts():
    records = [*numbered(9, half=True), {"prompt": "x", "i": 9, "half": False}]
    arrays = {"i": "i", "square": lambda r: r["i"] ** 2 / 2, "half": "half", "pair": lambda r: [r["i"], 1]}
    batch = make(records, record_arrays=arrays, seed=3).batch(7, 8)
    i = np.array([record["i"] for record in batch.records])
    found = batch.prompts.record_arrays
    np.testing.assert_array_equal(found["i"], i)
    np.testing.assert_array_equal(found["square"], i**2 / 2)
    np.testing.assert_array_equal(found["pair"], np.stack([i, np.ones_like(i)], 1))
    assert {name: str(a.dtype) for name, a in found.items()} == {
        "i": "int32", "square": "float32", "half": "bool", "pair": "int32",
    }  # fmt: skip
    fails(r"record \[0\]: record array 'a': expected a number, found '0'", numbered(2), record_arrays={"a": "prompt"})
    fails(r"record \[0\]: record array 'a': KeyError: 'b'", numbered(2), record_arrays={"a": lambda r: r["b"]})
    fails("does not fit into 32 bits", numbered(2), record_arrays={"a": lambda r: 2**40})


# --- order


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**40), size=st.integers(1, 12), cursor=st.integers(0, 40), weighted=st.booleans())
def test_what_is_drawn_depends_on_seed_and_cursor_alone(seed, size, cursor, weighted):
    sources = [numbered(size), numbered(3)] if weighted else [numbered(size)]
    kwargs = {"seed": seed, "weights": [3, 1] if weighted else ()}
    run, resumed = make(sources, **kwargs), make(sources, **kwargs)
    expected = drawn(run, 0, cursor + 5)[cursor:]
    assert drawn(resumed, cursor, 5) == expected == drawn(run, cursor, 5)


def test_every_epoch_holds_every_record_once_in_another_order():
    data = make(numbered(20), seed=1)
    epochs = [drawn(data, 20 * epoch, 20) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epochs[0] != drawn(make(numbered(20), seed=2), 0, 20)
    # The order is part of what a seed means: a change here changes every run.
    assert epochs[0][:6] == [2, 19, 0, 1, 11, 18]


def test_without_shuffling_the_order_is_the_files():
    assert drawn(make(numbered(3), shuffle=False), 2, 5) == [2, 0, 1, 2, 0]


def test_uids_never_repeat_and_name_the_position():
    data = make(numbered(3))
    uids = np.concatenate([np.asarray(data.batch(cursor, 4).prompts.uid) for cursor in (0, 4, 8)])
    np.testing.assert_array_equal(uids, np.arange(12))


def test_a_mixture_has_the_shares_asked_for():
    data = make([numbered(4, of="a"), numbered(50, of="b")], weights=[0.75, 0.25], seed=5)
    records = data.batch(0, 400).records
    assert Counter(record["of"] for record in records) == {"a": 300, "b": 100}
    of_b = [record["i"] for record in records if record["of"] == "b"]
    assert Counter(of_b) == dict.fromkeys(range(50), 2)  # b's own epochs


def test_several_sources_without_weights_are_one_set():
    data = make([numbered(3, of="a"), numbered(5, of="b")])
    assert Counter(record["of"] for record in data.batch(0, 8).records) == {"a": 3, "b": 5}
    assert len(data) == 8


def test_epochs_in_steps():
    assert [epoch_steps(8, 4), epoch_steps(9, 4), epoch_steps(9, 4, epochs=4), epoch_steps(1, 8)] == [2, 3, 9, 1]


# --- prompts


def test_too_long_prompts_are_refused_or_dropped_with_a_count(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", {"prompt": "abc"}, "", {"prompt": "abcde"}, {"prompt": "a" * 9})
    fails(
        r"2 of 3 prompts are longer than rollout.prompt_length = 4 tokens; the first: .*train.jsonl:3 with 5, "
        r"the longest: .*train.jsonl:4 with 9",
        path,
        prompt_length=4,
    )
    data = make(path, prompt_length=4, too_long="drop")
    assert (len(data), data.dropped, data.longest) == (1, 2, 3)
    assert data.batch(0, 3).texts == ["abc"] * 3
    fails("no prompts to draw; all 3 are longer than 2", path, prompt_length=2, too_long="drop")
    assert make(path, prompt_length=9).longest == 9  # a prompt of full length


def test_a_template_fills_in_fields():
    records = [{"a": 3, "b": "{4}", "c": {"d": 0.5}}]
    data = make(records, prompt_template=r"{a}+{b}, {c.d}: \boxed{} {{a}}")
    assert data.batch(0, 1).texts == [r"3+{4}, 0.5: \boxed{} {a}"]
    fails(r"record \[0\]: data.prompt_template: {questoin}: no field .* \(found: question\); did you mean 'question'",
          [{"question": "?"}], prompt_template="{questoin}")  # fmt: skip
    fails(r"\{c\} is a dict", records, prompt_template="{c}")
    with pytest.raises(UserError, match="no field 'a.__class__'"):  # fields only, no attributes
        format_prompt("{a.__class__}", {"a": 1})


def test_control_tokens_in_the_config_are_refused():
    fails("data.prompt_template spells '<|im_end|>'", numbered(1), prompt_template="{prompt}<|im_end|>")
    fails("data.system_prompt spells '<|im_start|>'", numbered(1), system_prompt="<|im_start|>")


def test_chats_are_rendered_and_their_text_is_kept():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    batch = make([{"prompt": chat}], prompt_length=99, chat_template=True).batch(0, 1)
    ids = np.asarray(batch.prompts.prompts)[np.asarray(batch.prompts.prompt_mask)]
    assert (
        TOKENIZER.decode(ids)
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert batch.texts == ["Be brief.\n\nhi"]


@pytest.mark.parametrize(
    "record, message",
    [
        ({"question": "a"}, r"record \[1\]: data.prompt_key: no field 'prompt' in the record \(found: question\)"),
        ({"prompt": ""}, r"record \[1\]: the prompt is empty"),
        ({"prompt": 3}, r"record \[1\]: data.prompt_key 'prompt': a prompt is a string or a list of messages, found 3"),
        ({"prompt": [{"role": "user", "content": "a"}]}, r"record \[1\]: .*needs data.chat_template=True"),
        ("text", r"record \[1\]: expected a dict, found str"),
    ],
)
def test_a_bad_record_is_named(record, message):
    fails(message, [{"prompt": "good"}, record])


# --- sources


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": ', r"train.jsonl:3: not a JSON object on one line: .*found '\{\"prompt\":'"),
        ("[1, 2]", "train.jsonl:3: expected a JSON object, found list"),
        ("[" * 100_000, "train.jsonl:3: not a JSON object"),
        ('{"promt": "a"}', r"train.jsonl:3: data.prompt_key: no field 'prompt' .*did you mean 'promt'"),
    ],
)
def test_a_bad_line_is_named_once(tmp_path, line, message):
    path = write_jsonl(tmp_path / "train.jsonl", {"prompt": "a"}, "", line)
    with pytest.raises(UserError, match=message) as error:
        make(path)
    assert str(error.value).count("train.jsonl") == 1


def test_jsonl_reads_other_scripts_line_ends_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes("\ufeff".encode() + '{"prompt": "é"}\r\n{"prompt": "日"}'.encode())
    assert [record["prompt"] for record in make(str(path)).records] == ["é", "日"]
    path.write_bytes(b'{"prompt": "\xff"}')
    fails("train.jsonl:1: not UTF-8: byte 12 of the line", str(path))


def test_verls_parquet_loads_unchanged(tmp_path):
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {i}+1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(3)
    ]
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    data = make(str(path), prompt_length=80, chat_template=True, shuffle=False)
    batch = data.batch(0, 3)
    assert batch.records == rows
    assert batch.texts == ["What is 0+1?", "What is 1+1?", "What is 2+1?"]
    fails(r"train.parquet, row 0: data.prompt_key: no field 'question'", str(path), prompt_key="question")
    path.write_bytes(b"no parquet")
    fails("not a Parquet file", str(path))


def test_a_dataset_folder_loads(tmp_path):
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_list(numbered(3))
    part.save_to_disk(tmp_path / "plain")
    assert drawn(make(str(tmp_path / "plain"), shuffle=False), 0, 3) == [0, 1, 2]
    datasets.DatasetDict({"train": part, "test": part.select([2])}).save_to_disk(tmp_path / "both")
    assert drawn(make(f"{tmp_path / 'both'}:test"), 0, 1) == [2]
    fails("name one of its splits: train, test", str(tmp_path / "both"))
    fails("did you mean 'test'", f"{tmp_path / 'both'}:tset")


def test_the_hub_is_asked_for_name_config_and_split(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(path, **kwargs):
        asked.append((path, kwargs))
        return datasets.Dataset.from_list(numbered(2))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    make("hf:openai/gsm8k:main:test")
    make("hf:openai/gsm8k", source_kwargs={"name": "main"})
    assert asked == [
        ("openai/gsm8k", {"name": "main", "split": "test"}),
        ("openai/gsm8k", {"name": "main", "split": "train"}),
    ]

    def unreachable(path, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    fails("cannot load it from the Hugging Face hub: ConnectionError: no route.*give a .jsonl", "hf:openai/gsm8k")


def test_functions_and_other_sequences_are_sources(tmp_path):
    assert len(make("jaxrl_llm.tasks:addition")) == 100
    assert len(make("jaxrl_llm.tasks:addition(digits=2, split='test')")) == 1000
    assert len(make("jaxrl_llm.tasks:addition", source_kwargs={"digits": 2})) == 10_000
    assert len(make(grain.MapDataset.source(numbered(4)))) == 4
    (tmp_path / "mine.py").write_text("def records(n):\n    return [{'prompt': str(i)} for i in range(n)]\n")
    assert len(make(f"{tmp_path}/mine.py:records(n=7)")) == 7


@pytest.mark.parametrize(
    "name, message",
    [
        ("jaxrl_llm.tasks:additoin", "no 'additoin' in jaxrl_llm.tasks; did you mean 'addition'"),
        ("jaxrl_llm.task:addition", "there is no module 'jaxrl_llm.task'"),
        ("jaxrl_llm.tasks:addition(base=2)", "no argument 'base'; valid: "),
        ("jaxrl_llm.tasks:addition(digit=2)", "no argument 'digit'; did you mean 'digits'"),
        ("jaxrl_llm.tasks:addition(2)", "only key=value"),
        ("jaxrl_llm.tasks:addition(digits=f())", "plain values"),
        ("jaxrl_llm.tasks:addition(split='dev')", "split must be all, train or test, found 'dev'"),
        ("jaxrl_llm.tasks:MOST_RECORDS()", "'int' object is not callable"),
        ("nowhere", "'nowhere' is no source"),
        ("nowhere.py:f", "there is no file"),
    ],
)
def test_a_source_that_is_not_there_is_named(name, message):
    fails(message, name)


def test_a_missing_file_is_named_with_the_nearest(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", {"prompt": "a"})
    fails("there is no file .*trian.jsonl'; did you mean 'train.jsonl'", str(tmp_path / "trian.jsonl"))
    (tmp_path / "empty.jsonl").touch()
    fails("no prompts to draw; it is empty", str(tmp_path / "empty.jsonl"))
    fails("expected a sequence of records", 7)
    fails("2 weights for 1 sources", numbered(2), weights=[1, 2])


def test_a_limit_takes_the_first_records_of_each_source():
    assert [r["i"] for r in make([numbered(3), numbered(1)], limit=2).records] == [0, 1, 0]


def test_importing_a_broken_module_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken_source.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="importing broken_source failed: No module named 'nothing_of_this_name'"):
        dotted.load("broken_source:f")
    assert "broken_source" not in sys.modules

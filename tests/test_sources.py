"""Files that are not what they should be, and what is said about them."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.data import PromptData
from jaxrl_llm.errors import UserError
from jaxrl_llm.sources import open_source
from tests import tokenizers_for_tests as made
from tests.chat_families import families

ZIPPED = gzip.compress(b'{"prompt": "a"}', mtime=0)
TOKENIZER: Any = made.characters()
OBJECT = st.dictionaries(st.text(max_size=3), st.text(max_size=5) | st.integers() | st.none())
LINE = st.binary(max_size=12) | st.sampled_from([b'{"prompt": "a"}', b'{"prompt": ""}', b"[]", b"{}"])


def make(sources, **kwargs):
    given = {"prompt_length": 60, "response_length": 6, "chat_template": False, "shuffle": False, **kwargs}
    return PromptData(sources, TOKENIZER, **given)


def prompts(sources, **kwargs):
    return [record["prompt"] for record in make(sources, **kwargs).records]


def fails(message, sources, **kwargs):
    with pytest.raises(UserError, match=message):
        make(sources, **kwargs)


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


# --- JSON


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", ZIPPED, "is compressed; unpack it first, as with: gunzip .*a.jsonl"),
        ("a.jsonl.gz", ZIPPED, "a.jsonl.gz: is compressed; .*gunzip"),
        ("a.json.zst", b"anything", "is compressed; .*unzstd"),
        ("a.parquet", b"PK\x03\x04...", "is compressed; .*unzip"),
        ("a.jsonl", b"PAR1......PAR1", "is a Parquet file; its name must end in .parquet"),
        ("a.jsonl", '{"prompt": "a"}'.encode("utf-16"), "is UTF-16; expected UTF-8, as from: iconv"),
        ("a.jsonl", "", "no prompts to draw; it is empty"),
        ("a.jsonl", "\ufeff\r\n \n\n", "no prompts to draw; it is empty"),
        ("a.json", "[]", "no prompts to draw; it is empty"),
        ("a.jsonl", '[{"prompt": "a"}, {"prompt": "b"}]', "holds one JSON array; name it a.json, or write"),
        ("a.jsonl", '[\n{"prompt": "a"},\n{"prompt": "b"}\n]', "holds one JSON array; name it a.json"),
        ("a.json", '{\n"v": 1, "data": []}', "JSON object over several lines, with v, data; .*its 'data' may be"),
        ("a.json", '[{"prompt": "a"},\n {"prompt": ]', "a.json:2: not a JSON array of objects: Expecting value"),
        ("a.json", '[{"prompt": "a"}\n {"prompt": "b"}]', r"a.json:2: .*expected ',' or '\]'"),
        ("a.json", '[{"prompt": "a"}', r"a.json:1: .*expected ',' or '\]'"),
        ("a.json", '[{"prompt": "a"}] x', "nothing is expected behind the array, found x"),
        ("a.json", b'[{"prompt": "\xff"}]', "a.json: not UTF-8: byte 13"),
        ("a.json", '[{"prompt": "a"},\n\n 3]', "a.json:3: expected a JSON object, found int"),
        ("a.json", "[" * 100_000, "not a JSON array of objects"),
        ("a.jsonl", '{"prompt": "a"}\n' + "\0" * 512, "a.jsonl:2: not a JSON object on one line"),
        ("a.jsonl", '{"prompt": "a\0b"}', "a.jsonl:1: not a JSON object on one line: Invalid control character"),
        ("a.jsonl", '{"prompt": "a", "answer": "\\udc00"}', r"a.jsonl:1: half of a character \(.*, \\udc00\)"),
        ("a.json", '[{"prompt": "a"}, {"prompt": "\\uD800"}]', r"a.json:1: half of a character"),
        ("a.jsonl", '{"prompt": "a"}\r{"prompt": "b"}', "a.jsonl:1: not a JSON object on one line: Extra data"),
    ],
)  # fmt: skip
def test_a_file_that_is_something_else_is_named_with_what_to_do(tmp_path, name, content, message):
    fails(message, written(tmp_path / name, content))


@pytest.mark.parametrize(
    "content",
    [
        '[{"prompt": "a"}, {"prompt": "b"}]',
        '\ufeff[\r\n  {"prompt": "a"},\r\n  {\r\n    "prompt": "b"\r\n  }\r\n]\r\n',
        '{"prompt": "a"}\r\n\r\n{"prompt": "b"}',
        '\ufeff{"prompt": "a"}\n{"prompt": "b"}\n\n',
    ],
)
def test_a_json_file_holds_lines_or_an_array(tmp_path, content):
    path = written(tmp_path / "a.json", content)
    assert prompts(path) == ["a", "b"]
    source = open_source(path)
    assert (source.where(1).startswith(f"{path}:") and source.where(1) > source.where(0)) or "\n" not in content


def test_an_elements_line_is_where_it_begins(tmp_path):
    source = open_source(written(tmp_path / "a.json", '[\n {"prompt":\n "a"},\n\n {"prompt": "b"}, {"prompt": "c"}\n]'))
    assert [source.where(i).rpartition(":")[2] for i in range(3)] == ["2", "5", "5"]


@settings(deadline=None, max_examples=60)
@given(records=st.lists(OBJECT, max_size=5), indent=st.sampled_from([None, 0, 2]))
def test_an_array_is_read_as_json_reads_it(tmp_path_factory, records, indent):
    path = written(tmp_path_factory.mktemp("json") / "a.json", json.dumps(records, indent=indent))
    source = open_source(path)
    assert [source[i] for i in range(len(source))] == records


def test_escaped_pairs_and_nul_are_characters(tmp_path):
    path = written(tmp_path / "a.jsonl", '{"prompt": "\\ud83d\\ude00 \\u0000"}')
    assert prompts(path) == ["\U0001f600 \0"]


def test_folders_and_names_beside_them(tmp_path):
    (tmp_path / "a.jsonl").mkdir()
    fails("a.jsonl' is a folder; expected a file", str(tmp_path / "a.jsonl"))
    fails("there is no file .*b.jsonl.gz'", str(tmp_path / "b.jsonl.gz"))


# --- Parquet


def test_a_parquet_file_that_is_cut_off_or_lacks_a_column(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"question": ["a"] * 1000, "answer": [str(i) for i in range(1000)]}), path)
    fails(r"a.parquet, row 0: data.prompt_key: no field 'prompt' in the record \(found: question, answer\)", str(path))
    whole = path.read_bytes()
    for size in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        fails("a.parquet: not a Parquet file, or not a whole one", str(path))
    damaged = bytearray(whole)
    damaged[4:400] = bytes(396)
    path.write_bytes(damaged)
    fails("a.parquet: not a Parquet file, or not a whole one", str(path))
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), path)
    fails("several columns are named 'prompt'", str(path))
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    fails("it is empty", str(path))


def test_a_folder_named_as_a_partition_adds_no_field(tmp_path):
    (tmp_path / "split=test").mkdir()
    path = tmp_path / "split=test" / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a"]}), path)
    assert list(make(str(path)).records) == [{"prompt": "a"}]


def test_verls_parquet_with_nulls(tmp_path):
    """A column of messages has all the fields of all of them, None where a message has none."""
    rows = [
        {"prompt": [{"role": "user", "content": "1+1?", "name": None}], "data_source": None, "extra_info": None},
        {"prompt": [{"role": "system", "content": "Brief."}, {"role": "user", "content": "2+2?", "name": "x"}]},
        {"prompt": None},
        {"prompt": []},
        {"prompt": [{"role": "user", "content": None}]},
        {"prompt": [None, {"role": "user", "content": "a"}]},
    ]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    qwen = families()["qwen25"]
    given: dict[str, Any] = {"prompt_length": 200, "response_length": 6, "shuffle": False}
    data = PromptData(str(path), qwen, on_bad_record="skip", named=True, **given)
    assert data.batch(0, 2).texts == ["1+1?", "Brief.\n\n2+2?"] and data.batch(0, 2).sets == ["all", "all"]
    assert "None" not in qwen.decode(data.ids(0)) + qwen.decode(data.ids(1))
    (bad,) = data.skipped
    assert {kind: count for kind, (count, _) in bad.kinds.items()} == {"no prompt": 1, "malformed chat": 3}
    with pytest.raises(UserError, match=r"a.parquet, row 2: data.prompt_key 'prompt': a prompt is .* found None"):
        PromptData(str(path), qwen, **given)


# --- bad records

LINES = [
    '{"prompt": "a"}',
    '{"prompt": ',
    "[1]",
    '{"promt": "b"}',
    '{"prompt": ""}',
    '{"prompt": "  "}',
    '{"prompt": 3}',
    '{"prompt": [{"role": "usr", "content": "a"}]}',
    '{"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}',
    b'{"prompt": "\xff"}'.decode("latin-1"),
    '{"prompt": "\\ud800"}',
    '{"prompt": "z"}',
]
KINDS = {
    "not JSON": (1, ":2: not a JSON object on one line"),
    "not an object": (1, ":3: expected a JSON object, found list"),
    "no prompt": (2, ":4: data.prompt_key: no field 'prompt'"),
    "empty prompt": (2, ":5: the prompt is empty"),
    "malformed chat": (1, ":8: message 0 of the prompt has role 'usr'"),
    "template error": (1, ":9: the chat template refuses the prompt: System role not supported"),
    "not UTF-8": (1, ":10: not UTF-8"),
    "broken character": (1, ":11: half of a character"),
}


def test_bad_records_are_counted_by_kind_with_the_first_of_each(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes("\n".join(LINES).encode("latin-1"))
    gemma = families()["gemma"]
    given: dict[str, Any] = {"prompt_length": 60, "response_length": 6, "shuffle": False}
    data = PromptData([str(path), [{"prompt": "c"}]], gemma, on_bad_record="skip", **given)
    assert [record["prompt"] for record in data.records] == ["a", "z", "c"] and len(data) == 3
    bad, none = data.skipped
    assert {kind: count for kind, (count, _) in bad.kinds.items()} == {k: n for k, (n, _) in KINDS.items()}
    assert all(bad.kinds[kind][1].startswith(f"{path}{text}") for kind, (_, text) in KINDS.items())
    assert (bad.count, bad.read, none.count, none.read) == (10, 12, 0, 1)
    (notice,) = data.skip_notices()
    assert notice.startswith(
        f"10 of 12 records of data {path} were skipped (data.on_bad_record): 83.3%; 1 not JSON, the"
    )
    assert all(f"{n} {kind}, the first: {path}:" in notice for kind, (n, _) in KINDS.items())
    for number in range(2, 12):  # and each of them alone is an error that names it
        path.write_bytes("\n".join([LINES[0], LINES[number - 1]]).encode("latin-1"))
        with pytest.raises(UserError) as error:
            PromptData(str(path), gemma, **given)
        assert str(error.value).startswith(f"{path}:2: ") and str(error.value).count(str(path)) == 1


def test_what_rewards_and_others_need_of_a_record_counts_too():
    records = [{"prompt": "a", "i": 1}, {"prompt": "b"}, {"prompt": "c", "i": "x"}, {"prompt": "d", "i": 4}]

    def check(record):
        if record["prompt"] == "d":
            raise UserError("no d")

    data = make(records, record_arrays={"i": "i"}, check=check, on_bad_record="skip")
    assert data.batch(0, 1).prompts.record_arrays["i"].tolist() == [1] and len(data) == 1
    said = str(data.skipped[0])
    assert said.startswith("75.0%; 2 no value for a reward, the first: record [1]: no field 'i' in the record")
    assert said.endswith("; 1 refused, the first: record [3]: no d")
    fails(r"record \[3\]: no d", [records[0], records[0], records[0], records[3]], check=check)


def test_if_all_are_bad_it_is_an_error(tmp_path):
    path = written(tmp_path / "a.jsonl", '{"a": 1}\n{"b": 2}\n{')
    fails(
        r"a.jsonl: no prompts to draw; all 3 records are bad: 100.0%; 2 no prompt, the first: .*a.jsonl:1: .*; "
        r"1 not JSON, the first: .*:3: ",
        path,
        on_bad_record="skip",
    )
    path = written(tmp_path / "a.jsonl", '{"prompt": "abcdef"}\n{')
    fails(
        "all 1 are longer than 3 tokens; 1 more are bad", path, on_bad_record="skip", too_long="drop", prompt_length=3
    )


def test_a_sequence_of_ones_own_that_fails_is_named():
    class Broken:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return {"prompt": f"{6 // (index - 1)}"}

    fails(r"record \[1\]: ZeroDivisionError", Broken())
    assert prompts(Broken(), on_bad_record="skip") == ["-6", "6"]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.binary(max_size=12) | st.sampled_from([b'{"prompt": "a"}', b'{"prompt": ""}', b"[]", b"{}"]), max_size=6
    )
)
def test_no_bytes_do_anything_but_count_or_be_refused(tmp_path_factory, lines):
    path = written(tmp_path_factory.mktemp("fuzz") / "a.jsonl", b"\n".join(lines))
    good = 0
    for line in b"\n".join(lines).split(b"\n"):
        good += line.strip().removeprefix(b"\xef\xbb\xbf") == b'{"prompt": "a"}'
    try:
        data = make(path, on_bad_record="skip")
    except UserError:
        return
    assert len(data) == good and data.skipped[0].read == data.skipped[0].count + good

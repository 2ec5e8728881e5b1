from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxrl_llm
from jaxrl_llm.chat import render_prompt
from jaxrl_llm.errors import UserError
from jaxrl_llm.tokenizer import (
    cut_at_stop,
    decode_response,
    load_tokenizer,
    stop_automaton,
    token_bytes,
    unknown_in,
)
from tests import tokenizers_for_tests as made

KINDS: dict[str, Any] = {
    "characters": made.characters(),
    "byte_level": made.byte_level(),
    "sentence_pieces": made.sentence_pieces(),
}
CHARACTERS, BYTES, PIECES = KINDS.values()


@pytest.fixture(params=KINDS)
def tokenizer(request):
    return KINDS[request.param]


# --- loading


def test_a_saved_folder_loads_with_its_template(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.chat_template == tokenizer.chat_template
    assert render_prompt(loaded, "What is 3+4?") == render_prompt(tokenizer, "What is 3+4?")
    assert loaded.pad_token == loaded.eos_token  # of the three only `characters` names one, and it is the same


def test_a_template_in_the_config_file_loads_too(tmp_path):
    CHARACTERS.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": made.CHATML}))
    assert render_prompt(load_tokenizer(tmp_path), "hi") == render_prompt(CHARACTERS, "hi")


def test_what_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(UserError, match="'/nowhere/at/all' is not a folder"):
        load_tokenizer("/nowhere/at/all")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"no tokenizer.json in .*found: config.json"):
        load_tokenizer(tmp_path)
    for name, why in (("checkpoints", "a run is no model"), ("adapter_config.json", "a LoRA adapter is no model")):
        (tmp_path / name).mkdir()
        with pytest.raises(UserError, match=why):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{ broken")
    with pytest.raises(UserError, match="cannot load folder"):
        load_tokenizer(tmp_path)


def test_characters_without_a_token_are_named():
    quickstart = load_tokenizer(Path(jaxrl_llm.__file__).parent / "quickstart_model")
    assert unknown_in(quickstart, "4x7=é") == ["x", "é"] and unknown_in(quickstart, "47+38=") == []
    assert unknown_in(quickstart, "") == []


def test_neither_torch_nor_jax_is_imported_and_nothing_is_said(tmp_path):
    CHARACTERS.save_pretrained(tmp_path)
    program = (
        "import sys; from jaxrl_llm.tokenizer import load_tokenizer\n"
        f"load_tokenizer({str(tmp_path)!r}); assert not {{'torch', 'jax'}} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# --- responses


def test_a_response_is_decoded_without_special_tokens(tokenizer):
    ids = tokenizer("the answer: 7", add_special_tokens=False).input_ids
    assert decode_response(tokenizer, [*ids, tokenizer.eos_token_id]) == "the answer: 7"
    assert decode_response(tokenizer, [tokenizer.eos_token_id]) == decode_response(tokenizer, []) == ""
    assert decode_response(tokenizer, np.array([*ids, len(tokenizer) + 5])) == "the answer: 7"


def test_token_bytes_join_to_the_text(tokenizer):
    text = "the answer is 42:\n\n naïve é" if tokenizer is not CHARACTERS else "the answer is 42:\n\n é"
    pieces = token_bytes(tokenizer)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert b"".join(pieces[i] for i in ids).decode().lstrip(" ") == text
    assert len(pieces) == len(tokenizer)
    assert all(pieces[i] == b"" for i in tokenizer.all_special_ids)


def test_bytes_of_fallback_and_added_tokens():
    assert token_bytes(PIECES)[PIECES.convert_tokens_to_ids("<0x0A>")] == b"\n"
    assert token_bytes(BYTES)[BYTES.convert_tokens_to_ids("<think>")] == b"<think>"


# --- stop strings

PIECE = st.binary(max_size=4).map(lambda b: bytes(97 + x % 3 for x in b))
STOP = st.text("abc", min_size=1, max_size=4)


@settings(deadline=None, max_examples=200)
@given(st.lists(PIECE, min_size=1, max_size=6), st.lists(STOP, max_size=4), st.data())
def test_the_automaton_matches_as_soon_as_the_text_contains_a_stop_string(pieces, stops, data):
    table = stop_automaton(pieces, stops, vocab_size=len(pieces) + 1)
    assert table.dtype == np.int32 and table.shape == (len(table), len(pieces) + 1) and len(table) >= 2
    tokens = data.draw(st.lists(st.integers(0, len(pieces)), max_size=12))
    state, text = 0, b""
    for token in tokens:
        state = table[state, token]
        text += pieces[token] if token < len(pieces) else b""
        assert (state == len(table) - 1) == any(stop.encode() in text for stop in stops)


def test_a_stop_string_across_tokens_and_inside_one():
    pieces = token_bytes(BYTES)
    table = stop_automaton(pieces, ["\n\nQuestion", "7."], len(pieces))
    for text, stopped in [("a\n\nQuestion", True), ("a\nQuestion", False), ("is 7.5", True), ("日本", False)]:
        state = 0
        for token in BYTES(text, add_special_tokens=False).input_ids:
            state = table[state, token]
        assert (state == len(table) - 1) == stopped, text


def test_without_stop_strings_nothing_matches():
    np.testing.assert_array_equal(stop_automaton([b"a", b"b"], [], 3), [[0, 0, 0], [1, 1, 1]])


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UserError, match="may not be empty"):
        stop_automaton([b"a"], ["x", ""], 1)


def test_text_is_cut_at_the_first_stop_string():
    assert cut_at_stop("a b c", ["c", "b"]) == "a "
    assert cut_at_stop("a b c", ["x"]) == cut_at_stop("a b c", []) == "a b c"

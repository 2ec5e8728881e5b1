"""GGUF files as models: the same parameters as the Hugging Face folder they were made of, and what is refused."""

from __future__ import annotations

import math
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.errors import UserError
from jaxrl_llm.export import export
from jaxrl_llm.models import gguf, hf
from jaxrl_llm.models.families import transformer_config
from jaxrl_llm.models.gguf_fields import Fields
from jaxrl_llm.models.transformer import RopeConfig, make_transformer
from jaxrl_llm.tokenizer import load_tokenizer
from tests import gguf_files, tiny_folder
from tests.test_hf import FIXTURES
from tests.tiny_runs import checkpointed

gguf_package = pytest.importorskip("gguf")


def params_of(folder: Path, **options: Any) -> Any:
    declared = make_transformer(transformer_config(hf.read_config(folder)), **options).declare()
    return hf.load_params(folder, declared)


def settings(folder: Path) -> Any:
    """What the model computes by, beside its weights."""
    return transformer_config(hf.read_config(folder))


def same(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("case", ["tied", "untied", "head_dim", "bias", "linear"])
def test_the_parameters_are_those_of_the_folder(tmp_path: Path, case: str) -> None:
    def scaling(fields: dict[str, Any], tensors: Any) -> None:
        if case == "linear":
            fields |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}

    folder = FIXTURES / case
    found = hf.find_folder(gguf_files.write(tmp_path / f"{case}.gguf", folder, scaling))
    assert settings(found) == settings(folder)
    assert jax.tree.all(jax.tree.map(same, params_of(found), params_of(folder)))
    half = {"param_dtype": jnp.bfloat16}
    assert jax.tree.all(jax.tree.map(same, params_of(found, **half), params_of(folder, **half)))
    critic = params_of(found, value_head=True)  # which leaves an untied head unread
    assert same(critic["embed"], params_of(folder)["embed"]) and "lm_head" not in critic


def test_a_quantized_model_has_the_logits_of_its_dequantized_weights(tmp_path: Path) -> None:
    folder, copy = FIXTURES / "tied", tmp_path / "copy"
    path = gguf_files.write(tmp_path / "tiny.gguf", folder, quantize="Q8_0")
    q8 = gguf_package.GGMLQuantizationType.Q8_0

    def rounded(tensor: np.ndarray) -> np.ndarray:
        cut = tensor.ndim == 2 and tensor.shape[1] % 32 == 0
        return gguf_package.dequantize(gguf_package.quantize(tensor, q8), q8) if cut else tensor

    copy.mkdir()
    original = load_file(folder / "model.safetensors")
    # Rows are quantized one by one, so that their order does not matter.
    save_file({name: rounded(tensor) for name, tensor in original.items()}, copy / "model.safetensors")
    (copy / "config.json").write_text((folder / "config.json").read_text())

    model = make_transformer(settings(folder))
    tokens = jnp.arange(24).reshape(2, 12) % 97
    positions, segments = jnp.broadcast_to(jnp.arange(12), (2, 12)), jnp.ones((2, 12), jnp.int32)

    @jax.jit
    def logits(params: Any) -> Any:
        return model.heads["logits"](params, model.forward(params, tokens, positions, segments)[0])

    found, expected, exact = (logits(params_of(f)) for f in (hf.find_folder(path), copy, folder))
    np.testing.assert_array_equal(found, expected)
    assert 1e-4 < np.abs(found - exact).max() < 0.1 * np.abs(exact).max()


def llama3_factors(theta: float, size: int, factor: float, low: float, high: float, positions: int) -> np.ndarray:
    """Frequency by frequency, as llama.cpp's converter writes them."""
    found = []
    for i in range(0, size, 2):
        wavelength = 2 * math.pi * theta ** (i / size)
        if wavelength < positions / high:
            found.append(1.0)
        elif wavelength > positions / low:
            found.append(factor)
        else:
            smooth = (positions / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def test_llama_3_scaling_is_read_off_its_factors(tmp_path: Path) -> None:
    # The tiny heads have few frequencies; theta is such that one of them lies between the two bounds.
    factors = llama3_factors(3e5, 8, 8.0, 1.0, 4.0, 8192)
    assert factors[0] == 1 < factors[2] < factors[3] == 8

    def scaled(fields: dict[str, Any], tensors: Any) -> None:
        fields["llama.rope.freq_base"] = 3e5
        tensors["rope_freqs.weight"] = factors

    found = hf.find_folder(gguf_files.write(tmp_path / "a.gguf", FIXTURES / "tied", scaled))
    assert settings(found).rope == RopeConfig(3e5, "llama3", 8.0, 1.0, 4.0, 8192)

    def other(fields: dict[str, Any], tensors: Any) -> None:
        tensors["rope_freqs.weight"] = np.array([1, 2, 3, 8], np.float32)

    with pytest.raises(UserError, match=r"b.gguf: tensor 'rope_freqs.weight': .*not those of a Llama 3 scaling by 8"):
        hf.find_folder(gguf_files.write(tmp_path / "b.gguf", FIXTURES / "tied", other))


def test_a_run_of_a_gguf_file_exports_an_ordinary_folder(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "tiny.gguf", FIXTURES / "tied")
    config = tiny_folder.config(
        model__path=str(path), rollout__prompt_length=12, data__chat_template=False, data__eval=(), eval__interval=0
    )
    checkpointed(tmp_path / "run", config)
    assert export(tmp_path / "run", tmp_path / "out") == 1
    names = {"config.json", "model.safetensors", "generation_config.json"}
    names |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    assert jax.tree.all(jax.tree.map(same, params_of(tmp_path / "out"), params_of(FIXTURES / "tied")))
    exported, original = load_tokenizer(tmp_path / "out"), load_tokenizer(hf.find_folder(path))
    assert exported.get_vocab() == original.get_vocab() and exported.chat_template == gguf_files.TEMPLATE


# The tokenizer


def tokenizer(tmp_path: Path, **fields: Any) -> Any:
    changes = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    path = gguf_files.write(tmp_path / "t.gguf", FIXTURES / "tied", lambda found, _: found.update(changes))
    return load_tokenizer(hf.find_folder(path))


def test_numbers_are_cut_as_the_file_says(tmp_path: Path) -> None:
    digits = ["1 2", "12 3"]
    tokens = [*gguf_files.TOKENS, "12", "123", "[PAD9]", "[PAD10]"]
    kinds = [3, 3, 3] + [1] * (len(tokens) - 5) + [5, 5]
    found = {}
    for pre in ("smollm", "gpt-2", "llama-bpe", "tekken"):
        made = tokenizer(tmp_path, pre=pre, tokens=tokens, token_type=kinds, merges=digits, add_bos_token=pre[0] == "l")
        found[pre] = made.convert_ids_to_tokens(made("ab1234<|im_end|>")["input_ids"])
        assert len(made) == len(tokens) - 2, "what no text leads to is not in the vocabulary"
        assert made.decode(made("abc ?1")["input_ids"], skip_special_tokens=True) == "abc ?1"
    end = "<|im_end|>"
    assert found == {
        "smollm": ["a", "b", "1", "2", "3", "4", end],
        "gpt-2": ["a", "b", "123", "4", end],
        # These two do not cut a word that is a token; the second sees single digits.
        "llama-bpe": ["<|im_start|>", "ab", "123", "4", end],
        "tekken": ["ab", "1", "2", "3", "4", end],
    }


def test_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(64))]
    words = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "<t>"]
    tokens, scores = pieces + words, [0.0] * len(pieces) + [-9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0, 0.0]
    kinds = [2, 3, 3] + [6] * 64 + [1] * 8 + [4]
    made = tokenizer(
        tmp_path, model="llama", tokens=tokens, scores=scores, token_type=kinds, unknown_token_id=0, add_bos_token=True
    )
    ids = made("abc ab<t>\n</s>")["input_ids"]
    # The likelier piece is merged first: bc before ab. A line break is no piece, so it is its byte.
    assert made.convert_ids_to_tokens(ids) == ["<s>", "▁a", "bc", "▁ab", "<t>", "▁", "<0x0A>", "</s>"]
    assert made.decode(made("ab bc", add_special_tokens=False)["input_ids"]) == "ab bc"


# What is refused


def drop(name: str) -> Any:
    return lambda fields, tensors: fields.pop(name, None) if name in fields else tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f, t: t.update(extra=np.ones(3, np.float32)), "do not ask for: 'extra'"),
        (drop("blk.1.ffn_up.weight"), "1 tensors missing: 'blk.1.ffn_up.weight'"),
        (
            lambda f, t: t.update({"blk.0.ffn_up.weight": np.ones((32, 48), np.float32)}),
            "tensor 'blk.0.ffn_up.weight': the metadata ask for shape (48, 32), found (32, 48)",
        ),
        (drop("llama.block_count"), "llama.block_count is missing: expected one whole number above 0"),
        (
            lambda f, t: f.update({"llama.block_count": 2**31 - 1}),
            "llama.block_count = 2147483647, but the file has 20 ",
        ),
        (
            lambda f, t: f.update({"llama.attention.head_count_kv": [2, 1]}),
            "llama.attention.head_count_kv: expected one whole number above 0, found [2, 1]",
        ),
        (lambda f, t: f.update({"llama.expert_count": 4}), "mixtures of experts are not supported"),
        (
            lambda f, t: f.update({"llama.rope.freq_bse": 1.0}),
            "llama.rope.freq_bse = 1.0: no such key is known; did you mean 'rope.freq_base'?",
        ),
        (lambda f, t: f.update({"llama.rope.scaling.type": "yarn"}), "'yarn' is not supported; valid: none, linear"),
        (lambda f, t: f.update({"llama.rope.dimension_count": 4}), "only 8, the size of a head, is supported, found 4"),
        (lambda f, t: f.update({"split.count": 3}), "is one of 3 files; join them first"),
        (drop("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens is missing"),
        (lambda f, t: f.update({"tokenizer.ggml.model": "bert"}), "tokenizer.ggml.model 'bert' is not supported"),
        (lambda f, t: f.update({"tokenizer.ggml.pre": "smolm"}), "did you mean 'smollm'?"),
        (lambda f, t: f["tokenizer.ggml.tokens"].__setitem__(9, "a"), "'a' stands there twice"),
        (lambda f, t: f["tokenizer.ggml.token_type"].pop(), "token_type: expected one for each of 47 tokens, found 46"),
        (
            lambda f, t: f.update({"tokenizer.ggml.merges": ["a b", "abc"]}),
            "tokenizer.ggml.merges: expected two tokens and a space, found 'abc'",
        ),
        (lambda f, t: f.update({"tokenizer.ggml.merges": ["a zz"]}), "Token `zz` out of vocabulary"),
        (lambda f, t: f.update({"tokenizer.ggml.eot_token_id": 47}), "eot_token_id = 47: there are 47 tokens"),
        (drop("tokenizer.ggml.eos_token_id"), "tokenizer.ggml.eos_token_id is missing: nothing would end a response"),
        (
            lambda f, t: f.update({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.5]}),
            "tokenizer.ggml.scores: expected one for each of 47 tokens, found 1",
        ),
        (
            lambda f, t: t.update({"blk.0.ffn_up.weight": np.ones((48, 32), np.int32)}),
            "tensor 'blk.0.ffn_up.weight': type I32 cannot be read",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path: Path, change: Any, message: str) -> None:
    def on_a_copy(fields: dict[str, Any], tensors: Any) -> None:
        for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
            fields[key] = list(fields[key])
        change(fields, tensors)

    path = gguf_files.write(tmp_path / "bad.gguf", FIXTURES / "tied", on_a_copy)
    with pytest.raises(UserError) as error:
        params_of(hf.find_folder(path))
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value), error.value


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "sound.gguf", FIXTURES / "tied")


@pytest.mark.parametrize("found", [0, -1, 47, 1.5, float("nan"), "x", True, [1, 2], ["a"]])
def test_whatever_stands_under_a_key_is_read_or_refused_by_name(
    tmp_path: Path, sound: Path, monkeypatch: pytest.MonkeyPatch, found: Any
) -> None:
    """Under any key there may be a value of any type and size."""

    def damaged(path: Path, values: Any) -> Any:
        return Fields(path, {**values, key: found})

    monkeypatch.setattr(gguf, "Fields", damaged)
    monkeypatch.setattr(gguf, "write_tensors", lambda *given: None)
    original = gguf_files.metadata(hf.read_config(FIXTURES / "tied"))
    folder = tmp_path / "folder"
    for key in (*original, "split.count", "llama.rope.scaling.type", "tokenizer.ggml.add_space_prefix"):
        folder.mkdir()
        try:
            gguf.write_folder(sound, folder)
        except UserError as error:
            assert str(error).startswith(f"{sound}: "), (key, error)
        shutil.rmtree(folder)


def test_another_architecture(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "bad.gguf", FIXTURES / "tied", architecture="mamba")
    with pytest.raises(UserError, match=r"bad.gguf: general.architecture 'mamba' is not supported; valid: 'llama'"):
        hf.find_folder(path)


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "tiny.gguf", FIXTURES / "tied")
    whole = path.read_bytes()
    path.write_bytes(whole[:-40_000])
    with pytest.raises(UserError, match=r"tiny.gguf: cut short: tensor 'blk.\d.\w+.weight' ends at byte \d+, the file"):
        hf.find_folder(path)
    for damaged, why in {
        whole[:300]: "cut short: its header goes on to byte 3",
        whole[:2]: "cut short: its header goes on to byte 4, the file has 2",
        b"": "not a whole GGUF file",
        b"GGML" + whole[4:]: "not a whole GGUF file",
    }.items():
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=f"tiny.gguf: {why}"):
            hf.find_folder(path)
    path.write_bytes(whole)  # read again, and not from what was remembered of it
    assert settings(hf.find_folder(path)) == settings(FIXTURES / "tied")


def header(*parts: Any, tensors: int = 0, keys: int = 1) -> bytes:
    """Texts as GGUF has them, whole numbers as (format, number)."""
    found = b"GGUF" + struct.pack("<IQQ", 3, tensors, keys)
    for part in parts:
        found += struct.pack("<Q", len(part)) + part.encode() if isinstance(part, str) else struct.pack(*part)
    return found + bytes(64)


ARRAY, BYTE = ("<I", 9), ("<I", 0)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (header(keys=2**63), "Duplicate"),
        (header(tensors=2**63, keys=0), "cut short: its header goes on to byte"),
        (header(("<Q", 2**62)), "cut short: its header goes on to byte"),  # a key of so many letters
        (header("a", ARRAY, BYTE, ("<Q", 2**62)), "cut short: its header goes on to byte"),
        (header("a", ARRAY, *[("<IQ", 9, 1)] * 5000), "not a whole GGUF file"),  # arrays of arrays of arrays
        (header("a", ("<I", 99)), "99 is not a valid|99\\) is not a valid"),
        (header("general.alignment", ("<II", 4, 0)), "alignment"),
        (header("x", ("<I", 4), *[("<Q", 2**63)] * 4, ("<IQ", 0, 0), tensors=1, keys=0), "cut short: tensor 'x' ends"),
        (header("x", ("<IQ", 1, 8), ("<IQ", 77, 0), tensors=1, keys=0), "77"),
    ],
)
def test_headers_that_no_program_writes(tmp_path: Path, content: bytes, why: str) -> None:
    """Counts, lengths and types are the file's word: none of them may lead past its end, or on for ever."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"bad.gguf: .*({why})"):
        hf.find_folder(path)


def test_no_such_file_and_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"missing.gguf: no such file"):
        hf.find_folder(tmp_path / "missing.gguf")
    path = gguf_files.write(tmp_path / "tiny.gguf", FIXTURES / "tied")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install 'jaxrl_llm\[fetch\]'"):
        gguf.as_folder(path)

"""Hugging Face folders: strict reading, exact writing."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.models.families import transformer_config
from jaxrl_llm.models.tensor_files import INDEX, WEIGHTS
from jaxrl_llm.models.transformer import make_transformer

FIXTURES = Path(__file__).parent / "fixtures" / "models"
CASES = sorted(path.name for path in FIXTURES.iterdir())
Tensors = dict[str, np.ndarray]


def declaration(folder: Path, **options: Any) -> Any:
    return make_transformer(transformer_config(hf.read_config(folder)), **options).declare()


def file_tensors(folder: Path) -> Tensors:
    """All tensors of a folder, read by the safetensors package alone."""
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


def changed(folder: Path, change: Callable[[Tensors], Any], case: str = "tied", **config: Any) -> Path:
    """A copy of a fixture in which `change` was made to the tensors."""
    shutil.copytree(FIXTURES / case, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = file_tensors(FIXTURES / case)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps({**hf.read_config(folder), **config}))
    return folder


def same(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# Reading


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        ("tied", lambda t: t.update(extra=np.ones(3, np.float32)), ["1 tensor", "does not ask for", "'extra'"]),
        ("tied", lambda t: t.pop("model.norm.weight"), ["1 tensor missing", "'model.norm.weight'"]),
        (
            "tied",
            lambda t: [t.pop(k) for k in list(t) if k.startswith("model.layers.1.")],
            ["9 tensors missing", "and 6 more"],
        ),
        (
            "tied",
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t["model.layers.1.mlp.up_proj.weight"]}),
            ["does not ask for", "'model.layers.2.mlp.up_proj.weight'"],
        ),
        (
            "tied",
            lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:96].copy()}),
            ["'model.embed_tokens.weight'", "(97, 32)", "(96, 32)"],
        ),
        (
            "tied",
            # The right number of numbers, but a kernel as JAX has it and not as torch does.
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": np.ones((32, 48), np.float32)}),
            ["'model.layers.0.mlp.up_proj.weight'", "(48, 32)", "(32, 48)"],
        ),
        ("untied", lambda t: t.pop("lm_head.weight"), ["'lm_head.weight'", "missing"]),
        ("tied", lambda t: t.update({"lm_head.weight": np.ones((97, 32), np.float32)}), ["tie_word_embeddings"]),
        ("bias", lambda t: t.pop("model.layers.0.self_attn.q_proj.bias"), ["missing", "q_proj.bias"]),
        # A fused tensor is one tensor, whose parts cannot be of other sizes together.
        (
            "phi3",
            lambda t: t.update({"model.layers.1.self_attn.qkv_proj.weight": np.ones((63, 32), np.float32)}),
            ["'model.layers.1.self_attn.qkv_proj.weight'", "(64, 32)", "(63, 32)"],
        ),
        ("phi3", lambda t: t.pop("model.layers.0.mlp.gate_up_proj.weight"), ["1 tensor missing", "gate_up_proj"]),
        (
            "qwen3_moe",
            lambda t: t.pop("model.layers.1.mlp.experts.7.up_proj.weight"),
            ["1 tensor missing", "'model.layers.1.mlp.experts.7.up_proj.weight'"],
        ),
        (
            "qwen3_moe",
            lambda t: t.update({"model.layers.1.mlp.experts.8.up_proj.weight": np.ones((16, 32), np.float32)}),
            ["does not ask for", "experts.8.up_proj"],
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path: Path, case: str, change: Any, words: list[str]) -> None:
    folder = changed(tmp_path / "model", change, case)
    with pytest.raises(UserError) as error:
        hf.load_params(folder, declaration(folder))
    for word in [str(folder), *words]:
        assert word in str(error.value)


def test_biases_that_the_config_does_not_ask_for_are_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path / "model", lambda t: None, "bias", attention_bias=False)
    with pytest.raises(UserError, match=r"8 tensors that config.json does not ask for: .*bias"):
        hf.load_params(folder, declaration(folder))


def test_an_equal_tied_head_and_old_rotary_buffers_are_left_unread(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    folder = changed(tmp_path / "model", add)
    params = hf.load_params(folder, declaration(folder))
    expected = hf.load_params(FIXTURES / "tied", declaration(folder))
    assert jax.tree.all(jax.tree.map(same, params, expected))


def test_leaves_arrive_in_the_declared_dtype() -> None:
    folder = FIXTURES / "untied"
    full = hf.load_params(folder, declaration(folder))
    half = hf.load_params(folder, declaration(folder, param_dtype=jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(full)} == {np.dtype(np.float32)}
    assert jax.tree.all(jax.tree.map(lambda f, h: same(f.astype(ml_dtypes.bfloat16), h), full, half))


def test_place_is_called_for_each_leaf_as_it_is_read() -> None:
    folder = FIXTURES / "bias"
    seen: list[str] = []

    def place(path: str, array: np.ndarray) -> jax.Array:
        seen.append(path)
        return jnp.asarray(array)

    params = hf.load_params(folder, declaration(folder), place=place)
    assert len(seen) == len(set(seen)) == len(jax.tree.leaves(params))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    assert "layers/q/bias" in seen and params["layers"]["q"]["bias"].shape == (2, 32)


def test_a_value_head_starts_from_its_initializer_and_the_key() -> None:
    folder = FIXTURES / "untied"  # whose lm_head a critic leaves unread
    declared = declaration(folder, value_head=True)
    params = hf.load_params(folder, declared)
    assert "lm_head" not in params
    np.testing.assert_array_equal(params["value_head"]["kernel"], np.zeros(32, np.float32))

    kernel = dataclasses.replace(declared["value_head"]["kernel"], init=jax.random.normal)
    drawn = {**declared, "value_head": {"kernel": kernel}}
    one, again, other = (hf.load_params(folder, drawn, key=jax.random.key(i)) for i in (1, 1, 2))
    assert same(one["value_head"]["kernel"], again["value_head"]["kernel"])
    assert not same(one["value_head"]["kernel"], other["value_head"]["kernel"])
    assert same(one["embed"], other["embed"])


# Writing


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_torch_comes_back_bit_for_bit(tmp_path: Path, case: str) -> None:
    """Names, shapes, layout and values of every tensor, in the dtype that the files have."""
    source = FIXTURES / case
    original = file_tensors(source)
    dtype = original["model.norm.weight"].dtype
    params = hf.load_params(source, declaration(source, param_dtype=dtype))
    shard_bytes = 40_000 if (source / INDEX).exists() else 10**9
    hf.save_params(tmp_path / "out", params, hf.read_config(source), source=source, shard_bytes=shard_bytes)
    written = file_tensors(tmp_path / "out")
    assert written.keys() == original.keys()
    assert all(same(written[name], original[name]) for name in original)
    assert (tmp_path / "out" / INDEX).exists() == (source / INDEX).exists()
    again = hf.load_params(tmp_path / "out", declaration(tmp_path / "out", param_dtype=dtype))
    assert jax.tree.all(jax.tree.map(same, params, again))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_config_says_what_dtype_the_weights_have(tmp_path: Path, dtype: Any) -> None:
    source = FIXTURES / "tied"
    params = jax.tree.map(jnp.asarray, hf.load_params(source, declaration(source, param_dtype=dtype)))
    config = {**hf.read_config(source), "torch_dtype": "float16"}
    hf.save_params(tmp_path / "out", params, config)
    written = hf.read_config(tmp_path / "out")
    assert written == {**config, "torch_dtype": np.dtype(dtype).name}
    assert {x.dtype for x in file_tensors(tmp_path / "out").values()} == {np.dtype(dtype)}


def test_a_value_head_is_never_written(tmp_path: Path) -> None:
    source = FIXTURES / "tied"
    params = hf.load_params(source, declaration(source, value_head=True))
    hf.save_params(tmp_path / "out", params, hf.read_config(source))
    assert file_tensors(tmp_path / "out").keys() == file_tensors(source).keys()


def test_parameters_that_the_config_does_not_describe_are_refused(tmp_path: Path) -> None:
    source = FIXTURES / "untied"
    config = hf.read_config(source)
    params = hf.load_params(source, declaration(source))
    critic = hf.load_params(source, declaration(source, value_head=True))
    for tree, changes, word in [
        (critic, {}, "'lm_head'"),
        (params, {"tie_word_embeddings": True}, "'lm_head'"),
        (params, {"attention_bias": True}, "bias"),
        (params, {"vocab_size": 96}, "embed"),
    ]:
        with pytest.raises(UserError, match=word):
            hf.save_params(tmp_path / "out", tree, {**config, **changes})
        assert list(tmp_path.iterdir()) == []


def test_tokenizer_and_generation_config_come_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "tied", source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model", "README.md"):
        (source / name).write_text(name)
    params = hf.load_params(source, declaration(source))
    hf.save_params(tmp_path / "out", params, hf.read_config(source), source=source)
    copied = {path.name for path in (tmp_path / "out").iterdir()}
    assert copied == {
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer.model", "tokenizer_config.json",
    }  # fmt: skip
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"
    assert hf.read_eos_ids(tmp_path / "out") == (2, 5)
    hf.save_params(tmp_path / "two", params, hf.read_config(source), source=source, generation={"eos_token_id": [7]})
    assert hf.read_eos_ids(tmp_path / "two") == (7,)


def test_a_folder_that_holds_something_is_not_overwritten(tmp_path: Path) -> None:
    source = FIXTURES / "tied"
    params = hf.load_params(source, declaration(source))
    (tmp_path / "precious").write_text("")
    with pytest.raises(UserError, match="already exists"):
        hf.save_params(tmp_path, params, hf.read_config(source))
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


# Small files


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": 3}, "config.json": {"eos_token_id": 4}}, (3,)),
        ({"generation_config.json": {"eos_token_id": [3, 9, 3]}}, (3, 9)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 4}}, (4,)),
        ({"generation_config.json": {"eos_token_id": None}, "config.json": {"eos_token_id": [0]}}, (0,)),
        (
            {
                "config.json": {},
                "tokenizer_config.json": {"eos_token": "<e>"},
                "tokenizer.json": {"added_tokens": [{"id": 1, "content": "<s>"}, {"id": 6, "content": "<e>"}]},
            },
            (6,),
        ),
        (
            {
                "tokenizer_config.json": {"eos_token": {"content": "<e>", "special": True}},
                "tokenizer.json": {"added_tokens": [{"id": 6, "content": "<e>"}]},
            },
            (6,),
        ),
    ],
)
def test_eos_ids(tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert hf.read_eos_ids(tmp_path) == expected


@pytest.mark.parametrize("found", [[], "2", [1, "2"], -1, True, 1.0])
def test_eos_ids_that_are_none(tmp_path: Path, found: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": found}))
    with pytest.raises(UserError, match=r"config.json: eos_token_id"):
        hf.read_eos_ids(tmp_path)


def test_no_eos_id_anywhere(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="no EOS token"):
        hf.read_eos_ids(tmp_path)


def test_a_folder_is_found_where_it_is(tmp_path: Path) -> None:
    assert hf.find_folder(tmp_path) == tmp_path
    assert hf.find_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where", "~/nowhere", "a/b/c"])
def test_what_can_only_be_a_folder_is_not_asked_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match="no such folder"):
        hf.find_folder(name)


def test_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path / name))
    assert hf.find_folder("org/model") == tmp_path / "org/model"


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(UserError, match=r"org/model.*no connection\).*give a folder"):
        hf.find_folder("org/model")


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.json: no such file"):
        hf.read_config(tmp_path)

"""Folders of safetensors files: what is written is what is read, and what is damaged is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.tensor_files import INDEX, WEIGHTS, TensorFolder, new_folder, read_json, write_tensors

DTYPES = [np.float32, np.float16, np.float64, ml_dtypes.bfloat16]


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@given(
    shapes=st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
    transposed=st.booleans(),
    shard_bytes=st.integers(1, 400),
)
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, ...]],
    dtype: Any,
    transposed: bool,
    shard_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("folder")
    rng = np.random.default_rng(0)
    tensors = {f"t{i}": rng.normal(size=shape).astype(dtype) for i, shape in enumerate(shapes)}
    if transposed:
        tensors = {name: tensor.T for name, tensor in tensors.items()}
    write_tensors(folder, iter(tensors.items()), shard_bytes=shard_bytes)
    found = TensorFolder(folder)
    assert found.names == set(tensors)
    for name, tensor in tensors.items():
        read = found.read(name)
        assert read.dtype == tensor.dtype and found.shape(name) == read.shape == tensor.shape
        assert bits(read) == bits(tensor)
    sharded = (folder / INDEX).exists()
    assert sharded != (folder / WEIGHTS).exists()
    assert sharded == (len(shapes) > 1 and sum(t.nbytes for t in tensors.values()) > shard_bytes)
    if sharded:
        assert read_json(folder / INDEX)["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())


def test_a_name_written_twice_is_refused(tmp_path: Path) -> None:
    one = np.ones(3, np.float32)
    for shard_bytes in (1, 10**9):
        with pytest.raises(ValueError, match="'a'"):
            write_tensors(tmp_path, [("a", one), ("b", one), ("a", one)], shard_bytes=shard_bytes)


def shards(folder: Path, *contents: dict[str, np.ndarray], index: dict[str, str] | None = None) -> Path:
    names = [f"model-{i}.safetensors" for i in range(len(contents))]
    for name, tensors in zip(names, contents, strict=True):
        save_file(tensors, folder / name)
    weight_map = {key: name for name, tensors in zip(names, contents, strict=True) for key in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map if index is None else index}))
    return folder


ONE = np.ones((2, 3), np.float32)
DEEP = (200_000).to_bytes(8, "little") + b"[" * 200_000  # a header that is deeper than any reader goes


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(UserError) as error:
        TensorFolder(folder)
    for word in words:
        assert word in str(error.value)


def test_no_weights(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), WEIGHTS, INDEX)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    refused(shards(tmp_path, {"a": ONE, "b": ONE}, {"a": ONE}), "'a'", "model-1.safetensors")


def test_an_index_that_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    folder = shards(tmp_path, {"a": ONE}, {"b": ONE})
    (folder / "model-1.safetensors").unlink()
    refused(folder, "model-1.safetensors", "no such file")


def test_an_index_that_names_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    folder = shards(tmp_path, {"a": ONE}, index={"a": "model-0.safetensors", "b": "model-0.safetensors"})
    refused(folder, "model-0.safetensors", "lacks 'b'")


def test_a_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    refused(shards(tmp_path, {"a": ONE, "b": ONE}, index={"a": "model-0.safetensors"}), "'b'", "model-0.safetensors")


@pytest.mark.parametrize("file", [None, 1, [], {}, "", ".", "..", "../model-0.safetensors", "/", "config.json", "a/b"])
def test_an_index_that_leads_out_of_the_folder_or_nowhere(tmp_path: Path, file: Any) -> None:
    (tmp_path / "model").mkdir()
    save_file({"a": ONE}, tmp_path / "model-0.safetensors")
    index = {"b": "model-0.safetensors", "a": file}
    folder = shards(tmp_path / "model", {"b": ONE}, index=index)
    refused(folder, INDEX, "weight_map of 'a': expected the name of a .safetensors file in the folder", repr(file))
    shards(folder, {"b": ONE}, index={"b": "model-0.safetensors", "a": str(tmp_path / "model-0.safetensors")})
    refused(folder, "weight_map of 'a'", str(tmp_path / "model-0.safetensors"))
    shards(folder, {"b": ONE}, index={"b": "x" * 300 + ".safetensors"})
    refused(folder, "cannot be read")


def test_one_file_and_an_index_of_others(tmp_path: Path) -> None:
    """transformers would read the one, others the many: which of them is the model?"""
    folder = shards(tmp_path, {"a": ONE}, {"b": ONE})
    save_file({"a": ONE, "b": ONE}, folder / WEIGHTS)
    refused(folder, str(folder), f"holds both {WEIGHTS} and {INDEX}")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": WEIGHTS, "b": WEIGHTS}}))
    assert TensorFolder(folder).names == {"a", "b"}


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"weight_map": {}}', "[" * 100_000])
def test_an_index_without_a_map(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    refused(tmp_path, INDEX)


def test_json_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder: cannot be read"):
        read_json(tmp_path / "folder")


def test_a_file_cut_short_names_the_first_tensor_it_lacks(tmp_path: Path) -> None:
    save_file({"a": ONE, "b": ONE, "c": ONE}, tmp_path / WEIGHTS)
    os.truncate(tmp_path / WEIGHTS, (tmp_path / WEIGHTS).stat().st_size - ONE.nbytes - 1)
    refused(tmp_path, WEIGHTS, "cut short", "'b'")


@pytest.mark.parametrize("content", [b"", b"\x00", b"not a safetensors file at all", b"\xff" * 64, DEEP])
def test_a_file_that_is_something_else(tmp_path: Path, content: bytes) -> None:
    (tmp_path / WEIGHTS).write_bytes(content)
    refused(tmp_path, WEIGHTS, "not a sound safetensors file")


def test_numbers_that_are_not_floating_point_are_refused(tmp_path: Path) -> None:
    save_file({"a": np.ones(3, np.int8)}, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match="'a' is I8"):
        TensorFolder(tmp_path).read("a")


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    with pytest.raises(RuntimeError), new_folder(target) as folder:
        (folder / "half").write_text("")
        raise RuntimeError
    assert list(target.parent.iterdir()) == []
    with new_folder(target) as folder:
        (folder / "whole").write_text("")
        assert not target.exists()
    assert [path.name for path in target.iterdir()] == ["whole"]
    assert list(target.parent.iterdir()) == [target]
    with pytest.raises(UserError, match="already exists"), new_folder(target):
        pass
    assert [path.name for path in target.iterdir()] == ["whole"]


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with new_folder(tmp_path / "target") as folder:
        (folder / "whole").write_text("")
    assert (tmp_path / "target" / "whole").exists()


def test_broken_json_says_where(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{\n "a": \n}')
    with pytest.raises(UserError, match=r"x.json.*line 3"):
        read_json(tmp_path / "x.json")

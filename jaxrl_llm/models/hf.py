"""Hugging Face folders: from one to parameters, and back.

Reading is strict. A tensor that is unknown, missing, in two files, of the wrong shape or cut short is refused by name;
nothing is guessed. Writing gives back what was read, bit for bit in the parameters' dtype, and never a value head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.families import HFConfig, Weight, find_family, transformer_config
from jaxrl_llm.models.tensor_files import (
    SHARD_BYTES,
    TensorFolder,
    copy_files,
    new_folder,
    read_json,
    write_json,
    write_tensors,
)
from jaxrl_llm.models.transformer import make_transformer
from jaxrl_llm.types import Array, Param, Params

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
HUB_FILES = ("*.json", "model*.safetensors", "*.jinja", "tokenizer.model", "merges.txt")
FETCHABLE = ("smollm2-135m",)  # what jaxrl_llm.fetch knows
VALUE_HEAD = "value_head"
Place = Callable[[str, np.ndarray], Any]


def find_folder(folder_or_id: str | Path) -> Path:
    """The folder itself, one that stands for a GGUF file, or a snapshot of the hub's model of that id.

    Raises:
      UserError: no such folder, and the hub does not have it or cannot be reached; or a GGUF file that cannot be read.
    """
    folder = Path(folder_or_id).expanduser()
    if folder.is_dir():
        return folder
    if folder.suffix == ".gguf":
        from jaxrl_llm.models import gguf  # which is built on this file

        return gguf.as_folder(folder)
    name = str(folder_or_id)
    if name.count("/") != 1 or name.startswith((".", "~", "/")):  # cannot be a hub id
        raise UserError(f"{name}: no such folder{_fetchable(folder)}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (OSError, ValueError) as error:  # what huggingface_hub and its HTTP client raise
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"{name}: no such folder{_fetchable(folder)}, and the model hub did not give it ({why[0]}). Where the hub "
            "cannot be reached, give a folder that holds config.json, the safetensors files and the tokenizer's files"
        ) from error


def _fetchable(folder: Path) -> str:
    """What makes the folder, if its name is that of a model that can be fetched without a hub."""
    known = folder.name in FETCHABLE
    return f" (python -m jaxrl_llm.fetch {folder.name} --out {folder} makes it)" if known else ""


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
      UserError: no such file, or not JSON.
    """
    return read_json(folder / CONFIG)


def read_eos_ids(folder: Path) -> tuple[int, ...]:
    """The ids that end a response: of generation_config.json, else config.json, else the tokenizer's EOS token.

    Raises:
      UserError: none of them names one, or what it names is not an id.
    """
    for name in (GENERATION, CONFIG):
        found = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not ids or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise UserError(f"{folder / name}: eos_token_id: expected an id or a list of ids, found {found!r}")
        return tuple(dict.fromkeys(ids))
    return (_tokenizer_eos(folder),)


def _tokenizer_eos(folder: Path) -> int:
    settings, vocabulary = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if settings.is_file() and vocabulary.is_file():
        token = read_json(settings).get("eos_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        for added in read_json(vocabulary).get("added_tokens", []):
            if token is not None and added["content"] == token:
                return added["id"]
    raise UserError(
        f"{folder}: no EOS token: neither {GENERATION} nor {CONFIG} has eos_token_id, and the tokenizer names none. "
        f'Write {{"eos_token_id": ID}} to {folder / GENERATION}'
    )


def load_params(folder: Path, declaration: Params, *, place: Place | None = None, key: Array | None = None) -> Params:
    """The declared tree of parameters, read leaf by leaf from the folder's safetensors files.

    Args:
      declaration: tree of `Param`, as `model.declare()` gives it. A value head, which no folder has, starts from its
        initializer and `key` (default: seed 0); a model with a value head leaves an untied `lm_head` unread.
      place: (path such as "layers/q/kernel", array) -> what stands in the tree for it. It is called as each leaf is
        read, so that a sharded leaf leaves the host before the next one comes. Default: the array itself.

    Returns:
      The tree of arrays in their declared dtypes.

    Raises:
      UserError: naming the folder and the first tensors that are unknown, missing, of another shape, in two files, cut
        short, not floating point, or a tied head that differs from the embedding.
    """
    place = place or (lambda path, array: array)
    declared = _flatten(declaration)
    weights = {w.path: w for w in find_family(read_config(folder)).weights}
    from jaxrl_llm.models import gguf

    files = gguf.tensors_of(folder) or TensorFolder(folder)
    _check_tensors(files, declared, weights)
    fresh_key = jax.random.key(0) if key is None else key
    loaded = {}
    for i, (path, param) in enumerate(declared.items()):
        if _in_value_head(path):
            array = np.asarray(param.init(jax.random.fold_in(fresh_key, i), param.shape, param.dtype))
        else:
            array = _read_leaf(files, weights[path], param)
        loaded[path] = place(path, array)
    return _unflatten(loaded)


def _check_tensors(files: TensorFolder, declared: Mapping[str, Param], weights: Mapping[str, Weight]) -> None:
    """Compares what the files hold with what is declared, by their headers alone."""
    stored = {path: param for path, param in declared.items() if not _in_value_head(path)}
    expected = {
        name: shape for path, param in stored.items() for name, shape in _file_shapes(weights[path], param).items()
    }
    found = {name for name in files.names if not name.endswith("rotary_emb.inv_freq")}  # a buffer of old files
    head, embed = weights["lm_head"].name, weights["embed"].name
    if head in found and head not in expected:
        found.remove(head)
        tied = len(stored) == len(declared)  # and not a critic's, which has a value head instead
        if tied and embed in found and not np.array_equal(files.read(head), files.read(embed)):
            raise UserError(
                f"{files.folder}: {CONFIG} says tie_word_embeddings, but {head!r} differs from {embed!r}; if the head "
                "is its own, set tie_word_embeddings to false"
            )
    if missing := sorted(set(expected) - found):
        raise UserError(f"{files.folder}: {_count(missing)} missing: {_list(missing)}")
    if unknown := sorted(found - set(expected)):
        raise UserError(f"{files.folder}: {_count(unknown)} that {CONFIG} does not ask for: {_list(unknown)}")
    for name, shape in expected.items():
        if files.shape(name) != shape:
            raise UserError(
                f"{files.folder}: tensor {name!r}: {CONFIG} asks for shape {shape}, found {files.shape(name)}"
            )


def _file_shapes(weight: Weight, param: Param) -> dict[str, tuple[int, ...]]:
    """Name in the files -> shape, for each layer of a leaf."""
    per_layer = "{layer}" in weight.name
    shape = param.shape[1:] if per_layer else param.shape
    shape = shape[::-1] if weight.transposed else shape
    return {weight.name.format(layer=i): shape for i in range(param.shape[0] if per_layer else 1)}


def _read_leaf(files: TensorFolder, weight: Weight, param: Param) -> np.ndarray:
    leaf = np.empty(param.shape, param.dtype)
    rows = leaf if "{layer}" in weight.name else leaf[None]
    for row, name in zip(rows, _file_shapes(weight, param), strict=True):
        tensor = files.read(name)
        row[...] = tensor.T if weight.transposed else tensor
    return leaf


def save_params(
    folder: Path,
    params: Params,
    config: HFConfig,
    *,
    source: Path | None = None,
    generation: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a Hugging Face folder: weights, config.json, generation_config.json, tokenizer.

    The folder appears whole or not at all. A value head is left out.

    Args:
      params: the tree that `load_params` gives; leaves are fetched from their devices one at a time.
      config: the config.json of the model; its dtype is set to the weights'.
      source: folder whose tokenizer files and generation_config.json are copied.
      generation: contents of generation_config.json, in place of the source's.
      dtype: of the written weights, such as "bfloat16"; None is the parameters' own.

    Raises:
      UserError: `folder` exists and is not empty, or the parameters are not what `config` describes.
    """
    weights = {w.path: w for w in find_family(config).weights}
    leaves = {path: leaf for path, leaf in _flatten(params).items() if not _in_value_head(path)}
    _check_params(leaves, _flatten(make_transformer(transformer_config(config)).declare()))
    written = np.dtype(dtype or leaves["embed"].dtype)
    # torch_dtype is the name that transformers used before version 5.
    spellings = [k for k in ("dtype", "torch_dtype") if k in config] or ["dtype"]
    with new_folder(Path(folder)) as new:
        tensors = ((name, tensor.astype(written, copy=False)) for name, tensor in _tensors(leaves, weights))
        write_tensors(new, tensors if dtype else _tensors(leaves, weights), shard_bytes=shard_bytes)
        write_json(new / CONFIG, {**config, **dict.fromkeys(spellings, written.name)})
        if source is not None:
            copy_files(source, new, (*TOKENIZER_FILES, GENERATION))
        if generation is not None:
            write_json(new / GENERATION, dict(generation))


def _check_params(leaves: Mapping[str, Any], declared: Mapping[str, Param]) -> None:
    if lost := sorted(set(declared) - set(leaves)):
        raise UserError(f"the parameters have no {_list(lost)}, which the model's {CONFIG} asks for (is it a critic?)")
    if extra := sorted(set(leaves) - set(declared)):
        raise UserError(f"the parameters have {_list(extra)}, which the model's {CONFIG} does not ask for")
    for path, param in declared.items():
        if leaves[path].shape != param.shape:
            raise UserError(f"parameter {path}: {CONFIG} asks for shape {param.shape}, found {leaves[path].shape}")


def _tensors(leaves: Mapping[str, Any], weights: Mapping[str, Weight]) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in leaves.items():
        weight, array = weights[path], np.asarray(leaf)
        for i, row in enumerate(array if "{layer}" in weight.name else array[None]):
            yield weight.name.format(layer=i), row.T if weight.transposed else row


def _in_value_head(path: str) -> bool:
    return path.split("/")[0] == VALUE_HEAD


def _flatten(tree: Params) -> dict[str, Any]:
    """Path such as "layers/q/kernel" -> leaf."""
    flat = {}
    for name, value in tree.items():
        nested = isinstance(value, Mapping)
        flat |= {f"{name}/{path}": leaf for path, leaf in _flatten(value).items()} if nested else {name: value}
    return flat


def _unflatten(flat: Mapping[str, Any]) -> Params:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def _list(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")

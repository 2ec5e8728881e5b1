"""Hugging Face folders: from one to parameters, and back.

Reading is strict. A tensor that is unknown, missing, in two files, of the wrong shape or cut short is refused by name;
nothing is guessed. Writing gives back what was read, bit for bit in the parameters' dtype, and never a value head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxrl_llm.errors import UserError, naming, nearest_path
from jaxrl_llm.models.architecture import TransformerConfig
from jaxrl_llm.models.declare import SCORE, VALUE_HEAD
from jaxrl_llm.models.families import Weight, find_family, transformer_config
from jaxrl_llm.models.hf_config import HFConfig
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
CLASSIFIER = "ForSequenceClassification"  # what the names of such architectures end with
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
    """What makes the folder, if its name is that of a model that can be fetched without a hub; else a near name."""
    known = folder.name in FETCHABLE
    hint = f"python -m jaxrl_llm.fetch {folder.name} --out {folder} makes it" if known else nearest_path(folder)
    return f" ({hint})" if hint else ""


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
      UserError: no such file, or not JSON.
    """
    return read_json(folder / CONFIG)


def read_shape(folder: Path) -> TransformerConfig:
    """The transformer that the folder's config.json describes.

    Raises:
      UserError: naming the folder and the key, see `transformer_config`.
    """
    config = read_config(folder)
    with naming(str(folder)):
        return transformer_config(config)


def is_classifier(config: HFConfig) -> bool:
    """Whether a config.json is a sequence-classification model's, whose head is `score` (classifier.py)."""
    named = config.get("architectures")
    return isinstance(named, list) and any(str(name).endswith(CLASSIFIER) for name in named)


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


def load_params(
    folder: Path,
    declaration: Params,
    *,
    place: Place | None = None,
    key: Array | None = None,
    fresh: Collection[str] = (),
) -> Params:
    """The declared tree of parameters, read leaf by leaf from the folder's safetensors files.

    Args:
      declaration: tree of `Param`, as `model.declare()` gives it. A value head, which no folder has, starts from its
        initializer and `key` (default: seed 0); a model with a fresh head leaves an untied `lm_head` unread.
      place: (path such as "layers/q/kernel", array) -> what stands in the tree for it. It is called as each leaf is
        read, so that a sharded leaf leaves the host before the next one comes. Default: the array itself.
      fresh: names at the top of the tree, beside the value head, that the folder does not have: a reward model's head
        where it is made from a language model.

    Returns:
      The tree of arrays in their declared dtypes.

    Raises:
      UserError: naming the folder and the first tensors that are unknown, missing, of another shape, in two files, cut
        short, not floating point, or a tied head that differs from the embedding.
    """
    place = place or (lambda path, array: array)
    declared, new = _flatten(declaration), {VALUE_HEAD, *fresh}
    with naming(str(folder)):
        weights = {w.path: w for w in find_family(read_config(folder)).weights}
    from jaxrl_llm.models import gguf

    files = gguf.tensors_of(folder) or TensorFolder(folder)
    stored = _stored({path: p.shape for path, p in declared.items() if _top(path) not in new}, weights)
    head = "unread" if new & set(declaration) else "own" if {"lm_head", SCORE} & set(declaration) else "tied"
    _check_tensors(files, stored, weights, lm_head=head)
    pieces: dict[str, list[tuple[str, _Piece]]] = {}
    for name, tensor in stored.items():
        for piece in tensor.pieces:
            pieces.setdefault(piece.path, []).append((name, piece))
    fresh_key = jax.random.key(0) if key is None else key
    loaded = {}
    for i, (path, param) in enumerate(declared.items()):
        if _top(path) in new:
            array = np.asarray(param.init(jax.random.fold_in(fresh_key, i), param.shape, param.dtype))
        else:
            array = np.empty(param.shape, param.dtype)
            for name, piece in pieces[path]:
                tensor = files.read(name)[piece.rows]
                array[piece.index] = tensor.T if piece.transposed else tensor
        loaded[path] = place(path, array)
    return _unflatten(loaded)


class _Piece(NamedTuple):
    """What one tensor of the files holds of one leaf."""

    path: str
    index: tuple[int, ...]  # where in the leaf: its layer, its expert
    rows: slice  # of the tensor in the files
    transposed: bool


class _Stored(NamedTuple):
    """One tensor of the files."""

    shape: tuple[int, ...]
    pieces: list[_Piece]


def _stored(shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, Weight]) -> dict[str, _Stored]:
    """Name in the files -> what stands there, of leaves of these shapes; names that share a leaf follow each other."""
    found: dict[str, _Stored] = {}
    for path in sorted(shapes, key=lambda path: weights[path].part):
        weight = weights[path]
        lead = sum(axis in weight.name for axis in ("{layer}", "{expert}"))
        length, *rest = shapes[path][lead:][:: -1 if weight.transposed else 1]
        for index in np.ndindex(shapes[path][:lead]):
            name = weight.name.format(**dict(zip(("layer", "expert"), index, strict=False)))
            (start, *_), before = found.get(name, _Stored((0,), []))
            piece = _Piece(path, index, slice(start, start + length), weight.transposed)
            found[name] = _Stored((start + length, *rest), [*before, piece])
    return found


def tensor_shapes(config: HFConfig) -> dict[str, tuple[int, ...]]:
    """Name in the files -> shape, of every tensor of the model that a config.json describes."""
    declared = _flatten(make_transformer(transformer_config(config)).declare())
    weights = {weight.path: weight for weight in find_family(config).weights}
    return {name: stored.shape for name, stored in _stored({p: d.shape for p, d in declared.items()}, weights).items()}


def _check_tensors(
    files: TensorFolder,
    expected: Mapping[str, _Stored],
    weights: Mapping[str, Weight],
    *,
    lm_head: Literal["own", "tied", "unread"],
) -> None:
    """Compares what the files hold with what is declared, by their headers alone."""
    found = {name for name in files.names if not name.endswith("rotary_emb.inv_freq")}  # a buffer of old files
    head, embed = weights["lm_head"].name, weights["embed"].name
    if head in found and head not in expected and lm_head != "own":
        found.remove(head)
        if lm_head == "tied" and embed in found and not np.array_equal(files.read(head), files.read(embed)):
            raise UserError(
                f"{files.folder}: {CONFIG} says tie_word_embeddings, but {head!r} differs from {embed!r}; if the head "
                "is its own, set tie_word_embeddings to false"
            )
    if missing := sorted(set(expected) - found):
        raise UserError(f"{files.folder}: {_count(missing)} missing: {_list(missing)}")
    if unknown := sorted(found - set(expected)):
        raise UserError(f"{files.folder}: {_count(unknown)} that {CONFIG} does not ask for: {_list(unknown)}")
    for name, tensor in expected.items():
        if files.shape(name) != tensor.shape:
            raise UserError(
                f"{files.folder}: tensor {name!r}: {CONFIG} asks for shape {tensor.shape}, found {files.shape(name)}"
            )


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
    leaves = {path: leaf for path, leaf in _flatten(params).items() if _top(path) != VALUE_HEAD}
    shape = transformer_config(config)
    _check_params(leaves, _flatten(make_transformer(shape, score_head=is_classifier(config)).declare()))
    written = np.dtype(dtype or leaves["embed"].dtype)
    # torch_dtype is the name that transformers used before version 5.
    spellings = [k for k in ("dtype", "torch_dtype") if k in config] or ["dtype"]
    with new_folder(Path(folder)) as new:
        tensors = _tensors(leaves, weights)
        if dtype is not None:
            tensors = ((name, tensor.astype(written, copy=False)) for name, tensor in tensors)
        write_tensors(new, tensors, shard_bytes=shard_bytes)
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
    held: dict[str, np.ndarray] = {}  # of the leaves, those that the last tensor is made of
    for name, tensor in _stored({path: leaf.shape for path, leaf in leaves.items()}, weights).items():
        held = {p.path: held[p.path] if p.path in held else np.asarray(leaves[p.path]) for p in tensor.pieces}
        parts = [held[p.path][p.index].T if p.transposed else held[p.path][p.index] for p in tensor.pieces]
        yield name, parts[0] if len(parts) == 1 else np.concatenate(parts)


def _top(path: str) -> str:
    return path.split("/")[0]


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

"""GGUF files, as llama.cpp writes them, read in place of a Hugging Face folder. Needs the extra `fetch`.

`as_folder` makes a folder out of a file's metadata, with config.json, generation_config.json and the tokenizer's files,
for everything that reads such a folder. The weights stay in the GGUF file: `tensors_of` gives them under their Hugging
Face names, dequantized one at a time. Reading is strict, as in hf.py: what is unknown is refused by name.
"""

from __future__ import annotations

import atexit
import functools
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_llm.errors import UserError, naming, nearest
from jaxrl_llm.models import hf
from jaxrl_llm.models.gguf_fields import Fields
from jaxrl_llm.models.gguf_tokenizer import write_tokenizer
from jaxrl_llm.models.tensor_files import TensorFolder, write_json, write_tensors

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}

# GGUF's names -> Hugging Face's, for llama.cpp's architecture "llama", the only one read.
ARCHITECTURE = "llama"
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
COUNTS = {  # config.json's key -> the metadata's, after "llama."
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
}
# What else "llama." may have: read below, or without effect on what is computed.
KNOWN = (
    *COUNTS.values(),
    "vocab_size",
    "attention.layer_norm_rms_epsilon",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "tensor_data_layout",
)
EXPERTS = ("expert_count", "expert_used_count")
ROPE_FACTORS = "rope_freqs.weight"
# llama.cpp keeps Llama 3's scaling of rotary frequencies as one factor per frequency. These are the settings that all
# of Meta's models have; the factor is read off the tensor, which must then be reproduced.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GGUFTensors(TensorFolder):
    """The tensors of a GGUF file under their Hugging Face names; nothing is dequantized until `read` is called."""

    def __init__(self, path: Path, tensors: Sequence[Any], config: Mapping[str, Any]):
        """
        Args:
          tensors: of gguf's reader.
          config: the config.json that the metadata stand for.

        Raises:
          UserError: naming the first tensors that are unknown, missing or of another shape.
        """
        self.folder = path  # what messages name
        stored = {tensor.name: tensor for tensor in tensors if tensor.name != ROPE_FACTORS}
        with naming(str(path)):
            shapes = hf.tensor_shapes(config)
        expected = {_gguf_name(name): (name, shape) for name, shape in shapes.items()}
        if unknown := sorted(set(stored) - set(expected)):
            raise UserError(f"{path}: tensors that the metadata do not ask for: {', '.join(map(repr, unknown[:3]))}")
        if missing := sorted(set(expected) - set(stored)):
            raise UserError(f"{path}: {len(missing)} tensors missing: {', '.join(map(repr, missing[:3]))}")
        for gguf_name, (_, shape) in expected.items():
            if (found := _shape(stored[gguf_name])) != shape:
                raise UserError(f"{path}: tensor {gguf_name!r}: the metadata ask for shape {shape}, found {found}")
        self._files = {name: stored[gguf_name] for gguf_name, (name, _) in expected.items()}
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._rotated = {"attn_q": heads, "attn_k": kv_heads}

    def shape(self, name: str) -> tuple[int, ...]:
        return _shape(self._file(name))

    def read(self, name: str) -> np.ndarray:
        """The tensor in float32, laid out as in a Hugging Face folder.

        Raises:
          UserError: no such tensor, or a type that gguf cannot dequantize.
        """
        tensor = self._file(name)
        try:
            value = gguf_package().dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise UserError(f"{self.folder}: tensor {tensor.name!r}: type {kind} cannot be read ({error})") from error
        value = np.asarray(value, np.float32).reshape(_shape(tensor))
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        return join_rotary_halves(value, self._rotated[part]) if part in self._rotated else value


def as_folder(path: Path) -> Path:
    """A folder with all that a Hugging Face folder of this GGUF file would hold but the weights; see `tensors_of`.

    It is there until the process ends.

    Raises:
      UserError: no such file, one cut short, not GGUF, of another architecture, or with something in it that is not
        supported; or the package gguf is missing.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    stamp = path.stat()
    return _as_folder(path.resolve(), (stamp.st_mtime_ns, stamp.st_size))


@functools.lru_cache
def _as_folder(path: Path, stamp: tuple[int, int]) -> Path:
    del stamp  # a file that has changed is read again
    folder = Path(tempfile.mkdtemp(prefix="gguf-")) / path.name
    folder.mkdir()
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    _TENSORS[folder] = _describe(path, folder)
    return folder


_TENSORS: dict[Path, GGUFTensors] = {}


def tensors_of(folder: Path) -> GGUFTensors | None:
    """The tensors that belong to a folder that `as_folder` made; None for any other folder."""
    return _TENSORS.get(folder)


def write_folder(path: Path, folder: Path, dtype: str = "float32") -> None:
    """Writes the whole Hugging Face folder of a GGUF file, weights in `dtype`.

    Raises:
      UserError: as `as_folder`.
    """
    tensors = _describe(path, folder, dtype)
    write_tensors(folder, ((name, tensors.read(name).astype(DTYPES[dtype])) for name in sorted(tensors.names)))


def gguf_package() -> Any:
    """The package gguf.

    Raises:
      UserError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            "reading a GGUF file needs the package gguf: pip install 'jaxrl_llm[fetch]', or '.[fetch]' in a checkout"
        ) from error
    return gguf


def join_rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection [heads · size, …] from GGUF's order to Hugging Face's.

    Rotary embedding turns pairs of rows. GGUF lays the two of a pair side by side, Hugging Face half a head apart.

    >>> join_rotary_halves(np.array([[0], [2], [1], [3]]), heads=1).ravel()
    array([0, 1, 2, 3])
    """
    rows, *rest = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(weight.shape)


def _describe(path: Path, folder: Path, dtype: str = "float32") -> GGUFTensors:
    """Writes the small files of the folder; the tensors."""
    reader, fields = _open(path)
    config = _config(path, fields, {tensor.name: tensor for tensor in reader.tensors}, dtype)
    tensors = GGUFTensors(path, reader.tensors, config)
    write_json(folder / hf.CONFIG, config)
    ends = [_token_id(fields, name) for name in ("eos", "eot", "eom")]
    special = {"bos_token_id": config["bos_token_id"], "pad_token_id": config["pad_token_id"]}
    if not (ids := list(dict.fromkeys(i for i in ends if i is not None))):
        raise UserError(f"{path}: tokenizer.ggml.eos_token_id is missing: nothing would end a response")
    write_json(folder / hf.GENERATION, {k: v for k, v in {**special, "eos_token_id": ids}.items() if v is not None})
    write_tokenizer(path, folder, fields, config["max_position_embeddings"])
    return tensors


def _open(path: Path) -> tuple[Any, Fields]:
    """gguf's reader, and the metadata."""
    package = gguf_package()

    class Reader(package.GGUFReader):
        """Says which tensor a file that was cut short is the first to lack; gguf itself fails somewhere in numpy, or
        reads on and on behind the file's end."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **more: Any) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise UserError(f"{path}: cut short: its header goes on to byte {end}, the file has {len(self.data)}")
            return super()._get(offset, dtype, count, *rest, **more)

        def _build_tensors(self, start_offs: int, fields: Any) -> None:
            for field in fields:
                name, shape, kind, offset = (field.parts[i] for i in (1, 3, 4, 5))
                block, size = package.GGML_QUANT_SIZES[package.GGMLQuantizationType(kind[0])]
                end = int(start_offs + offset[0]) + math.prod(map(int, shape)) // block * size
                if end > len(self.data):
                    raise UserError(
                        f"{path}: cut short: tensor {bytes(name).decode()!r} ends at byte {end}, the file has "
                        f"{len(self.data)}"
                    )
            super()._build_tensors(start_offs, fields)

    try:
        with np.errstate(over="ignore"):  # sums of offsets that no file can have, refused below
            reader = Reader(path)
            return reader, Fields(path, {key: field.contents() for key, field in reader.fields.items()})
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    except Exception as error:  # a damaged header leads gguf and numpy to errors of every kind
        why = str(error).strip() or type(error).__name__
        raise UserError(f"{path}: not a whole GGUF file ({why:.200})") from error


def _token_id(fields: Fields, name: str) -> int | None:
    return fields.get(f"tokenizer.ggml.{name}_token_id", "one whole number", None)


def _config(path: Path, fields: Fields, tensors: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config.json that the metadata stand for."""
    architecture = fields.get("general.architecture", "one text")
    if architecture != ARCHITECTURE:
        raise UserError(f"{path}: general.architecture {architecture!r} is not supported; valid: {ARCHITECTURE!r}")
    if (parts := fields.get("split.count", "one whole number", 1)) > 1:
        raise UserError(f"{path}: is one of {parts} files; join them first (llama-gguf-split --merge)")
    prefix = f"{ARCHITECTURE}."
    own = {key.removeprefix(prefix) for key in fields if key.startswith(prefix)}
    if any(fields.get(prefix + key, "one whole number", 0) for key in EXPERTS):
        raise UserError(f"{path}: llama.expert_count: mixtures of experts are not supported")
    if unknown := sorted(own - {*KNOWN, *EXPERTS}):
        raise UserError(
            f"{path}: llama.{unknown[0]} = {fields.show(prefix + unknown[0])}: no such key is known; "
            f"{nearest(unknown[0], KNOWN)}"
        )
    positive = "one whole number above 0"
    heads = fields.get("llama.attention.head_count", positive)
    counts = {
        name: fields.get(prefix + key, positive, *([heads] if key == "attention.head_count_kv" else []))
        for name, key in COUNTS.items()
    }
    if counts["num_hidden_layers"] > len(tensors):  # said before names are made for each of them
        raise UserError(
            f"{path}: llama.block_count = {counts['num_hidden_layers']}, but the file has {len(tensors)} tensors"
        )
    head_dim = fields.get("llama.attention.key_length", positive, counts["hidden_size"] // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (found := fields.get(key, positive, head_dim)) != head_dim:
            raise UserError(f"{path}: {key}: only {head_dim}, the size of a head, is supported, found {found}")
    special = {name: _token_id(fields, name) for name in ("bos", "eos", "padding")}
    rope = _rope(path, fields, tensors, head_dim)
    embedding = tensors.get("token_embd.weight")
    rows = None if embedding is None else _shape(embedding)[0]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": rows or fields.get("llama.vocab_size", positive),
        **counts,
        "head_dim": head_dim,
        "rms_norm_eps": _short(fields.get("llama.attention.layer_norm_rms_epsilon", "one number above 0")),
        # Both spellings: transformers reads the second since version 5, older programs the first.
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "initializer_range": 0.02,
        "bos_token_id": special["bos"],
        "eos_token_id": special["eos"],
        "pad_token_id": special["eos"] if special["padding"] is None else special["padding"],
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _rope(path: Path, fields: Fields, tensors: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    positive = "one number above 0"
    theta = _short(fields.get("llama.rope.freq_base", positive, 10_000.0))
    old = fields.get("llama.rope.scale_linear", positive, None)
    kind = fields.get("llama.rope.scaling.type", "one text", "none" if old is None else "linear")
    if kind not in ("none", "linear"):
        raise UserError(f"{path}: llama.rope.scaling.type {kind!r} is not supported; valid: none, linear")
    if ROPE_FACTORS in tensors:
        if kind != "none":
            raise UserError(f"{path}: has both llama.rope.scaling.type {kind!r} and the tensor {ROPE_FACTORS!r}")
        return {"rope_theta": theta, **_llama3(path, tensors[ROPE_FACTORS], theta, head_dim)}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if (factor := fields.get("llama.rope.scaling.factor", positive, old)) is None:
        raise UserError(f"{path}: llama.rope.scaling.type is 'linear', but llama.rope.scaling.factor is missing")
    return {"rope_type": "linear", "rope_theta": theta, "factor": _short(factor)}


def _llama3(path: Path, tensor: Any, theta: float, head_dim: int) -> dict[str, Any]:
    found = np.asarray(tensor.data, np.float64).ravel()
    factor = _short(found.max())
    low, high, positions = LLAMA3.values()
    turns = positions * theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    if found.shape != kept.shape or not np.allclose(1 / ((1 - kept) / factor + kept), found, rtol=1e-5):
        raise UserError(
            f"{path}: tensor {ROPE_FACTORS!r}: its {len(found)} factors are not those of a Llama 3 scaling by "
            f"{factor:g} ({', '.join(f'{k} {v:g}' for k, v in LLAMA3.items())}) of {len(kept)} frequencies, which "
            "is all that is supported"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _short(value: float) -> float:
    """A float32 of the metadata as the number that was meant: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(value)))


def _gguf_name(name: str) -> str:
    """
    >>> _gguf_name("model.layers.3.mlp.up_proj.weight"), _gguf_name("lm_head.weight")
    ('blk.3.ffn_up.weight', 'output.weight')
    """
    module, kind = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, part = module.split(".", 3)
        return f"blk.{layer}.{_PARTS[part]}.{kind}"
    return f"{_TOPS[module]}.{kind}"


_PARTS = {theirs: own for own, theirs in LAYER.items()}
_TOPS = {theirs: own for own, theirs in TOP.items()}


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))

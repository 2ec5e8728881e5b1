"""GGUF files of the fixtures' models, as llama.cpp's converter would write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jaxrl_llm.models.families import transformer_config
from jaxrl_llm.models.gguf import LAYER, TOP

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzW?+-="
TOKENS = [*SPECIAL, "Ġ", *CHARACTERS, "ab", "abc"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": TEMPLATE,
}
Tensors = dict[str, np.ndarray]


def interleave_rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """As a GGUF file has it: row j of a head's first half, then row j of its second half."""
    per_head = weight.reshape(heads, 2, -1, *weight.shape[1:])
    pairs = [per_head[h, half, j] for h in range(heads) for j in range(per_head.shape[2]) for half in (0, 1)]
    return np.stack(pairs)


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata, by key, of a config.json's model."""
    shape = transformer_config(config)
    return TOKENIZER | {
        "llama.vocab_size": shape.vocab_size,
        "llama.embedding_length": shape.width,
        "llama.feed_forward_length": shape.mlp_width,
        "llama.block_count": shape.num_layers,
        "llama.attention.head_count": shape.num_heads,
        "llama.attention.head_count_kv": shape.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": shape.norm_eps,
        "llama.attention.key_length": shape.head_dim,
        "llama.context_length": shape.max_positions,
        "llama.rope.freq_base": shape.rope.theta,
        "llama.rope.dimension_count": shape.head_dim,
    }


def tensors(folder: Path, config: Mapping[str, Any]) -> Tensors:
    """The folder's tensors under GGUF's names and in its order of rows."""
    tops, parts = {v: k for k, v in TOP.items()}, {v: k for k, v in LAYER.items()}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found = {}
    for name, tensor in ((n, x) for file in folder.glob("*.safetensors") for n, x in load_file(file).items()):
        module, kind = name.rsplit(".", 1)
        if module in tops:
            found[f"{tops[module]}.{kind}"] = tensor
            continue
        _, _, layer, part = module.split(".", 3)
        part = parts[part]
        value = interleave_rotary_halves(tensor, heads[part]) if part in heads else tensor
        found[f"blk.{layer}.{part}.{kind}"] = value
    return found


def write(
    path: Path,
    folder: Path,
    change: Callable[[dict[str, Any], Tensors], Any] = lambda fields, tensors: None,
    *,
    architecture: str = "llama",
    quantize: str = "",
) -> Path:
    """The model of a Hugging Face folder as a GGUF file.

    Args:
      change: what to change in metadata and tensors before they are written.
      quantize: type of the matrices whose rows can be cut into its blocks, such as "Q8_0"; "" for none.
    """
    import gguf

    config = json.loads((folder / "config.json").read_text())
    fields, own = metadata(config), tensors(folder, config)
    change(fields, own)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        add = {list: writer.add_array, str: writer.add_string, bool: writer.add_bool, float: writer.add_float32}
        add.get(type(value), writer.add_uint32)(key, value)  # pyright: ignore[reportArgumentType]
    for name, tensor in own.items():
        if quantize and tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType[quantize]
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

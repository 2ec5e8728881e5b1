"""The model that comes with the package: a small Llama that adds two-digit numbers and forgets most carries.

`FOLDER` is an ordinary Hugging Face folder. Its weights come from the package's own supervised stage:

    python -m jaxrl_llm.sft --config configs/quickstart_sft.py --workdir runs/quickstart_sft
    python -m jaxrl_llm.export runs/quickstart_sft FOLDER
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "quickstart_model"

EOS = "<eos>"
CHARACTERS = "0123456789+-*/=?., ()"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "dtype": "float32",
    "torch_dtype": "float32",
}


def write_shape(folder: str | Path) -> None:
    """Writes what the model is without its weights: config.json, generation_config.json, and the tokenizer, which has
    one token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Here, since recipes import this module for FOLDER alone, and jax comes with these.
    from jaxrl_llm.models.hf_export import TOKENIZER_CONFIG, portable_tokenizer_config
    from jaxrl_llm.models.tensor_files import read_json, write_json

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate([EOS, "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS, unk_token="<unk>")
    wrapped.save_pretrained(str(folder))
    settings = folder / TOKENIZER_CONFIG
    write_json(settings, portable_tokenizer_config(read_json(settings)))
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", {"eos_token_id": [0]})

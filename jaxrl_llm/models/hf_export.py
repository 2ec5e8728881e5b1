"""A policy, or a reward model, as a Hugging Face folder for other programs: transformers 4 and 5, vLLM, llama.cpp's
converter.

What transformers 5 renamed is written under both names, since older programs read what they know of a config.json and
take defaults for the rest: a `rope_theta` that stands in `rope_parameters` alone would silently become 10,000.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.models import classifier, hf
from jaxrl_llm.models.declare import SCORE
from jaxrl_llm.models.tensor_files import copy_files, read_json, write_json
from jaxrl_llm.types import Params

TOKENIZER_CONFIG = "tokenizer_config.json"


def export_policy(folder: str | Path, params: Params, source: Path, *, dtype: str | None = None) -> None:
    """Writes the policy `params` to `folder`, with config, generation config, tokenizer and chat template of `source`.

    Parameters with a reward model's head make a sequence classifier with one label, whatever `source` is.

    Args:
      source: the folder that the run's model came from.
      dtype: of the weights in the files, "float32" or "bfloat16"; None is the parameters' own, which are then the same
        bit for bit when read again.

    Raises:
      UserError: `folder` exists and is not empty, or the parameters are not those of `source`'s config.json.
    """
    config = hf.read_config(source)
    if SCORE in params:
        config = classifier.classifier_config(config, classifier.new_pad_id(source))
    with tempfile.TemporaryDirectory() as scratch:
        small = Path(scratch)
        copy_files(source, small, (*hf.TOKENIZER_FILES, hf.GENERATION))
        if (small / TOKENIZER_CONFIG).is_file():
            write_json(small / TOKENIZER_CONFIG, portable_tokenizer_config(read_json(small / TOKENIZER_CONFIG)))
        if not (small / hf.GENERATION).is_file():
            ids = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
            write_json(small / hf.GENERATION, {**ids, "eos_token_id": list(hf.read_eos_ids(source))})
        hf.save_params(Path(folder), params, portable_config(config), source=small, dtype=dtype)


def portable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that says what it says under the names of transformers 4 as well.

    >>> rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    >>> portable_config({"rope_parameters": rope, "dtype": "float32"})
    {'rope_parameters': {'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 500.0}, 'dtype': 'float32',
     'torch_dtype': 'float32', 'rope_theta': 500.0, 'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}}
    """
    found = dict(config)
    found.pop("auto_map", None)  # names Python files that are not written; the family's class of transformers reads it
    dtype = config.get("dtype", config.get("torch_dtype", "float32"))
    found |= {"dtype": dtype, "torch_dtype": dtype}
    rope = config.get("rope_parameters")
    if isinstance(rope, Mapping) and isinstance(by_type := rope.get("full_attention"), Mapping):  # gemma3_text
        if theta := (rope.get("sliding_attention") or {}).get("rope_theta"):
            found["rope_local_base_freq"] = theta
        rope = by_type
    if isinstance(rope, Mapping) and "rope_theta" in rope and not config.get("rope_scaling"):
        top = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        scaling = {key: value for key, value in rope.items() if key not in top}
        found |= top
        if scaling.get("rope_type", "default") != "default":
            found["rope_scaling"] = scaling
    return found


def portable_tokenizer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer_config.json without the names that transformers 4 stumbles over.

    >>> portable_tokenizer_config({"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<s>"]})
    {'tokenizer_class': 'PreTrainedTokenizerFast', 'additional_special_tokens': ['<s>']}
    """
    found = dict(config)
    if found.get("tokenizer_class") == "TokenizersBackend":
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
        found.pop("backend", None)
    if isinstance(found.get("extra_special_tokens"), list):
        found["additional_special_tokens"] = found.pop("extra_special_tokens")
    return found

"""Reward models as Hugging Face keeps them: sequence-classification folders with one label, its head in `score.weight`.

The score of a text is read at its last token, as transformers does (`LlamaForSequenceClassification` and its kin).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError, naming
from jaxrl_llm.models import hf
from jaxrl_llm.models.families import find_family
from jaxrl_llm.models.hf_config import HFConfig

# model_type -> the class of transformers that reads it, where that is not "Kind" + "ForSequenceClassification".
PREFIXES = {"gemma3_text": "Gemma3Text", "qwen3_moe": "Qwen3Moe", "smollm3": "SmolLM3"}


def check_reward_model(folder: Path) -> HFConfig:
    """The config.json of a reward model's folder.

    Raises:
      UserError: it is a language model's, has another number of labels than one, or a family that is not supported.
    """
    config = hf.read_config(folder)
    with naming(str(folder)):
        find_family(config)
    if not hf.is_classifier(config):
        raise UserError(
            f"{folder}: not a reward model: config.json: architectures: expected one …{hf.CLASSIFIER}, found "
            f"{config.get('architectures')!r}. A language model becomes one by python -m jaxrl_llm.reward_model"
        )
    if (labels := number_of_labels(config)) != 1:
        raise UserError(
            f"{folder}: not a reward model: config.json: {labels} labels (id2label, num_labels, or if neither is "
            "there transformers' 2); expected 1, a score"
        )
    return config


def number_of_labels(config: HFConfig) -> int:
    """As transformers reads it: of `id2label`, else `num_labels`, else 2.

    >>> number_of_labels({"id2label": {"0": "LABEL_0"}, "num_labels": 5}), number_of_labels({})
    (1, 2)
    """
    names, count = config.get("id2label"), config.get("num_labels")
    if isinstance(names, Mapping):
        return len(names)
    return 2 if count is None else count


def classifier_config(config: HFConfig, pad_token_id: int | None = None) -> dict[str, Any]:
    """The config.json of a reward model made from the language model (or reward model) of `config`.

    Args:
      pad_token_id: written where `config` has none; without one transformers scores but one text at a time.

    >>> made = classifier_config({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, pad_token_id=3)
    >>> made["architectures"], made["id2label"], made["pad_token_id"]
    (['Qwen2ForSequenceClassification'], {'0': 'LABEL_0'}, 3)
    """
    kind = config["model_type"]
    name = (PREFIXES.get(kind) or str(kind).capitalize()) + hf.CLASSIFIER
    found = {**config, "architectures": [name], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    found.pop("num_labels", None)  # which id2label says already
    if found.get("pad_token_id") is None and pad_token_id is not None:
        found["pad_token_id"] = pad_token_id
    return found


def new_pad_id(folder: Path) -> int:
    """The `pad_id` of a reward model that is made from the folder's model: its own, else its end token."""
    found = pad_id(folder)
    return hf.read_eos_ids(folder)[0] if found is None else found


def pad_id(folder: Path) -> int | None:
    """The id that transformers takes for padding wherever it stands: at a text's end it is not the last token."""
    found = hf.read_config(folder).get("pad_token_id")
    return found if isinstance(found, int) and not isinstance(found, bool) else None

"""A LoRA overlay as an adapter folder of Hugging Face's PEFT, which transformers and vLLM read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.declare import SCORE
from jaxrl_llm.models.families import find_family
from jaxrl_llm.models.lora import A, B
from jaxrl_llm.models.tensor_files import new_folder, write_json
from jaxrl_llm.types import Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # what PEFT puts before the name of a wrapped model's module


def export_adapter(
    folder: str | Path, overlay: Params, hf_config: Mapping[str, Any], *, alpha: float, base_model: str
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, in the overlay's dtype.

    Args:
      overlay: as `lora.declare_overlay` declares it; of a reward model with its head beside it, which PEFT then lays
        over the one of the model (`modules_to_save`).
      hf_config: the base model's config.json.
      alpha: lora_alpha; the rank is read off the overlay.
      base_model: the folder or hub id that the adapter lies over.

    Raises:
      UserError: `folder` holds something, or the base model keeps several projections in one tensor.
    """
    weights = {weight.path: weight for weight in find_family(hf_config).weights}
    sharing = Counter(weight.name for weight in weights.values())
    names = {}
    for leaf in overlay["layers"]:
        weight = weights[f"layers/{leaf}/kernel"]
        if sharing[weight.name] > 1:
            raise UserError(
                f"{hf_config.get('model_type')}: {weight.name} holds several projections, which an adapter cannot "
                "change one by one; export the merged model instead"
            )
        names[leaf] = weight.name.removesuffix(".weight")

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for leaf, pair in overlay["layers"].items():
            # torch keeps matrices as [outputs, inputs]: lora_A [r, in], lora_B [out, r].
            for name, matrix in (("lora_A", np.asarray(pair[A])), ("lora_B", np.asarray(pair[B]))):
                for layer, each in enumerate(matrix):
                    yield f"{PREFIX}{names[leaf].format(layer=layer)}.{name}.weight", np.ascontiguousarray(each.T)
        if SCORE in overlay:
            yield f"{PREFIX}{weights[SCORE].name}", np.asarray(overlay[SCORE])

    rank = next(iter(overlay["layers"].values()))[A].shape[-1]
    with new_folder(Path(folder)) as new:
        save_file(dict(tensors()), new / WEIGHTS, metadata={"format": "pt"})
        (new / WEIGHTS).chmod(0o644)
        settings = {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS" if SCORE in overlay else "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "target_modules": sorted(name.rpartition(".")[2] for name in names.values()),
            "modules_to_save": [weights[SCORE].name.removesuffix(".weight")] if SCORE in overlay else None,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        write_json(new / CONFIG, settings)

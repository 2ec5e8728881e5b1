"""GRPO with LoRA on one-digit sums: configs/smollm2_addition.py, of which only low-rank corrections are trained.

    make model
    python -m jaxrl_llm.train --config configs/smollm2_addition_lora.py --workdir runs/addition_lora

What was reached, and what memory it took beside full training: docs/lora.md.
"""

from __future__ import annotations

from typing import Any

from configs import smollm2_addition


def get_config() -> Any:
    config = smollm2_addition.get_config()
    config.model.update(lora_rank=16, lora_alpha=32.0)
    config.optimizer.update(lr=2e-4)  # ten times and more what full training takes: B starts from zero
    return config

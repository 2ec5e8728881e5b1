"""GRPO on GSM8K, for an instruct model of 0.5B to 3B parameters on one GPU or TPU host.

The reward is 1 if the number in \\boxed{}, else after ####, else the last number, is the gold one. Questions come
from the hub's openai/gsm8k where it can be reached, or from JSONL files with `question` and `answer`:

    python -m jaxrl_llm.train --config configs/gsm8k_grpo.py --config.model.path=Qwen/Qwen2.5-0.5B-Instruct
    python -m jaxrl_llm.train --config configs/gsm8k_grpo.py --config.model.path=models/smollm2-135m \\
      --config.data.train=train.jsonl --config.data.eval=test.jsonl
"""

from __future__ import annotations

from typing import Any

from configs import base


def get_config() -> Any:
    config = base.get_config()
    config.model.update(path="HuggingFaceTB/SmolLM2-1.7B-Instruct", dtype="bfloat16", remat="full")
    config.data.update(
        train=("hf:openai/gsm8k:main:train",),
        eval=("hf:openai/gsm8k:main:test",),
        train_batch_size=64,
        prompt_template="{question}\nReason step by step, and put the final answer after ####.",
        too_long="drop",
    )
    config.rollout.update(n=8, prompt_length=256, response_length=512)
    config.reward.functions = ("gsm8k",)
    config.actor.update(micro_batch_size=8, use_kl_loss=True, kl_loss_coef=0.001)
    config.optimizer.update(lr=1e-6, warmup_steps=10)
    config.trainer.update(steps=200, save_interval=50, score_micro_batch_size=16)
    config.eval.update(interval=50, batch_size=64)
    return config

"""GRPO on GSM8K, for an instruct model of 0.5B to 3B parameters on one GPU or TPU host (on which it has not been run).

The reward is 1 if the number after ####, or without that the last number, is the gold one. Questions come from the
hub's openai/gsm8k where it can be reached, or from JSONL files with `question` and `answer`:

    python -m jaxrl_llm.train --config configs/gsm8k_grpo.py \\
      --config.model.path=meta-llama/Llama-3.2-1B-Instruct
    python -m jaxrl_llm.train --config configs/gsm8k_grpo.py --config.model.path=FOLDER \\
      --config.data.train=train.jsonl --config.data.eval=test.jsonl

Two steps on two CPU cores, to see it work (SmolLM2-135M gets 1 of the first 32 problems in 96 tokens; 41 s a step):

    python -m jaxrl_llm.train --config configs/gsm8k_grpo.py --config.model.path=models/smollm2-135m \\
      --config.model.dtype=float32 --config.model.scan_layers=False \\
      --config.data.train=train.jsonl --config.data.eval=test.jsonl --config.data.train_batch_size=4 \\
      --config.rollout.n=4 --config.rollout.response_length=96 --config.actor.micro_batch_size=4 \\
      --config.trainer.steps=2 --config.eval.max_prompts=32 --config.eval.batch_size=32
"""

from __future__ import annotations

from typing import Any

from configs import base


def get_config() -> Any:
    config = base.get_config()
    config.model.update(path="HuggingFaceTB/SmolLM2-1.7B-Instruct", dtype="bfloat16", remat="full")
    config.model.use_remove_padding = True  # most answers are much shorter than the limit
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

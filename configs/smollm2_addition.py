"""GRPO teaches SmolLM2-135M-Instruct to add two digits.

"What is 3+4?" through the chat template; the reward is 1 if the last whole number of the answer is the sum. Sampled, the model gets about
one in five right before training.
"""

from __future__ import annotations

from typing import Any

from configs import base


def get_config() -> Any:
    config = base.get_config()
    config.model.update(path="models/smollm2-135m", scan_layers=False)
    config.data.update(
        train=("jaxrl_llm.tasks:addition(split='train', held_out=0.3)",),
        eval=(
            "jaxrl_llm.tasks:addition(split='train', held_out=0.3)",
            "jaxrl_llm.tasks:addition(split='test', held_out=0.3, data_source='addition_held_out')",
        ),
        train_batch_size=8,
    )
    config.rollout.update(n=8, prompt_length=40, response_length=24)
    config.reward.functions = ("last_integer",)
    config.actor.micro_batch_size = 16
    config.optimizer.update(lr=1e-5, weight_decay=0.0)
    config.trainer.update(steps=40, save_interval=20)
    config.eval.update(interval=5, batch_size=50)
    return config

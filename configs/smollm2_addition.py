"""GRPO teaches SmolLM2-135M-Instruct to add two digits.

"What is 3+4?" through the chat template; the reward is 1 if the last whole number of the answer is the sum. 70 of the
100 pairs train, 30 are held out; both are evaluated every five steps.

    python -m jaxrl_llm.fetch smollm2-135m
    python -m jaxrl_llm.train --config configs/smollm2_addition.py --workdir runs/addition

Costs and what to expect, measured on two CPU cores: docs/addition.md. The sampled reward starts near 0.2 and is above
0.9 after 20 steps; greedy accuracy goes from about 0.6 to 1.0. About 8 GB of memory.
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
    config.trainer.update(steps=30, save_interval=10)
    config.eval.update(interval=5, batch_size=50)
    return config

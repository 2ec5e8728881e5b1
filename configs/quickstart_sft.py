"""Remakes the quickstart's model: supervised learning from a book of sums that mostly forgets the carry.

`47+38=` is followed by 85 in four lines of ten and by 75 in six. The model becomes sure of sums without a carry, and
gets the others mostly wrong; that it has seen both ways is what reinforcement learning can build on.

    python -m jaxrl_llm.sft --config configs/quickstart_sft.py --workdir runs/quickstart_sft
    python -m jaxrl_llm.export runs/quickstart_sft models/quickstart
"""

from __future__ import annotations

from typing import Any

from configs import base
from jaxrl_llm.quickstart import FOLDER


def get_config() -> Any:
    config = base.get_config()
    config.model.update(path=str(FOLDER), fresh=True, scan_layers=False)
    config.data.update(
        train=("jaxrl_llm.tasks:column_sums(split='train', forget=0.6, copies=10)",),
        eval=("jaxrl_llm.tasks:column_sums(split='test')",),
        train_batch_size=256,
        chat_template=False,
    )
    config.rollout.update(prompt_length=6, response_length=4)
    config.reward.functions = ("exact",)
    config.optimizer.update(lr=2e-3, schedule="cosine", warmup_steps=100, weight_decay=0.0)
    config.trainer.update(steps=2500, save_interval=2500, log_interval=100, sample_interval=0)
    config.eval.update(interval=500, before=False, batch_size=500)
    return config

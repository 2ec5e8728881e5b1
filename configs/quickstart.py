"""GRPO on the model that comes with the package: it adds two-digit numbers and has to learn to carry. About a minute.

`47+38=` must be answered by 85; the reward is 1 for the right sum and 0 for any other. 1,000 of the 10,000 pairs are
held out. The model has read a book of sums that mostly forgets the carry (configs/quickstart_sft.py): it is right on
sums without one and mostly wrong on the others, but when sampled it carries now and then, and that is reinforced.

    python -m jaxrl_llm.train --config configs/quickstart.py --workdir runs/quickstart
"""

from __future__ import annotations

from typing import Any

from configs import base
from jaxrl_llm.quickstart import FOLDER


def get_config() -> Any:
    config = base.get_config()
    config.model.update(path=str(FOLDER), scan_layers=False)
    config.data.update(
        train=("jaxrl_llm.tasks:column_sums(split='train')",),
        eval=("jaxrl_llm.tasks:column_sums(split='test')",),
        train_batch_size=32,
        chat_template=False,
    )
    config.rollout.update(n=8, prompt_length=6, response_length=4)
    config.reward.functions = ("exact",)
    config.actor.update(clip_ratio=0.2, clip_ratio_high=0.28)
    config.optimizer.update(lr=3e-5, weight_decay=0.0)
    config.trainer.update(steps=100, save_interval=50, sample_interval=50, export=True)
    config.eval.update(interval=5, batch_size=500)
    return config

"""The second stage of RLHF: a reward model that tells right sums from wrong ones, from the packaged model.

Pairs of a right and a wrong answer to `47+38=`, as people would have given them; 1,000 of the 10,000 sums are held out.
The run leaves the reward model in its folder's model/, where quickstart_rlhf.py looks for it.

    python -m jaxrl_llm.reward_model --config configs/quickstart_reward_model.py --workdir runs/quickstart_reward_model
"""

from __future__ import annotations

from typing import Any

from configs import base
from jaxrl_llm.quickstart import FOLDER


def get_config() -> Any:
    config = base.get_config()
    config.model.update(path=str(FOLDER), scan_layers=False)
    config.data.update(
        train=("jaxrl_llm.tasks:column_pairs(split='train', copies=10)",),
        eval=("jaxrl_llm.tasks:column_pairs(split='test')",),
        train_batch_size=128,
        chat_template=False,
    )
    config.rollout.update(prompt_length=6, response_length=4)
    config.reward.model.center_coefficient = 0.01
    config.optimizer.update(lr=1e-3, schedule="cosine", warmup_steps=20, weight_decay=0.0)
    config.trainer.update(steps=500, save_interval=500, log_interval=50, sample_interval=0, export=True)
    config.eval.update(interval=100, batch_size=500)
    return config

"""Teaches the packaged model how to ask a calculator, and to do it now and then: the stage before configs/calculator.py.

Products of two numbers below 100. Three lines in ten ask: `47*38=` is followed by `(47*38)`, and `47*38=(47*38)1786`,
where 1786 is what the calculator will say, by `1786`. The other lines say the product at once, which the model does not
learn to do right in this time: it guesses. A minute or two on two CPU cores.

    python -m jaxrl_llm.sft --config configs/calculator_sft.py --workdir runs/calculator_sft
"""

from __future__ import annotations

from typing import Any

from configs import base
from jaxrl_llm.quickstart import FOLDER


def get_config() -> Any:
    config = base.get_config()
    config.model.update(path=str(FOLDER), scan_layers=False)
    config.data.update(
        train=("jaxrl_llm.tasks:products(split='train', ask=0.3, copies=4)",),
        train_batch_size=128,
        chat_template=False,
    )
    config.rollout.update(prompt_length=17, response_length=8)  # 99*99=(99*99)9801, and (99*99) with its end
    config.reward.functions = ("exact",)
    config.optimizer.update(lr=2e-3, schedule="cosine", warmup_steps=20, weight_decay=0.0)
    config.trainer.update(steps=600, save_interval=600, log_interval=50, sample_interval=0, export=True)
    return config

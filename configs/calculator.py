"""GRPO over two turns: a model that may ask a calculator learns that it should.

The prompt is `47*38=`. What the model writes between brackets is worked out by the environment and put behind it,
`(47*38)1786`, and the model has a second turn; or it answers at once, and is mostly wrong. The reward is 1 for a last
turn that is the right product and nothing else. What the calculator said is in the context, but nothing is learned of it.
The model comes from configs/calculator_sft.py. A minute on two CPU cores.

    python -m jaxrl_llm.sft --config configs/calculator_sft.py --workdir runs/calculator_sft
    python -m jaxrl_llm.train --config configs/calculator.py --workdir runs/calculator
"""

from __future__ import annotations

from typing import Any

from configs import base


def get_config() -> Any:
    config = base.get_config()
    config.model.update(path="runs/calculator_sft/model", scan_layers=False)
    config.data.update(
        train=("jaxrl_llm.tasks:products(split='train')",),
        eval=("jaxrl_llm.tasks:products(split='test')",),
        train_batch_size=16,
        chat_template=False,
    )
    config.rollout.update(n=8, prompt_length=6, response_length=20, stop=(")",))
    config.rollout.multi_turn.update(
        environment="calculator(opening='(', closing=')')", max_assistant_turns=3, max_observation_length=5
    )
    config.reward.functions = ("exact",)
    config.actor.update(clip_ratio=0.2, clip_ratio_high=0.28)
    config.optimizer.update(lr=3e-5, weight_decay=0.0)
    config.trainer.update(steps=40, save_interval=40, sample_interval=20, export=True)
    config.eval.update(interval=10, batch_size=500, temperature=1.0)
    return config

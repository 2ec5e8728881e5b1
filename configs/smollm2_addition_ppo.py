"""PPO teaches SmolLM2-135M-Instruct to add two digits: the task of smollm2_addition.py with a critic.

Actor, critic (a value head on a copy of the model), reference, and the KL to it in the reward with an adaptive
coefficient; advantages by GAE. Two optimizer updates a step, for actor and critic each.

    python -m jaxrl_llm.fetch smollm2-135m
    python -m jaxrl_llm.train --config configs/smollm2_addition_ppo.py --workdir runs/addition_ppo

Costs and what to expect, measured on two CPU cores: docs/addition.md. About 12 GB of memory, and two to three times the
time of a GRPO step.
"""

from __future__ import annotations

from typing import Any

from configs import smollm2_addition


def get_config() -> Any:
    config = smollm2_addition.get_config()
    config.algorithm.update(estimator="gae", gamma=1.0, lam=0.95, use_kl_in_reward=True)
    config.algorithm.kl_ctrl.update(type="adaptive", kl_coef=0.01, target_kl=0.1)
    config.actor.update(mini_batch_size=4)
    config.critic.update(mini_batch_size=4, micro_batch_size=16)
    config.critic.optimizer.update(lr=5e-5, weight_decay=0.0)
    return config

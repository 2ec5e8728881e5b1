"""PPO on the task of quickstart.py: a critic, GAE, a reference, and the KL to it in the reward.

The critic is a value head on a copy of the model and learns to expect the reward token by token; two optimizer updates
a step, of actor and critic each.

    python -m jaxrl_llm.train --config configs/quickstart_ppo.py --workdir runs/quickstart_ppo
"""

from __future__ import annotations

from typing import Any

from configs import quickstart


def get_config() -> Any:
    config = quickstart.get_config()
    config.algorithm.update(estimator="gae", lam=0.95, use_kl_in_reward=True)
    config.algorithm.kl_ctrl.update(kl_coef=0.001)
    config.actor.update(mini_batch_size=16)
    config.critic.update(mini_batch_size=16, warmup_steps=5)
    config.critic.optimizer.update(lr=1e-3, weight_decay=0.0)
    return config

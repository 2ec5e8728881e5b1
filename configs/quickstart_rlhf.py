"""The third stage of RLHF: PPO whose only reward is the score of the model of quickstart_reward_model.py.

The policy never sees whether a sum is right; `exact` has weight 0 and is only watched, in training (metric
`rewards/exact/mean`) and on held-out sums (`val-aux/column_sums/exact/mean@1`). The KL to the packaged model is in the
reward and holds the policy near what the reward model has seen. docs/rlhf.md tells the whole chain.

    python -m jaxrl_llm.train --config configs/quickstart_rlhf.py --workdir runs/quickstart_rlhf
"""

from __future__ import annotations

from typing import Any

from configs import quickstart_ppo


def get_config() -> Any:
    config = quickstart_ppo.get_config()
    config.reward.update(functions=("exact",), weights=(0.0,))
    config.reward.model.update(path="runs/quickstart_reward_model/model", chat_template=False)
    config.algorithm.kl_ctrl.update(kl_coef=0.05)
    return config

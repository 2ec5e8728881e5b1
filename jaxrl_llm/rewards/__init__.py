"""From text to score, on the host. Nothing here imports jax: reward functions also run in worker processes."""

from jaxrl_llm.rewards.forms import batched, form_of, jax_reward
from jaxrl_llm.rewards.pool import RewardPool, pooled
from jaxrl_llm.rewards.registry import BUILT_IN, resolve
from jaxrl_llm.rewards.reward_set import REWARD_MODEL, Pending, Reward, RewardSet, Scores, make_rewards

__all__ = [
    "BUILT_IN",
    "REWARD_MODEL",
    "Pending",
    "Reward",
    "RewardPool",
    "RewardSet",
    "Scores",
    "batched",
    "form_of",
    "jax_reward",
    "make_rewards",
    "pooled",
    "resolve",
]

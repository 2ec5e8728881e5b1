"""What a configuration says a run has: its roles, and the functions that its names stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from jaxrl_llm import dotted
from jaxrl_llm.errors import UserError, nearest

if TYPE_CHECKING:
    from jaxrl_llm.algorithms.advantages import Estimator
    from jaxrl_llm.algorithms.losses import PolicyLoss
    from jaxrl_llm.config import Config

T = TypeVar("T")


def need_critic(config: Config) -> bool:
    """A critic exists if `critic.enable` says so, else if the estimator is `gae`."""
    if config.critic.enable == "auto":
        return config.algorithm.estimator == "gae"
    return config.critic.enable == "yes"


def need_reference(config: Config) -> bool:
    """A reference exists if KL is in the reward or in the loss."""
    return config.algorithm.use_kl_in_reward or config.actor.use_kl_loss


def need_base(config: Config) -> bool:
    """Frozen parameters of the actor exist beneath a LoRA overlay, and beneath a critic's value head alone."""
    return config.model.lora_rank > 0 or (need_critic(config) and config.critic.freeze_trunk)


def decays_over_the_run(config: Config) -> str:
    """The optimizer whose learning rate depends on how long the run is; "" if none does."""
    optimizers = {"optimizer": config.optimizer}
    if need_critic(config):
        optimizers["critic.optimizer"] = config.critic.optimizer
    decaying = [name for name, o in optimizers.items() if o.schedule != "constant" and not o.decay_steps]
    return decaying[0] if decaying else ""


def chosen_estimator(config: Config) -> tuple[Estimator, dict[str, Any]]:
    """The estimator, registered or at a dotted path, and the options to call it with.

    Raises:
      UserError: there is none of that name.
    """
    from jaxrl_llm.algorithms.advantages import ESTIMATORS, Estimator

    algorithm = config.algorithm
    entry = _chosen(algorithm.estimator, ESTIMATORS, Estimator.of)
    shared = {
        "gamma": algorithm.gamma,
        "lam": algorithm.lam,
        "scale": algorithm.scale,
        "epsilon": algorithm.epsilon,
        "whiten": algorithm.whiten_advantages,
        "weights": _reward_weights(config),
    }
    return entry, _taken(shared, entry.options) | algorithm.estimator_kwargs


def _reward_weights(config: Config) -> tuple[float, ...] | None:
    """One for each column of the scores; None where all are 1."""
    reward = config.reward
    if not reward.model.path:
        return reward.weights or None
    return (*(reward.weights or (1.0,) * len(reward.functions)), reward.model.weight)


def chosen_policy_loss(config: Config) -> tuple[PolicyLoss, dict[str, Any]]:
    """The policy loss, registered or at a dotted path, and the options to call it with.

    Raises:
      UserError: there is none of that name.
    """
    from jaxrl_llm.algorithms.losses import POLICY_LOSSES, PolicyLoss

    actor = config.actor
    entry = _chosen(actor.policy_loss, POLICY_LOSSES, PolicyLoss.of)
    shared = {
        "aggregation": actor.loss_agg_mode,
        "scale_factor": actor.loss_scale_factor,
        "clip_ratio_low": actor.clip_ratio_low,
        "clip_ratio_high": actor.clip_ratio_high,
        "clip_ratio_c": actor.clip_ratio_c,
    }
    return entry, _taken(shared, entry.options) | actor.loss_kwargs


def loss_aggregation(config: Config) -> str:
    """The aggregation of the actor's loss, entropy and KL: `actor.loss_agg_mode`, or the policy loss's own."""
    entry, options = chosen_policy_loss(config)
    return options.get("aggregation") or config.actor.loss_agg_mode or entry.options.get("aggregation") or "token-mean"


def _taken(shared: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Of the knobs that several functions share, those that are set and that this one has."""
    return {name: value for name, value in shared.items() if name in options and value is not None}


def _chosen(name: str, registry: Mapping[str, T], wrap: Callable[[Callable[..., Any]], T]) -> T:
    if name in registry:
        return registry[name]
    if ":" not in name:
        raise UserError(f"no such name; {nearest(name, registry)}; or a path module:function")
    try:
        return wrap(dotted.load(name))
    except (TypeError, ValueError) as error:  # not a function, or not one of this kind
        raise UserError(str(error)) from error

"""Whether a run can still learn anything: rewards that fail, numbers that are not finite."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrl_llm.config import Config
from jaxrl_llm.rewards import Scores
from jaxrl_llm.types import RunState


def why_stop(config: Config, metrics: Mapping[str, float], scored: Scores | None, state: RunState) -> str:
    """Why the run cannot learn any more after a step; "" if it can."""
    ratio, most = metrics.get("reward/failed_ratio", 0.0), config.reward.max_failed_ratio
    if scored and (ratio == 1 or ratio > most):
        failures = scored.failures
        first = failures[0] if failures else "a JAX reward's score was not finite"
        where = "every response" if ratio == 1 else f"{ratio:.0%} of the responses (reward.max_failed_ratio={most})"
        return f"the reward failed on {where}; the first failure:\n{first}"
    for role, trained in (("actor", state.actor), ("critic", state.critic)):
        skipped = int(trained.skipped) if trained else 0
        if skipped >= config.trainer.max_skipped_updates:
            return (
                f"{skipped} updates of the {role} in a row had a non-finite loss or gradient; "
                "the parameters are those before them"
            )
    return ""

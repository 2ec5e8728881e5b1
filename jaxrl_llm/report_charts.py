"""Which curves a run's report draws, and in which order."""

from __future__ import annotations

from typing import Literal, NamedTuple

# The phases in the order of a step (README, "The rooms"); others follow.
PHASES = (
    "data", "update_weights", "gen", "gen_max", "reward", "old_log_prob", "ref", "values", "adv", "update_critic",
    "update_actor", "update_reference", "testing", "save_checkpoint",
)  # fmt: skip


class Chart(NamedTuple):
    """A chart: it is drawn where a run has at least `at_least` of its metrics."""

    section: str
    title: str
    about: str  # a line below the title
    series: tuple[tuple[str, str], ...]  # (regular expression of a metric's name, label)
    form: Literal["number", "share"] = "number"
    at_least: int = 1
    if_not_zero: bool = False  # 0 throughout means that there is nothing to see (one update a batch: old = new)


CHARTS = (
    Chart("Learning", "Reward", "mean score of a step's responses", (("critic/score/mean", "reward"),)),
    Chart("Learning", "Loss", "per token, of a reward model per pair", (("train/loss", "loss"),)),
    Chart(
        "Learning",
        "Pairs in order",
        "share whose better response scores higher",
        (("train/accuracy", "share"),),
        "share",
    ),
    Chart("Learning", "Scores of pairs", "means", (("train/chosen", "better"), ("train/rejected", "worse"))),
    Chart("Learning", "Evaluation score", "with 95% interval", ((r"val-core/(.+)/reward/mean@(\d+)", r"\1"),)),
    Chart("Learning", "Rewards by function", "means, unweighted", ((r"rewards/(.+)/mean", r"\1"),), at_least=2),
    Chart(
        "Learning",
        "Prompts without a signal",
        "prompts whose responses all score the same",
        (("frac_reward_zero_std", "share"),),
        "share",
    ),
    Chart(
        "Learning",
        "Failed rewards",
        "share of responses whose reward failed; they teach nothing",
        (("reward/failed_ratio", "failed"),),
        "share",
        if_not_zero=True,
    ),
    Chart(
        "Policy",
        "KL to the reference",
        "nats per token",
        (("actor/kl_loss", "in the loss"), ("actor/reward_kl_penalty", "in the reward")),
    ),
    Chart(
        "Policy",
        "KL of the update",
        "old policy to new, nats per token",
        (("actor/ppo_kl", "ppo_kl"),),
        if_not_zero=True,
    ),
    Chart("Policy", "Entropy", "nats per token", (("actor/entropy", "entropy"),)),
    Chart(
        "Policy",
        "Clipped tokens",
        "share whose ratio the loss clips",
        (("actor/pg_clipfrac", "clipped"), ("actor/pg_clipfrac_lower", "dual clip")),
        "share",
        if_not_zero=True,
    ),
    Chart(
        "Policy",
        "Response length",
        "tokens, mean",
        (("response_length/mean", "length"),),
    ),
    Chart(
        "Policy",
        "Truncated responses",
        "share cut off at the response length",
        (("response/truncated_ratio", "truncated"),),
        "share",
    ),
    Chart(
        "Policy",
        "Gradient norm",
        "before clipping",
        (("actor/grad_norm", "actor"), ("train/grad_norm", "model")),
    ),
    Chart("Policy", "Learning rate", "of the policy", (("actor/lr", "lr"), ("train/lr", "lr"))),
    Chart(
        "Policy",
        "Sampler and scorer",
        "difference of a token's probability; 0 is best",
        (("training/rollout_probs_diff_mean", "mean"), ("training/rollout_probs_diff_max", "largest")),
    ),
    Chart("Critic", "Value loss", "", (("critic/vf_loss", "vf_loss"),)),
    Chart(
        "Critic",
        "Explained variance",
        "of the returns by the values; 1 is best, 0 is a constant's",
        (("critic/vf_explained_var", "explained"),),
    ),
    Chart(
        "Critic",
        "Values and returns",
        "means",
        (("critic/values/mean", "values"), ("critic/returns/mean", "returns")),
        at_least=2,
    ),
    Chart("Critic", "Gradient norm of the critic", "before clipping", (("critic/grad_norm", "critic"),)),
    Chart("Time", "Throughput", "tokens per second and device", (("perf/throughput", "tokens/s"),)),
    Chart(
        "Time",
        "Utilisation",
        "FLOPs that the model needs, of those that the devices could do in a phase's time",
        ((r"perf/mfu/(.+)", r"\1"),),
        "share",
    ),
    Chart(
        "Time",
        "Real tokens",
        "of those computed; the others are padding",
        ((r"perf/real_token_ratio/(.+)", r"\1"),),
        "share",
    ),
)

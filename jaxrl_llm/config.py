"""The configuration: frozen records with types and ranges, built and validated once from a ConfigDict.

Defaults and what each key means stand in `configs/base.py`; here stand types, ranges and the rules between keys. Every
error names the key, the value and what is allowed; all of them are reported at once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from ml_collections import ConfigDict

from jaxrl_llm import config_devices, config_roles, config_rules
from jaxrl_llm.config_values import Range, build, flatten, suggest, unknown_keys
from jaxrl_llm.errors import UserError

Positive = Annotated[int, Range("at least 1", lambda v: v >= 1)]
Count = Annotated[int, Range("at least 0", lambda v: v >= 0)]
AxisSize = Annotated[int, Range("at least 1, or -1 for what is left", lambda v: v >= 1 or v == -1)]
Workers = Annotated[int, Range("at least 0, or -1 for one per CPU core", lambda v: v >= -1)]
AboveZero = Annotated[float, Range("above 0", lambda v: v > 0)]
DeviceTflops = Annotated[float, Range("at least 0, or -1 for the device's own", lambda v: v >= 0 or v == -1)]
NotNegative = Annotated[float, Range("at least 0", lambda v: v >= 0)]
AboveOne = Annotated[float, Range("above 1", lambda v: v > 1)]
Fraction = Annotated[float, Range("in [0, 1]", lambda v: 0 <= v <= 1)]
Decay = Annotated[float, Range("in [0, 1)", lambda v: 0 <= v < 1)]
Share = Annotated[float, Range("in (0, 1)", lambda v: 0 < v < 1)]
Probability = Annotated[float, Range("in (0, 1]", lambda v: 0 < v <= 1)]

DType = Literal["float32", "bfloat16"]
LoraModule = Literal["all-linear", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KLKind = Literal["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"]
KLLossKind = Literal[
    "k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "kl+", "abs+", "k2+", "mse+", "k3+", "low_var_kl+"
]  # fmt: skip
# What a loss is divided by: all tokens | nothing | rows, of sums or of means per row | rows x loss_scale_factor.
Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Model:
    path: str
    fresh: bool
    dtype: DType
    param_dtype: DType
    lora_rank: Count
    lora_alpha: AboveZero
    target_modules: tuple[LoraModule, ...]
    quantize_base: Literal["none", "int8"]
    scan_layers: bool
    remat: Literal["none", "dots", "full"]
    attention: Literal["auto", "xla", "cudnn", "splash"]
    sequence_parallel: bool
    use_remove_padding: bool
    packed_widths: tuple[Share, ...]
    logprob_chunk: Positive


@dataclasses.dataclass(frozen=True)
class MultiTurn:
    environment: str
    max_assistant_turns: Positive
    max_observation_length: Positive


@dataclasses.dataclass(frozen=True)
class Cascade:
    width: Count
    halvings: Count
    min_rows: Positive


@dataclasses.dataclass(frozen=True)
class Rollout:
    n: Positive
    prompt_length: Positive
    response_length: Positive
    temperature: AboveZero
    top_k: Count
    top_p: Probability
    min_p: Fraction
    ignore_eos: bool
    min_new_tokens: Count
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    parts: Positive
    gather_params: bool
    cascade: Cascade
    multi_turn: MultiTurn


@dataclasses.dataclass(frozen=True)
class Curriculum:
    sampler: Literal["uniform", "hard", "frontier"]
    metric: str
    smoothing: Probability
    floor: Probability


@dataclasses.dataclass(frozen=True)
class Data:
    train: tuple[str, ...]
    weights: tuple[AboveZero, ...]
    eval: tuple[str, ...]
    train_batch_size: Positive
    shuffle: bool
    prompt_key: str
    response_key: str
    chosen_key: str
    rejected_key: str
    prompt_template: str
    chat_template: bool
    system_prompt: str
    template_kwargs: dict[str, Any]
    too_long: Literal["error", "drop"]
    on_bad_record: Literal["error", "skip"]
    source_kwargs: dict[str, Any]
    curriculum: Curriculum


@dataclasses.dataclass(frozen=True)
class RewardModel:
    path: str
    weight: float
    max_length: Count
    micro_batch_size: Count
    chat_template: bool
    template_kwargs: dict[str, Any]
    center_coefficient: NotNegative


@dataclasses.dataclass(frozen=True)
class OverlongBuffer:
    enable: bool
    len: Positive
    penalty_factor: NotNegative


@dataclasses.dataclass(frozen=True)
class Reward:
    functions: tuple[str, ...]
    weights: tuple[float, ...]
    data_sources: tuple[str, ...]
    num_workers: Workers
    timeout: AboveZero
    memory_limit: NotNegative
    max_failed_ratio: Fraction
    model: RewardModel
    overlong_buffer: OverlongBuffer


@dataclasses.dataclass(frozen=True)
class KLControl:
    type: Literal["fixed", "adaptive"]
    kl_coef: NotNegative
    target_kl: AboveZero
    horizon: Positive


@dataclasses.dataclass(frozen=True)
class RolloutCorrection:
    rollout_is: Literal["none", "token", "sequence"]
    rollout_is_threshold: float | str
    rollout_is_batch_normalize: bool
    rollout_rs: str
    rollout_rs_threshold: float | str
    bypass: bool


@dataclasses.dataclass(frozen=True)
class FilterGroups:
    enable: bool
    metric: str
    max_num_gen_batches: Positive


@dataclasses.dataclass(frozen=True)
class Algorithm:
    estimator: str
    gamma: Fraction
    lam: Fraction
    scale: Literal["group", "batch", "none"]
    epsilon: NotNegative | None
    whiten_advantages: bool
    whiten_rewards: bool
    estimator_kwargs: dict[str, Any]
    use_kl_in_reward: bool
    kl_penalty: KLKind
    kl_ctrl: KLControl
    filter_groups: FilterGroups
    mask_truncated: bool
    rollout_correction: RolloutCorrection


@dataclasses.dataclass(frozen=True)
class Optimizer:
    lr: NotNegative
    schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: Count
    decay_steps: Count
    min_lr_ratio: Fraction
    b1: Decay
    b2: Decay
    eps: AboveZero
    weight_decay: NotNegative
    max_grad_norm: NotNegative


@dataclasses.dataclass(frozen=True)
class Actor:
    mini_batch_size: Positive  # a 0 is resolved to data.train_batch_size
    micro_batch_size: Count
    epochs: Positive
    shuffle: bool
    policy_loss: str
    clip_ratio: NotNegative | None  # None, here and below: the loss's own
    clip_ratio_low: NotNegative | None  # a None is resolved to clip_ratio
    clip_ratio_high: NotNegative | None
    clip_ratio_c: AboveOne | None
    loss_agg_mode: Aggregation | None
    loss_scale_factor: AboveZero  # a None is resolved to rollout.response_length
    loss_kwargs: dict[str, Any]
    top_entropy_quantile: Probability
    entropy_coeff: float
    use_kl_loss: bool
    kl_loss_coef: NotNegative
    kl_loss_type: KLLossKind


@dataclasses.dataclass(frozen=True)
class Critic:
    enable: Literal["auto", "yes", "no"]
    path: str
    freeze_trunk: bool
    warmup_steps: Count
    mini_batch_size: Positive
    micro_batch_size: Count
    epochs: Positive
    shuffle: bool
    cliprange_value: NotNegative
    loss_agg_mode: Aggregation
    optimizer: Optimizer


@dataclasses.dataclass(frozen=True)
class Reference:
    path: str
    sync_steps: Count
    sync_alpha: Probability


@dataclasses.dataclass(frozen=True)
class Mesh:
    data: AxisSize
    fsdp: AxisSize
    tensor: AxisSize


@dataclasses.dataclass(frozen=True)
class Trainer:
    steps: Count
    epochs: Count
    log_interval: Positive
    save_interval: Count
    keep_checkpoints: Positive
    keep_best: bool
    best_metric: str
    export: bool
    max_skipped_updates: Positive
    one_step_off_policy: bool
    phase_timeout: NotNegative
    compilation_cache: str
    device_tflops: DeviceTflops
    rollout_dump: bool
    sample_interval: Count
    samples_to_show: Count
    score_micro_batch_size: Count


@dataclasses.dataclass(frozen=True)
class Eval:
    interval: Count
    before: bool
    after: bool
    n: Positive
    temperature: NotNegative
    greedy: bool
    responses: bool
    batch_size: Positive
    max_prompts: Count


@dataclasses.dataclass(frozen=True)
class Logging:
    name: str
    report: bool
    tensorboard: bool
    wandb: bool
    trackio: bool
    project: str
    offline: bool
    progress: Literal["auto", "rich", "plain", "none"]


@dataclasses.dataclass(frozen=True)
class Config:
    seed: Count
    model: Model
    rollout: Rollout
    data: Data
    reward: Reward
    algorithm: Algorithm
    actor: Actor
    critic: Critic
    reference: Reference
    optimizer: Optimizer
    mesh: Mesh
    trainer: Trainer
    eval: Eval
    logging: Logging


# What is asked of a configuration from outside; the names stand in rooms of their own.
need_critic = config_roles.need_critic
need_reference = config_roles.need_reference
need_base = config_roles.need_base
chosen_estimator = config_roles.chosen_estimator
chosen_policy_loss = config_roles.chosen_policy_loss
loss_aggregation = config_roles.loss_aggregation
check_devices = config_devices.check_devices
notices = config_rules.notices


def from_config_dict(raw: ConfigDict | Mapping[str, Any]) -> Config:
    """The validated configuration, with what follows from other keys filled in.

    Raises:
      UserError: listing every unknown or missing key, wrong type, impossible value and broken rule at once.
    """
    plain = raw.to_dict() if isinstance(raw, ConfigDict) else dict(raw)
    resolved, derived = _resolve(plain)
    problems: dict[str, str] = {}  # key -> what is wrong with it
    config = build(Config, resolved, problems)
    broken = {key for key in FOLLOWS if not isinstance(plain.get(FOLLOWS[key][1].split(".")[0], {}), Mapping)}
    problems = {k: text for k, text in problems.items() if derived.get(k) not in problems and k not in broken}
    for key in unknown_keys(Config, plain):
        problems[key] = f"no such key; {suggest(Config, key)}"
    values, suspect = flatten(config), {*problems, *(key for key, source in derived.items() if source in problems)}
    # Of a section that is none the keys are stand-ins.
    suspect |= {key for key in values if any(key.startswith(f"{problem}.") for problem in problems)}
    lines = [f"config.{key}: {text}" for key, text in problems.items()]
    lines += [
        f"{', '.join(f'config.{key} = {values[key]!r}' for key in rule.keys)}: {rule.text}"
        for rule in config_rules.broken_rules(config)
        if suspect.isdisjoint(rule.keys)
    ]
    if lines:
        raise UserError("\n  ".join([f"the configuration has {len(lines)} error(s):", *lines]))
    return config


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2, allow_nan=False)


def from_json(text: str) -> Config:
    """The inverse of `to_json`; tuples come back as tuples, and knobs that there were not yet have their defaults."""
    return from_config_dict(with_new_knobs(json.loads(text)))


def with_new_knobs(plain: dict[str, Any]) -> dict[str, Any]:
    """A run's config.json with the knobs that have come since it was written, as configs/base.py has them: their
    defaults leave everything as it was."""
    try:
        from configs import base
    except ImportError:  # installed without the recipes
        return plain
    return _filled(plain, base.get_config().to_dict())


def _filled(plain: Any, defaults: Any) -> Any:
    if not isinstance(plain, Mapping) or not isinstance(defaults, Mapping) or not defaults:
        return plain
    return {**defaults, **{key: _filled(value, defaults.get(key)) for key, value in plain.items()}}


# What may differ when a run is resumed: how long it is and what is written down, not what is computed.
RESUMABLE = (
    "trainer.steps",
    "trainer.epochs",
    "trainer.log_interval",
    "trainer.save_interval",
    "trainer.keep_checkpoints",
    "trainer.keep_best",
    "trainer.best_metric",
    "trainer.phase_timeout",
    "trainer.compilation_cache",
    "trainer.device_tflops",
    "trainer.export",
    "trainer.rollout_dump",
    "trainer.sample_interval",
    "trainer.samples_to_show",
    "reward.num_workers",
    "reward.timeout",
    "reward.memory_limit",
    "reward.max_failed_ratio",
    "data.eval",
    "eval.",
    "mesh.",
    "logging.",
)


def resume_differences(old: Config, new: Config) -> tuple[list[str], list[str]]:
    """How a run's configuration differs from the one it is resumed with, as (allowed, refused) lines."""
    allowed, refused = [], []
    before, after = flatten(old), flatten(new)
    for key in before:
        if before[key] != after[key]:
            line = f"config.{key}: was {before[key]!r}, now {after[key]!r}"
            if key in ("trainer.steps", "trainer.epochs") and (schedule := config_roles.decays_over_the_run(old)):
                refused.append(f"{line}; the schedule of config.{schedule} decays over the run (set its decay_steps)")
            else:
                (allowed if key.startswith(RESUMABLE) else refused).append(line)
    return allowed, refused


# Values that follow from another key while they are unset: key -> (unset value, the other key).
FOLLOWS: dict[str, tuple[int | None, str]] = {
    "actor.clip_ratio_low": (None, "actor.clip_ratio"),
    "actor.clip_ratio_high": (None, "actor.clip_ratio"),
    "actor.loss_scale_factor": (None, "rollout.response_length"),
    "actor.mini_batch_size": (0, "data.train_batch_size"),
    "critic.mini_batch_size": (0, "data.train_batch_size"),
}


def unresolve(plain: Mapping[str, Any]) -> list[str]:
    """The keys of a resolved configuration whose values are those they would follow: unset again they follow still.

    For a run's config.json that is changed afterwards: what was derived from a changed key must move with it.
    """
    found = []
    for key, (_, source) in FOLLOWS.items():
        (section, name), (source_section, source_name) = key.split("."), source.split(".")
        values, origin = plain.get(section), plain.get(source_section)
        if isinstance(values, Mapping) and isinstance(origin, Mapping):
            same = name in values and source_name in origin and values[name] == origin[source_name]
            found += [key] if same else []
    return found


def _resolve(plain: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """`plain` with the values that follow from other keys, and which key each of these came from."""
    resolved = {name: dict(value) if isinstance(value, Mapping) else value for name, value in plain.items()}
    derived = {}
    for key, (unset, source) in FOLLOWS.items():
        (section, name), (source_section, source_name) = key.split("."), source.split(".")
        values, origin = resolved.get(section), resolved.get(source_section)
        if isinstance(values, dict) and isinstance(origin, dict) and values.get(name, ...) == unset:
            values[name] = origin.get(source_name)
            derived[key] = source
    return resolved, derived

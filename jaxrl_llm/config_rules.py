"""The rules between keys: which values exclude each other. config_devices.py has those that the devices decide."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm import dotted, environments
from jaxrl_llm.config_roles import chosen_estimator, chosen_policy_loss, need_critic, need_reference
from jaxrl_llm.errors import UserError, nearest
from jaxrl_llm.rewards import REWARD_MODEL, make_rewards, registry

if TYPE_CHECKING:
    from jaxrl_llm.config import Config


class Broken(NamedTuple):
    """A rule that does not hold: the keys it reads, and what is allowed."""

    keys: tuple[str, ...]
    text: str


def broken_rules(config: Config) -> list[Broken]:
    """The rules that hold whatever devices there are; `check_devices` holds the others."""
    rules = (
        _sources,
        _rewards,
        _batches,
        _sampling,
        _estimator,
        _loss,
        _correction,
        _off_policy,
        _adaptive_kl,
        _reference,
        _frozen,
        _groups,
        _conversation,
        _schedules,
        _run,
        _mesh,
    )
    return [broken for rule in rules for broken in rule(config)]


def notices(config: Config) -> list[str]:
    """What is allowed but seldom meant."""
    found = []
    if config.actor.use_kl_loss and config.actor.kl_loss_type in ("k1", "kl"):
        found.append(
            f"config.actor.kl_loss_type = {config.actor.kl_loss_type!r}: the gradient of k1 in the loss is zero in "
            "expectation, so it holds nothing back; k2, or low_var_kl, do"
        )
    if config.actor.use_kl_loss and config.algorithm.use_kl_in_reward:
        found.append(
            "config.algorithm.use_kl_in_reward and config.actor.use_kl_loss are both True: the KL to the reference is "
            "charged twice, in the reward and in the loss"
        )
    for name, needed in (("critic", need_critic(config)), ("reference", need_reference(config))):
        if not needed and (path := getattr(config, name).path):
            found.append(f"config.{name}.path = {path!r} is not read: there is no {name} in this configuration")
    rewards, scorer = config.reward.weights, config.reward.model
    if rewards and not any(rewards) and not (scorer.path and scorer.weight):
        found.append(
            f"config.reward.weights = {rewards}: every reward is only watched, and there is no reward model "
            "(reward.model.path) whose score would count: all scores are 0"
        )
    sampler = config.rollout
    truncated = [
        f"config.rollout.{name}"
        for name, plain in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("min_new_tokens", 0))
        if getattr(sampler, name) != plain
    ]
    if truncated and config.algorithm.rollout_correction.rollout_is == "none":
        found.append(
            f"{', '.join(truncated)}: the sampler leaves out tokens that the loss's softmax counts, so the gradient is "
            "of another policy than the one sampled; algorithm.rollout_correction corrects for it"
        )
    if config.trainer.one_step_off_policy and (not config.reward.functions or config.reward.num_workers == 0):
        found.append(
            "config.trainer.one_step_off_policy = True: hides rewards that workers work out, and there are none "
            "(config.reward.functions, config.reward.num_workers): responses are a step old for nothing"
        )
    if config.model.param_dtype == "bfloat16":
        found.append(
            "config.model.param_dtype = 'bfloat16': an update smaller than 1/256 of a parameter is rounded away, and "
            "with it most of what a small learning rate does; float32 parameters with model.dtype = 'bfloat16' are safe"
        )
    return found


def _sources(config: Config) -> Iterator[Broken]:
    data = config.data
    if not config.model.path:
        yield Broken(("model.path",), "must be given: a Hugging Face folder or a hub id")
    if not data.train:
        yield Broken(("data.train",), "must be given: at least one source of prompts")
    yield from _names(config)
    if data.weights and len(data.weights) != len(data.train):
        yield Broken(("data.weights", "data.train"), "needs one weight per source, or none")
    if not data.prompt_key and not data.prompt_template:
        yield Broken(("data.prompt_key", "data.prompt_template"), "one of them must be given")
    if not data.chat_template and (data.system_prompt or data.template_kwargs):
        keys = ("data.chat_template", "data.system_prompt", "data.template_kwargs")
        yield Broken(keys, "a system prompt and template variables need the chat template")
    evaluation = config.eval
    if evaluation.interval and not data.eval:
        yield Broken(("eval.interval", "data.eval"), "evaluation needs a source of held-out prompts")
    if evaluation.greedy and evaluation.temperature and evaluation.n < 2:
        keys = ("eval.greedy", "eval.n")
        yield Broken(keys, "beside a greedy response there must be several sampled ones: n at least 2")
    if evaluation.temperature == 0 and evaluation.n > 1:
        yield Broken(("eval.n", "eval.temperature"), "greedy responses are all the same: n must be 1 at temperature 0")


def _names(config: Config) -> Iterator[Broken]:
    """Of the sets to evaluate on."""
    seen: dict[str, str] = {}
    for key in ("train", "eval"):
        for text in getattr(config.data, key):
            try:
                name, _ = dotted.split_name(text)
            except UserError as error:
                yield Broken((f"data.{key}",), str(error))
                continue
            if name and key == "train":
                yield Broken(("data.train",), f"{text!r}: only the sources of data.eval have names; leave {name}= out")
            elif name and seen.setdefault(name, text) is not text:
                yield Broken(("data.eval",), f"two sets are named {name!r}: {seen[name]!r} and {text!r}")


def _rewards(config: Config) -> Iterator[Broken]:
    functions, model = config.reward.functions, config.reward.model
    for name in functions:
        try:
            seconds = registry.own_deadline(registry.resolve(name))
        except UserError as error:
            yield Broken(("reward.functions",), str(error))
            continue
        if seconds >= config.reward.timeout and config.reward.num_workers:
            text = (
                f"{name!r} may take {seconds:g} s for a response by itself, and must be given more before it is killed"
            )
            yield Broken(("reward.timeout",), text)
    for key in ("weights", "data_sources"):
        values = getattr(config.reward, key)
        if values and len(values) != len(functions):
            yield Broken((f"reward.{key}", "reward.functions"), "needs one per function, or none")
    if model.template_kwargs and not model.chat_template:
        keys = ("reward.model.template_kwargs", "reward.model.chat_template")
        yield Broken(keys, "template variables need the chat template")


def _batches(config: Config) -> Iterator[Broken]:
    for name, role in (("actor", config.actor), ("critic", config.critic)):
        if config.data.train_batch_size % role.mini_batch_size:
            yield Broken(
                (f"{name}.mini_batch_size", "data.train_batch_size"),
                "prompts a mini-batch must divide the prompts a step",
            )
        rows = role.mini_batch_size * config.rollout.n
        if role.micro_batch_size and rows % role.micro_batch_size:
            keys = (f"{name}.micro_batch_size", f"{name}.mini_batch_size", "rollout.n")
            yield Broken(keys, f"rows a micro-batch must divide the {rows} rows (prompts x n) of a mini-batch")


def _sampling(config: Config) -> Iterator[Broken]:
    rollout = config.rollout
    if rollout.min_new_tokens > rollout.response_length:
        keys = ("rollout.min_new_tokens", "rollout.response_length")
        yield Broken(keys, "no response can be that long")
    if "" in rollout.stop:
        yield Broken(("rollout.stop",), "an empty stop string would end every response at once")
    if any(token < 0 for token in rollout.stop_token_ids):
        yield Broken(("rollout.stop_token_ids",), "token ids are at least 0")


def _estimator(config: Config) -> Iterator[Broken]:
    key = "algorithm.estimator"
    if config.critic.warmup_steps and not need_critic(config):
        keys = ("critic.warmup_steps", "critic.enable", key)
        yield Broken(keys, "there is no critic to warm up; set warmup_steps to 0 or critic.enable to yes")
    try:
        entry, options = chosen_estimator(config)
    except UserError as error:
        yield Broken((key,), str(error))
        return
    if entry.group and config.rollout.n == 1:
        yield Broken((key, "rollout.n"), "a group estimator compares responses to one prompt: n must be at least 2")
    if "values" in entry.needs and not need_critic(config):
        yield Broken((key, "critic.enable"), "this estimator needs values, so it needs a critic")
    if "scores" in entry.needs and config.algorithm.use_kl_in_reward:
        keys = (key, "algorithm.use_kl_in_reward")
        yield Broken(keys, "this estimator reads the scores and not the rewards; set actor.use_kl_loss instead")
    if config.algorithm.epsilon is not None and "epsilon" not in entry.options:
        yield Broken((key, "algorithm.epsilon"), "this estimator has no epsilon; leave it None")
    yield from _options(entry.options, options, (key, "algorithm.estimator_kwargs"))


def _loss(config: Config) -> Iterator[Broken]:
    key = "actor.policy_loss"
    try:
        entry, options = chosen_policy_loss(config)
    except UserError as error:
        yield Broken((key,), str(error))
        return
    for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"):
        if getattr(config.actor, name) is not None and name not in entry.options:
            yield Broken((key, f"actor.{name}"), "this loss has no such bound; leave it None")
    yield from _options(entry.options, options, (key, "actor.loss_kwargs"))
    if config.algorithm.rollout_correction.rollout_is != "none" and not entry.weighs:
        keys = (key, "algorithm.rollout_correction.rollout_is")
        yield Broken(
            keys, "this loss takes no importance weights (a parameter rollout_is_weights); set rollout_is to none"
        )


def _options(known: Mapping[str, Any], given: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[Broken]:
    for name in given.keys() - known.keys():
        yield Broken(keys, f"no option {name!r}; {nearest(name, known)}")
    for name, default in known.items():
        if default is inspect.Parameter.empty and name not in given:
            yield Broken(keys, f"the option {name!r} has no default and must be given")


def _correction(config: Config) -> Iterator[Broken]:
    from jaxrl_llm.algorithms.correction import is_bounds, rs_bounds

    correction, section = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    if correction.bypass and (correction.rollout_is != "none" or correction.rollout_rs != "none"):
        keys = (f"{section}.bypass", f"{section}.rollout_is", f"{section}.rollout_rs")
        yield Broken(keys, "with bypass the old log-probs are the sampler's: there is nothing to correct")
    try:
        is_bounds(correction.rollout_is_threshold)
    except ValueError as error:
        yield Broken((f"{section}.rollout_is_threshold",), str(error))
    if correction.rollout_rs != "none":
        try:
            rs_bounds(correction.rollout_rs, correction.rollout_rs_threshold)
        except ValueError as error:
            yield Broken((f"{section}.rollout_rs", f"{section}.rollout_rs_threshold"), str(error))


def _off_policy(config: Config) -> Iterator[Broken]:
    key, section, algorithm = "trainer.one_step_off_policy", "algorithm.rollout_correction", config.algorithm
    if not config.trainer.one_step_off_policy:
        return
    correction = algorithm.rollout_correction
    if not correction.bypass and correction.rollout_is == "none":
        keys = (key, f"{section}.bypass", f"{section}.rollout_is")
        yield Broken(
            keys,
            "responses are of a policy one step old, and nothing corrects for it; set bypass to True (the ratio is "
            "then to the policy that sampled) or rollout_is to token or sequence (the loss is weighed)",
        )
    if correction.bypass and config.actor.policy_loss == "gpg":
        keys = (key, f"{section}.bypass", "actor.policy_loss")
        yield Broken(keys, "this loss has no ratio that could correct for an older policy; set rollout_is instead")
    if algorithm.filter_groups.enable:
        keys = (key, "algorithm.filter_groups.enable")
        yield Broken(keys, "the prompts that replace others could not be sampled a step ahead; leave one of them out")
    if config.rollout.multi_turn.environment:
        keys = (key, "rollout.multi_turn.environment")
        yield Broken(keys, "turns would wait for workers that are busy with the rewards before; leave one of them out")


def _adaptive_kl(config: Config) -> Iterator[Broken]:
    control, rows = config.algorithm.kl_ctrl, config.data.train_batch_size * config.rollout.n
    if control.type == "adaptive" and control.horizon <= 0.2 * rows:
        keys = ("algorithm.kl_ctrl.horizon", "data.train_batch_size", "rollout.n")
        yield Broken(
            keys, f"must be above a fifth of the {rows} rows of a step, or one step could turn the coefficient"
        )


def _frozen(config: Config) -> Iterator[Broken]:
    model, critic = config.model, config.critic
    if model.lora_rank and model.fresh:
        yield Broken(("model.lora_rank", "model.fresh"), "corrections of random parameters teach nothing; set one to 0")
    if not model.lora_rank and model.target_modules != ("all-linear",):
        yield Broken(("model.target_modules", "model.lora_rank"), "say what LoRA trains, and there is none at rank 0")
    if model.lora_rank and not model.target_modules:
        yield Broken(("model.lora_rank", "model.target_modules"), "nothing would be trained; name the modules")
    if model.quantize_base != "none" and not model.lora_rank:
        yield Broken(("model.quantize_base", "model.lora_rank"), "only what LoRA leaves frozen can be quantized")
    if model.lora_rank and config.reference.sync_steps:
        keys = ("model.lora_rank", "reference.sync_steps")
        yield Broken(keys, "with LoRA the reference is the model without its overlay, and stays so; set it to 0")
    if critic.freeze_trunk and not need_critic(config):
        yield Broken(("critic.freeze_trunk", "critic.enable", "algorithm.estimator"), "there is no critic")
    if critic.freeze_trunk and critic.path:
        yield Broken(("critic.freeze_trunk", "critic.path"), "a frozen trunk is the actor's; leave the path empty")


def _groups(config: Config) -> Iterator[Broken]:
    algorithm, data, buffer = config.algorithm, config.data, config.reward.overlong_buffer
    if algorithm.filter_groups.enable and config.rollout.n < 2:
        yield Broken(
            ("algorithm.filter_groups.enable", "rollout.n"), "one response has no spread: n must be at least 2"
        )
    for key, on in (
        ("algorithm.filter_groups.enable", algorithm.filter_groups.enable),
        ("data.curriculum.sampler", data.curriculum.sampler != "uniform"),
    ):
        if on and config.trainer.epochs:
            yield Broken(
                (key, "trainer.epochs"), "prompts are not drawn once an epoch then; count trainer.steps instead"
            )
    yield from _metrics(config)
    if data.curriculum.sampler != "uniform" and data.weights:
        keys = ("data.curriculum.sampler", "data.weights")
        yield Broken(keys, "both say how often a prompt is drawn; leave one of them out")
    if buffer.enable and buffer.len > config.rollout.response_length:
        keys = ("reward.overlong_buffer.len", "rollout.response_length")
        yield Broken(keys, "the buffer is the end of a response's frame and cannot be longer than that")
    if buffer.enable:
        try:
            entry, _ = chosen_estimator(config)
        except UserError:
            return  # `_estimator` says so
        if "scores" in entry.needs:
            keys = ("reward.overlong_buffer.enable", "algorithm.estimator")
            yield Broken(keys, "this estimator reads the scores and not the rewards, which alone are shaped")


def _metrics(config: Config) -> Iterator[Broken]:
    """The metrics by which prompts are chosen; what stands beside a score is known once there is a response."""
    groups, curriculum = config.algorithm.filter_groups, config.data.curriculum
    asked = {}
    if groups.enable:
        asked["algorithm.filter_groups.metric"] = groups.metric
    if curriculum.sampler != "uniform":
        asked["data.curriculum.metric"] = curriculum.metric
    try:
        names = [*(make_rewards(config.reward.functions).names if config.reward.functions else ())]
    except UserError:
        return  # `_rewards` says so
    names += [REWARD_MODEL] if config.reward.model.path else []
    for key, metric in asked.items():
        name = metric.partition("/")[0]
        if metric != "score" and name not in names:
            near = nearest(name, ["score", *names])
            text = f"score, a reward's name, or NAME/KEY of what it returns; there is no reward {name!r}; {near}"
            yield Broken((key,), text)


def _conversation(config: Config) -> Iterator[Broken]:
    rollout, settings = config.rollout, config.rollout.multi_turn
    if settings.environment:
        try:
            environments.resolve(settings.environment)
        except UserError as error:
            yield Broken(("rollout.multi_turn.environment",), str(error))
        if settings.max_observation_length >= rollout.response_length:
            keys = ("rollout.multi_turn.max_observation_length", "rollout.response_length")
            yield Broken(keys, "an observation would fill the frame that the turns share with it")
        if rollout.ignore_eos and not rollout.stop and not rollout.stop_token_ids:
            keys = ("rollout.multi_turn.environment", "rollout.ignore_eos")
            yield Broken(keys, "no turn would ever end")
    if config.data.train_batch_size % rollout.parts:
        yield Broken(("rollout.parts", "data.train_batch_size"), "the parts of the prompts must be equal")


def _reference(config: Config) -> Iterator[Broken]:
    reference = config.reference
    if reference.sync_steps and not need_reference(config):
        keys = ("reference.sync_steps", "algorithm.use_kl_in_reward", "actor.use_kl_loss")
        yield Broken(keys, "without KL in the reward or in the loss there is no reference to move; set it to 0")
    if reference.sync_alpha != 1 and not reference.sync_steps:
        keys = ("reference.sync_alpha", "reference.sync_steps")
        yield Broken(keys, "says how far the reference is moved, and it never is; set sync_steps as well")


def _schedules(config: Config) -> Iterator[Broken]:
    for name, optimizer in (("optimizer", config.optimizer), ("critic.optimizer", config.critic.optimizer)):
        if 0 < optimizer.decay_steps <= optimizer.warmup_steps:
            keys = (f"{name}.decay_steps", f"{name}.warmup_steps")
            yield Broken(keys, "the decay includes the warm-up and must be longer; 0 means the whole run")


def _run(config: Config) -> Iterator[Broken]:
    if not config.trainer.steps and not config.trainer.epochs:
        yield Broken(("trainer.steps", "trainer.epochs"), "one of them must be above 0")


def _mesh(config: Config) -> Iterator[Broken]:
    axes = ("data", "fsdp", "tensor")
    if sum(getattr(config.mesh, axis) == -1 for axis in axes) > 1:
        yield Broken(tuple(f"mesh.{axis}" for axis in axes), "at most one axis can take what is left (-1)")

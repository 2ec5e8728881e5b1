"""From a config to what a run is made of: tokenizer, models with their parameters on the mesh, stop rules, prompts,
rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.config import Config, Rollout, check_devices, need_base, need_critic, need_reference
from jaxrl_llm.data import PromptData
from jaxrl_llm.errors import UserError, naming
from jaxrl_llm.models import classifier, hf
from jaxrl_llm.models.declare import SCORE, VALUE_HEAD, init_declared
from jaxrl_llm.models.fused_attention import choose
from jaxrl_llm.models.lora import join
from jaxrl_llm.models.transformer import TransformerConfig, init_params, make_transformer
from jaxrl_llm.rewards import RewardSet, make_rewards
from jaxrl_llm.roles import check_same_computation, check_vocabulary
from jaxrl_llm.sharding import Layout, abstract, make_mesh, put
from jaxrl_llm.steps.phases import Program, make_program
from jaxrl_llm.steps.rollout import StopRules
from jaxrl_llm.steps.step import init_key
from jaxrl_llm.steps.training import Training, beneath, declare_frozen, frozen, merged, overlay
from jaxrl_llm.tokenizer import load_tokenizer, stop_automaton, token_bytes
from jaxrl_llm.types import Array, Model, Params, RunState, TrainState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What is checked before any model is loaded: prompts, rewards, and the tokenizer that joins them to ids."""

    folder: Path  # of the actor
    tokenizer: PreTrainedTokenizerFast
    rewards: RewardSet
    train: PromptData | None
    held_out: PromptData | None


def load_inputs(
    config: Config, *, train: bool = True, check: Callable[[str, Mapping[str, Any]], object] | None = None
) -> Inputs:
    """Opens every source, tokenizes every prompt and resolves every reward.

    Args:
      train: False leaves the training prompts out.
      check: told ("train" or "eval", record) of every record; one that it raises a UserError on is a bad record.

    Raises:
      UserError: whatever is wrong with one of them.
    """
    with naming("config.model.path"):
        folder = hf.find_folder(config.model.path)
    tokenizer = load_tokenizer(folder)
    given = config.reward
    rewards = RewardSet(())  # until a reward model comes in
    if given.functions:
        rewards = make_rewards(given.functions, given.weights, given.data_sources)

    def prompts(key: str, sources: Sequence[str], limit: int = 0) -> PromptData:
        data = config.data
        found = PromptData(
            sources,
            tokenizer,
            prompt_length=config.rollout.prompt_length,
            response_length=config.rollout.response_length,
            seed=config.seed,
            shuffle=data.shuffle,
            weights=data.weights if sources is data.train else (),
            prompt_key=data.prompt_key,
            prompt_template=data.prompt_template,
            chat_template=data.chat_template,
            system_prompt=data.system_prompt or None,
            template_kwargs=data.template_kwargs,
            too_long=data.too_long,
            on_bad_record=data.on_bad_record,
            source_kwargs=data.source_kwargs,
            record_arrays=rewards.record_arrays,
            limit=limit,
            named=key == "data.eval",
            check=partial(check, key.removeprefix("data.")) if check else None,
            config_key=f"config.{key}",
        )
        if given.functions and not given.model.path:  # which scores them all
            found.each(lambda record: rewards.check([record]))
        return found

    return Inputs(
        folder=folder,
        tokenizer=tokenizer,
        rewards=rewards,
        train=prompts("data.train", config.data.train) if train else None,
        held_out=prompts("data.eval", config.data.eval, config.eval.max_prompts) if config.data.eval else None,
    )


def stop_rules(
    rollout: Rollout, tokenizer: PreTrainedTokenizerFast, eos_ids: Sequence[int], vocab_size: int
) -> StopRules:
    """What ends a response: the model's end tokens (unless ignored), stop token ids, stop strings."""
    ids = [*(() if rollout.ignore_eos else eos_ids), *rollout.stop_token_ids] or [-1]
    pieces = token_bytes(tokenizer) if rollout.stop else []
    strings = stop_automaton(pieces, rollout.stop, vocab_size)
    return StopRules(
        ids=jnp.asarray(ids, jnp.int32), strings=jnp.asarray(strings), min_new_tokens=jnp.int32(rollout.min_new_tokens)
    )


def make_layout(config: Config) -> Layout:
    """The layout on all devices.

    Raises:
      UserError: the mesh does not fit them, or a batch does not divide over it.
    """
    sizes = check_devices(config, jax.device_count())
    mesh = make_mesh(data=sizes["data"], fsdp=sizes["fsdp"], tensor=sizes["tensor"])
    return Layout(mesh, sequence_parallel=config.model.sequence_parallel)


def make_models(config: Config, inputs: Inputs, layout: Layout) -> tuple[Model, Model | None]:
    """Actor and critic (None where the config has none), without parameters.

    Raises:
      UserError: a model is too small for the tokenizer's ids or for the lengths of prompts and responses.
    """

    def model(folder: Path, value_head: bool) -> Model:
        shape = _shape(config, inputs, folder)
        if not value_head and hf.is_classifier(hf.read_config(folder)):
            raise UserError(
                f"{folder}: no language model, but a sequence classifier (a reward model is given as "
                "config.reward.model.path)"
            )
        return _transformer(config, shape, layout, value_head=value_head)

    for role, needed in (("critic", need_critic(config)), ("reference", need_reference(config))):
        if needed and (path := getattr(config, role).path):
            with naming(f"config.{role}.path"):
                check_vocabulary(folder := hf.find_folder(path), inputs.folder, inputs.tokenizer)
                if role == "reference":  # which is the actor's program with other parameters
                    check_same_computation(folder, inputs.folder)
    critic = model(_folder(config.critic.path, inputs), True) if need_critic(config) else None
    return model(inputs.folder, False), critic


def make_reward_model(config: Config, inputs: Inputs, layout: Layout) -> Model:
    """The model of `model.path` with a reward model's head, to be trained, without parameters.

    Raises:
      UserError: as `make_models`; or the folder is a sequence classifier with another number of labels than one.
    """
    if hf.is_classifier(hf.read_config(inputs.folder)):
        with naming("config.model.path"):
            classifier.check_reward_model(inputs.folder)
    model = _transformer(config, _shape(config, inputs, inputs.folder), layout, score_head=True)
    declare, dtype = model.declare, jnp.dtype(config.model.param_dtype)

    def with_trained_head() -> Params:
        declared = declare()
        return declared | {SCORE: dataclasses.replace(declared[SCORE], dtype=dtype)}

    return dataclasses.replace(model, declare=with_trained_head)


def _transformer(config: Config, shape: TransformerConfig, layout: Layout, **head: bool) -> Model:
    m = config.model
    # What is never updated, beneath LoRA, needs no more digits than it is computed with.
    never_updated = m.lora_rank > 0 and not head.get("value_head")
    return make_transformer(
        dataclasses.replace(shape, lora_scale=m.lora_alpha / m.lora_rank if m.lora_rank else 1.0),
        param_dtype=jnp.dtype(m.dtype if never_updated else m.param_dtype),
        compute_dtype=jnp.dtype(m.dtype),
        remat=m.remat,
        constrain=layout.constrain,
        attention=choose(m.attention, shape, m.dtype, scanned=m.scan_layers, where=layout),
        **head,
    )


def _shape(config: Config, inputs: Inputs, folder: Path) -> TransformerConfig:
    """
    Raises:
      UserError: the model is too small for the tokenizer's ids or for the lengths of prompts and responses.
    """
    shape = hf.read_shape(folder)
    # Rows of the embedding past the tokenizer's vocabulary are padding: never sampled, never counted.
    known_ids = max(inputs.tokenizer.get_vocab().values()) + 1
    sampled = min(hf.read_shape(inputs.folder).vocab_size, known_ids) - 1  # the largest id that the actor may draw
    if (largest := max(_largest_id(config, inputs), sampled if folder != inputs.folder else 0)) >= shape.vocab_size:
        raise UserError(f"{folder}: the embedding has {shape.vocab_size} rows, and token id {largest} is in use")
    length = config.rollout.prompt_length + config.rollout.response_length
    if length > shape.max_positions:
        raise UserError(
            f"config.rollout.prompt_length + config.rollout.response_length = {length}: {folder} has "
            f"{shape.max_positions} positions (max_position_embeddings)"
        )
    return dataclasses.replace(shape, real_vocab_size=min(shape.vocab_size, known_ids))


def _largest_id(config: Config, inputs: Inputs) -> int:
    """Of the prompts, the end tokens and the stop tokens."""
    prompts = (data.largest_id for data in (inputs.train, inputs.held_out) if data is not None)
    return max(*hf.read_eos_ids(inputs.folder), *config.rollout.stop_token_ids, *prompts, 0)


def _folder(path: str, inputs: Inputs) -> Path:
    return hf.find_folder(path) if path else inputs.folder


def load_model_params(folder: Path, model: Model, layout: Layout, key: Array) -> Params:
    """A folder's parameters, put on the mesh leaf by leaf; a value head, which no folder has, starts from the key, and
    so does a reward model's head where the folder is a language model's. A critic that is made of a reward model starts
    from its head (Ouyang et al. 2022, https://arxiv.org/abs/2203.02155).

    Raises:
      UserError: naming the tensors that are missing, unknown or of another shape.
    """
    declaration, of_classifier = model.declare(), hf.is_classifier(hf.read_config(folder))
    head = declaration.get(VALUE_HEAD) if of_classifier else None
    if head:
        classifier.check_reward_model(folder)
        kernel = dataclasses.replace(head["kernel"], shape=(1, *head["kernel"].shape), axes=(None, None))
        declaration = {name: x for name, x in declaration.items() if name != VALUE_HEAD} | {SCORE: kernel}
    fresh = {SCORE} & set(declaration) if not of_classifier else ()
    shardings = {
        jax.tree_util.keystr(path, simple=True, separator="/"): sharding
        for path, sharding in jax.tree.flatten_with_path(layout.params(declaration))[0]
    }

    def place(path: str, array: np.ndarray) -> Any:
        return put(array, shardings[path])

    params = hf.load_params(folder, declaration, place=place, key=key, fresh=fresh)
    if head:
        bias = layout.put_whole(np.zeros((), head["bias"].dtype))
        params[VALUE_HEAD] = {"kernel": params.pop(SCORE)[0], "bias": bias}
    return params


def build_program(config: Config, inputs: Inputs, layout: Layout, total_steps: int) -> Program:
    """The phases of the config for the models it names."""
    actor, critic = make_models(config, inputs, layout)
    eos_ids = hf.read_eos_ids(inputs.folder)
    stops = stop_rules(config.rollout, inputs.tokenizer, eos_ids, actor.vocab_size)
    return make_program(
        config,
        actor,
        critic,
        layout=layout,
        stops=layout.put_whole(stops),
        total_steps=total_steps,
        reward_names=inputs.rewards.names,
    )


def initial_state(program: Program, inputs: Inputs) -> RunState:
    """The state before the first step: every role's parameters from its folder, on the mesh."""
    config, layout = program.config, program.layout
    keys = [init_key(config.seed, role) for role in range(3)]
    actor, _ = policy_params(config, program.actor_model, layout, inputs.folder)
    critic, reference = None, None
    if program.critic and program.critic.frozen:
        declared = program.critic.declare()
        critic = jax.jit(lambda key: init_declared(declared, key), out_shardings=layout.params(declared))(keys[1])
    elif program.critic_model is not None:
        critic = load_model_params(_folder(config.critic.path, inputs), program.critic_model, layout, keys[1])
    if need_reference(config) and config.reference.path:
        reference = load_model_params(hf.find_folder(config.reference.path), program.actor_model, layout, keys[2])
    # Not donated: a leaf that is only passed on would then be handed back as the very same buffer, twice owned.
    init = jax.jit(program.init, out_shardings=state_shardings(program))
    return init(actor, critic, reference, init_key(config.seed, 3))


def frozen_base(program: Program, inputs: Inputs) -> Params | None:
    """The actor's folder, frozen, if a role's parameters lie over it."""
    if not need_base(program.config):
        return None
    params, _ = policy_params(program.config, program.actor_model, program.layout, inputs.folder)
    shardings = program.layout.params(declare_frozen(program.config, program.actor_model))
    return jax.jit(partial(frozen, program.config), out_shardings=shardings)(params)


def policy_params(
    config: Config, model: Model, layout: Layout, folder: Path, run: str | Path | None = None, step: int | None = None
) -> tuple[Params, int]:
    """The policy's parameters on the mesh, a LoRA overlay merged, and the step that they are of.

    Args:
      folder: of the model.
      run: a run's folder, whose checkpoint is read; None is where a run begins: the model's folder, or fresh
        parameters (`model.fresh`).
      step: of the checkpoint; None is the newest.

    Raises:
      UserError, StorageError: naming what is missing or does not fit.
    """
    if run is not None:
        params, step = trained_params(config, model, layout, run, step)
        if config.model.lora_rank:
            base, _ = policy_params(config, model, layout, folder)
            params = jax.jit(partial(merged, config))(join(params, beneath(base)))
        return params, step
    key = init_key(config.seed, 0)
    if config.model.fresh:
        return jax.jit(lambda key: init_params(model, key), out_shardings=layout.params(model.declare()))(key), 0
    return load_model_params(folder, model, layout, key), 0


def ordinary_policy(program: Program, inputs: Inputs, state: RunState) -> Params:
    """The policy of a state as an ordinary model's parameters: a LoRA overlay merged into the folder's own weights,
    which are read again where the frozen ones are quantized."""
    config = program.config
    if not config.model.lora_rank:
        return state.actor.params
    base = state.base
    if config.model.quantize_base != "none":
        base, _ = policy_params(config, program.actor_model, program.layout, inputs.folder)
    return jax.jit(partial(merged, config))(join(state.actor.params, beneath(base)))


def trained_params(
    config: Config, model: Model, layout: Layout, run: str | Path, step: int | None = None
) -> tuple[Params, int]:
    """What a run trains of its actor, all parameters or a LoRA overlay, from a checkpoint, whose step is returned too.

    Args:
      step: None is the newest.

    Raises:
      UserError: the run's model is a reward model, and `model` is none.
      StorageError: naming what is missing or does not fit.
    """
    declared = overlay(config, model.declare()) if config.model.lora_rank else model.declare()
    checkpoints = Checkpoints(Path(run) / "checkpoints")
    step = checkpoints.latest_step() if step is None else step
    if step is not None and SCORE not in model.declare() and holds_reward_model(run, step):
        raise UserError(f"{run}: is a run of jaxrl_llm.reward_model, whose model writes no text; export it instead")
    shapes = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        abstract(declared),
        layout.params(declared),
    )
    state, _ = checkpoints.restore({"actor": {"params": shapes}}, step, partial=True)
    return state["actor"]["params"], step or 0


def holds_reward_model(run: str | Path, step: int | None = None) -> bool:
    """Whether a run's checkpoint (None: the newest) is of a reward model.

    Raises:
      StorageError: there is none.
    """
    checkpoints = Checkpoints(Path(run) / "checkpoints")
    step = checkpoints.latest_step() if step is None else step
    return step is not None and f"actor.params.{SCORE}" in checkpoints.leaves(step)


def state_shardings(program: Program) -> RunState:
    """The sharding of every leaf of a program's state."""
    layout = program.layout
    whole: Any = layout.replicated  # a sharding stands where the state has an array

    def trained(training: Training) -> TrainState:
        declaration = training.declare()
        moments = layout.optimizer(training.optimizer, declaration)
        return TrainState(params=layout.params(declaration), opt_state=moments, updates=whole, skipped=whole)

    actor = layout.params(program.actor_model.declare())
    return RunState(
        actor=trained(program.actor),
        critic=trained(program.critic) if program.critic else None,
        reference=actor if program.ref and not program.reference_is_base else None,
        kl_coef=whole,
        step=whole,
        base=layout.params(declare_frozen(program.config, program.actor_model)) if need_base(program.config) else None,
    )


def abstract_state(program: Program) -> RunState:
    """The shapes, dtypes and shardings of a program's state, but for what is frozen."""
    actor = abstract(program.actor_model.declare())
    critic = abstract(program.critic.declare()) if program.critic else None
    shapes = jax.eval_shape(program.init, actor, critic, None).replace(base=None)
    shardings = state_shardings(program).replace(base=None)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, shardings
    )

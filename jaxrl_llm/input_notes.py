"""What a run says of its inputs before the first step."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.config import Config, notices
from jaxrl_llm.costs import Mesh, held_bytes, leaves
from jaxrl_llm.data import PromptData
from jaxrl_llm.loading import Inputs
from jaxrl_llm.models.cache import KVCache
from jaxrl_llm.models.lora import count
from jaxrl_llm.repeats import repeat_notices
from jaxrl_llm.steps.phases import Program
from jaxrl_llm.types import RunState


def input_notes(config: Config, inputs: Inputs, program: Program, state: RunState) -> tuple[list[str], list[str]]:
    """What should be known even where nobody reads notes, and what else there is to say."""
    train, held_out = inputs.train, inputs.held_out
    assert train is not None
    sources = [data for data in (train, held_out) if data]
    warned = [*notices(config), *(notice for data in sources for notice in data.skip_notices())]
    found = [notice for data in sources for notice in data.notices()]
    told = [f"notice: {notice}" for notice in [*found, *repeat_notices(train, held_out), *mesh_notices(program)]]
    if program.actor.frozen:
        trained, whole = count(state.actor.params), count(state.base)
        told.append(f"LoRA: {trained:,} parameters are trained, {whole:,} are frozen")
    evaluated = f", {_size(held_out)} to evaluate on" if held_out else ""
    told.append(f"{_size(train)} prompts of at most {train.longest} tokens{evaluated}")
    return warned, told


def mesh_notices(program: Program) -> list[str]:
    """What a mesh makes of settings that are harmless on one device."""
    config, mesh = program.config, Mesh(**program.layout.mesh.shape)
    r, found = config.rollout, []
    if mesh.fsdp > 1 and config.model.scan_layers and not r.gather_params:
        declared, size = leaves(program.actor_model.declare()), jnp.dtype(config.model.dtype).itemsize
        cut = [leaf for leaf in declared if "embed" in leaf.axes and "vocab" not in leaf.axes]
        whole, part = (held_bytes(cut, mesh, size, gathered=gathered) / 1e6 for gathered in (True, False))
        found.append(
            f"config.rollout.gather_params = False: each of up to {r.response_length} tokens of a rollout gathers "
            f"{whole:,.1f} MB of kernels over mesh.fsdp = {mesh.fsdp}; True gathers them once a rollout, for "
            f"{whole - part:,.1f} MB more on every device"
        )
    heads = _kv_heads(program)
    if heads % mesh.tensor:
        found.append(
            f"config.mesh.tensor = {mesh.tensor}: does not divide the model's {heads} heads of keys and values, so "
            "that devices have parts of heads, and exchange them in every layer; it is exact, but slow"
        )
    if config.model.sequence_parallel and mesh.tensor == 1:
        found.append("config.model.sequence_parallel = True: changes nothing, since mesh.tensor = 1")
    return found


def _kv_heads(program: Program) -> int:
    """Heads of keys and values; 0 for a model of one's own with another kind of cache."""
    cache = jax.eval_shape(lambda: program.actor_model.init_cache(1, 1))
    return jax.tree.leaves(cache.k)[0].shape[-3] if isinstance(cache, KVCache) else 0


def _size(data: PromptData) -> str:
    return f"{len(data)}" + (f" ({data.dropped} more dropped as too long)" if data.dropped else "")

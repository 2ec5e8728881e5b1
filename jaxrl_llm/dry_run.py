"""`python -m jaxrl_llm.train --dry_run`: everything is checked and every phase compiled, from shapes alone. No weight
is read and nothing is written; what comes of it is what each device would hold, compute and exchange.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import hlo
from jaxrl_llm.collect import open_rewards, try_out
from jaxrl_llm.compile_log import CompileLog, Report
from jaxrl_llm.compiled import (
    AnySampler,
    Compiled,
    CompiledStep,
    CompiledTurns,
    compile_sampler,
    compile_step,
    sampler_programs,
    step_programs,
)
from jaxrl_llm.config import Config, need_base
from jaxrl_llm.evaluation import sampling_ways
from jaxrl_llm.input_notes import mesh_notices
from jaxrl_llm.loading import Inputs, abstract_state, build_program, load_inputs, make_layout
from jaxrl_llm.order import epoch_steps
from jaxrl_llm.reward_scorer import make_scorer
from jaxrl_llm.sharding import Layout, abstract
from jaxrl_llm.steps.phases import Program
from jaxrl_llm.steps.training import declare_frozen
from jaxrl_llm.types import Cache, Prompts, RunState
from jaxrl_llm.writers import check_loggers

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Phase:
    """What one compiled program needs of one device, in bytes, and what it does there."""

    name: str
    argument: int
    output: int
    alias: int  # of the output, what takes over the buffers of arguments
    temp: int
    peak: int  # with what of the run's state lies beside it
    dot_flops: float  # of matrix products, loops counted
    token_flops: float  # the same of one sampled token of every row
    xla_flops: float  # XLA's own count: everything, but a loop's body once; −1 where it gives none
    collectives: tuple[hlo.Collective, ...]


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What is known of a run before it has begun."""

    mesh: dict[str, int]
    held: dict[str, int]  # what lies on a device, in bytes, by what it is
    state: int  # of it, what is there from the first step to the last
    phases: tuple[Phase, ...]
    response_length: int

    @property
    def highest(self) -> Phase:
        """The phase with the peak."""
        return max(self.phases, key=lambda phase: phase.peak)

    def table(self, device_memory: float | None = None) -> str:
        """The figures as text.

        Args:
          device_memory: bytes of one device; None is what the device itself says, which a CPU does not.
        """
        of_device = device_memory or memory_of_device()
        lines = [f"one device of {mesh_text(self.mesh)}: memory in MB (10^6 bytes)"]
        lines += [f"  {name:<24}{size / 1e6:>12,.2f}" for name, size in self.held.items() if size]
        lines += [f"  {'state, all the time':<24}{self.state / 1e6:>12,.2f}", ""]
        head = ("phase", "arguments", "outputs", "temp", "peak", "GFLOP", "per token", "XLA's")
        lines.append(f"  {head[0]:<24}" + "".join(f"{column:>12}" for column in head[1:]))
        for p in self.phases:
            sizes = (p.argument, p.output - p.alias, p.temp, p.peak)
            figures = "".join(f"{size / 1e6:>12,.2f}" for size in sizes)
            figures += "".join(f"{flops / GB:>12,.3f}" for flops in (p.dot_flops, p.token_flops))
            figures += f"{p.xla_flops / GB:>12,.3f}" if p.xla_flops >= 0 else f"{'–':>12}"
            lines.append(f"  {p.name:<24}{figures}")
        lines.append(
            "  (outputs: new ones, not taken over from arguments; GFLOP: matrix products, loops counted, XLA's "
            "count has a loop's body once)"
        )
        lines += ["", *self._exchanges(), ""]
        peak = self.highest
        total = f"peak: {peak.peak / GB:.3f} GB, in {peak.name}"
        if of_device:
            share = peak.peak / of_device
            total += f", {share:.0%} of a device's {of_device / GB:.1f} GB" + ("" if share <= 1 else ": DOES NOT FIT")
        else:
            total += " (a device's memory is not known here: --device_memory GB)"
        return "\n".join([*lines, total])

    def _exchanges(self) -> Iterator[str]:
        """One line for each phase, kind and axes."""
        if all(not p.collectives for p in self.phases):
            yield "collectives: none"
            return
        yield "collectives: a device's bytes, whole arrays as they are after a gather or before a scatter, in MB"
        columns = ("phase", "kind", "along", "count", "in all", "largest")
        yield "  {:<24}{:<20}{:<18}{:>8}{:>12}{:>12}".format(*columns)
        for p in self.phases:
            sums: dict[tuple[str, str, bool], list[float]] = collections.defaultdict(lambda: [0, 0.0, 0.0])
            for c in p.collectives:
                found = sums[c.kind, "+".join(c.axes), c.per_token]
                found[0] += c.times
                found[1] += c.times * c.bytes
                found[2] = max(found[2], c.bytes)
            for (kind, axes, per_token), (count, total, most) in sorted(sums.items(), key=lambda item: -item[1][1]):
                what = f"{p.name}{', each token' if per_token else ''}"
                yield f"  {what:<24}{kind:<20}{axes:<18}{count:>8.0f}{total / 1e6:>12,.3f}{most / 1e6:>12,.3f}"
        if any(c.per_token for p in self.phases for c in p.collectives):
            yield f"  (each token: up to {self.response_length} times a rollout)"


def mesh_text(mesh: dict[str, int]) -> str:
    """
    >>> mesh_text({"data": 2, "fsdp": 4, "tensor": 1})
    'data=2 fsdp=4 tensor=1 (8 devices)'
    """
    count = int(np.prod(list(mesh.values())))
    return f"{' '.join(f'{axis}={size}' for axis, size in mesh.items())} ({count} device{'s' * (count > 1)})"


def memory_of_device() -> float | None:
    """Bytes that the first device can hold, if it says so."""
    found = jax.local_devices()[0].memory_stats()
    return float(found["bytes_limit"]) if found and found.get("bytes_limit") else None


def dry_run(config: Config, report: Callable[[str], object]) -> DryRun:
    """Checks everything that a run of `config` would check before it reads a model, and compiles its phases.

    Args:
      report: told what is being compiled.

    Raises:
      UserError: something in the config, the data, a reward or a model's folder is wrong.
    """
    check_loggers(config)
    inputs = load_inputs(config)
    try:
        inputs = open_rewards(config, inputs)
        layout = make_layout(config)
        scorer, inputs = make_scorer(config, inputs, layout)
        assert inputs.train is not None
        count = config.data.train_batch_size
        epochs = epoch_steps(len(inputs.train), count, config.trainer.epochs)
        program = build_program(config, inputs, layout, epochs if config.trainer.epochs else config.trainer.steps)
        try_out(inputs)
        for notice in mesh_notices(program):
            report(f"notice: {notice}")
        state = whole_state(program)
        prompts = _rows_like(layout, inputs.train.batch(0, count).prompts)
        rewards = {"weights": tuple(inputs.rewards.weights.tolist()), "jax_rewards": inputs.rewards.jax_functions}
        samplers = sampler_programs(config) * len(sampling_ways(config.eval)) if inputs.held_out else 0
        expected = step_programs(program) + samplers + (scorer is not None)
        with CompileLog(report, report, expected=expected) as log:
            step = compile_step(program, state, prompts, **rewards, report=log)
            programs = [*named_programs(step), *_evaluation(program, inputs, step.update_weights.out, log)]
            extra = {}
            if scorer:
                scorer.declare()
                scorer.compile(log)
                extra = {"reward model": shard_bytes(scorer.params)}
                programs.append(("reward_model", scorer.compiled))
        return examine(program, state, prompts, programs, view=step.update_weights.out, extra=extra)
    finally:
        inputs.rewards.close()


def whole_state(program: Program) -> RunState:
    """`abstract_state`, with what is frozen."""
    state = abstract_state(program)
    if not need_base(program.config):
        return state
    declared = declare_frozen(program.config, program.actor_model)
    base = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        abstract(declared),
        program.layout.params(declared),
    )
    return state.replace(base=base)


def _rows_like(layout: Layout, prompts: Prompts) -> Prompts:
    host = jax.tree.map(np.asarray, prompts)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.rows), host)


def _evaluation(program: Program, inputs: Inputs, view: Any, report: Report) -> Iterator[tuple[str, Compiled]]:
    if inputs.held_out is None:
        return
    settings = program.config.eval
    prompts = _rows_like(program.layout, next(inputs.held_out.eval_batches(settings.batch_size)).prompts)
    ways = sampling_ways(settings)
    for mode, n, sampling in ways:
        name = "testing" if len(ways) == 1 else f"testing, {mode}"
        made = compile_sampler(program, view, prompts, n=n, sampling=sampling, report=report, name=name)
        yield from _sampler(name, made)


def named_programs(step: CompiledStep) -> Iterator[tuple[str, Compiled]]:
    """The programs of a step, by phase: of those for packed lines that of padded rows, which is the largest."""
    for field in dataclasses.fields(step):
        if field.name in ("group", "packed"):
            continue
        phase = getattr(step, field.name)
        if isinstance(phase, AnySampler):
            yield from _sampler(field.name, phase)
        elif phase is not None:
            yield field.name, getattr(phase, "update", phase)


def _sampler(name: str, sampler: AnySampler) -> Iterator[tuple[str, Compiled]]:
    if not isinstance(sampler, CompiledTurns):
        yield name, sampler
        return
    for field in dataclasses.fields(sampler):
        yield f"{name}, {field.name}", getattr(sampler, field.name)


def shard_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays, or of their shapes with shardings, on one device."""
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def cache_bytes(program: Program, prompts: Prompts) -> tuple[int, int]:
    """Bytes of the rollout's cache on one device: the prompts' part, once for the responses to each, and the
    responses'. Rows are spread over data and fsdp, heads over tensor."""
    r, layout = program.config.rollout, program.layout
    groups = prompts.prompts.shape[0] // r.parts

    def cache() -> Cache:
        return program.actor_model.init_cache(groups, r.prompt_length).fork(r.n, r.response_length)

    made = jax.eval_shape(cache)
    parts = layout.batch_shards * layout.mesh.shape["tensor"]
    sizes = {name: getattr(made, name).size * getattr(made, name).dtype.itemsize for name in ("prompt_k", "k")}
    return 2 * sizes["prompt_k"] // parts, 2 * sizes["k"] // parts


def examine(
    program: Program,
    state: RunState,
    prompts: Prompts,
    programs: list[tuple[str, Compiled]],
    *,
    view: Any,
    extra: dict[str, int],
) -> DryRun:
    """What the compiled programs of a run say of one device.

    Args:
      state, prompts, view: abstract, with shardings.
      programs: by phase.
      extra: what else lies on a device from the first step to the last, in bytes.
    """
    prompt_cache, response_cache = cache_bytes(program, prompts)
    held: dict[str, int] = {}
    for role in ("actor", "critic"):
        trained, training = getattr(state, role), getattr(program, role)
        if trained is not None:
            held[f"{role}: parameters"] = shard_bytes(trained.params)
            held[f"{role}: gradients"] = shard_bytes(jax.tree.map(partial(_gradient, training), trained.params))
            held[f"{role}: moments"] = shard_bytes(trained.opt_state)
    held |= {"frozen base": shard_bytes(state.base), "reference": shard_bytes(state.reference), **extra}
    held |= {"sampler's view": shard_bytes(view), "cache: prompts": prompt_cache, "cache: responses": response_cache}
    whole = shard_bytes(state) + sum(extra.values())
    # What of the state is among a program's arguments, and is not to be counted twice.
    read: dict[str, Any] = {
        "update_weights": program.policy(state),
        "old_log_prob": program.policy(state),
        "ref": program.reference(state),
        "values": program.critic_params(state),
        "update_actor": (state.actor, program.actor.base(state)),
        "update_critic": (state.critic, program.critic.base(state)) if program.critic else None,
        "update_reference": (state.reference, state.actor.params),
    }
    mesh = dict(program.layout.mesh.shape)

    def phase(name: str, compiled: Compiled) -> Phase:
        executable: Any = compiled.executable
        m, text = executable.memory_analysis(), executable.as_text()
        argument, output, alias, temp = (
            int(getattr(m, f"{kind}_size_in_bytes", 0)) for kind in ("argument", "output", "alias", "temp")
        )
        own = extra.get("reward model", 0) if name == "reward_model" else shard_bytes(read.get(name))
        costs = executable.cost_analysis() or {}
        flops = hlo.dot_flops(text)
        return Phase(
            name=name,
            argument=argument,
            output=output,
            alias=alias,
            temp=temp,
            peak=whole + max(argument - own, 0) + output - alias + temp,
            dot_flops=flops[0],
            token_flops=flops[1],
            xla_flops=float(costs.get("flops", -1)),
            collectives=tuple(hlo.collectives(text, mesh)),
        )

    return DryRun(
        mesh=mesh,
        held=held,
        state=whole,
        phases=tuple(phase(*named) for named in programs),
        response_length=program.config.rollout.response_length,
    )


def _gradient(training: Any, leaf: Any) -> Any:
    """Gradients are in the parameters' dtype; their sum over micro-batches is in float32 at least."""
    dtype = jnp.promote_types(leaf.dtype, jnp.float32) if training.micro_batches > 1 else leaf.dtype
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

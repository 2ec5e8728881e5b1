"""What test_sharding.py asks of eight devices: `python -m tests.on_devices JOB FILE` pickles what a job finds.

It is a process of its own, since the number of CPU devices is fixed when jax starts. COORDINATOR COUNT INDEX behind
that makes it one of several, the first of which writes the file (test_processes.py).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.compiled import Compiled, CompiledStep, compile_step
from jaxrl_llm.loading import abstract_state, build_program, load_inputs, state_shardings
from jaxrl_llm.models.architecture import MoeConfig
from jaxrl_llm.models.transformer import init_params, make_transformer
from jaxrl_llm.peers import join_run
from jaxrl_llm.reward_scorer import RewardScorer
from jaxrl_llm.sharding import RULES, Layout, fetch, make_mesh, put
from jaxrl_llm.steps.phases import Program, gen, make_program
from jaxrl_llm.steps.rollout import Cascade, StopRules, no_stop_rules
from jaxrl_llm.steps.sampling import Sampling
from jaxrl_llm.steps.step import make_step, step_key
from jaxrl_llm.trainer import fit
from jaxrl_llm.types import Array, Batch, Model, Param, Params, Prompts, RunState
from tests import cut_tokens, fused_on_devices, quick, tiny, tiny_folder

DEVICES, STEPS, GROUPS = 8, 5, 16
SHAPE = dataclasses.replace(tiny.SHAPE, num_layers=1)  # one layer compiles in less time than two
FLAGS = " ".join([f"--xla_force_host_platform_device_count={DEVICES}", *quick.FLAGS])
MESHES: dict[str, Any] = {
    "data": {"data": 8, "fsdp": 1, "tensor": 1},
    "fsdp": {"data": 1, "fsdp": 8, "tensor": 1},
    "all": {"data": 2, "fsdp": 2, "tensor": 2},
    "tensor": {"data": 4, "fsdp": 1, "tensor": 2},
}
# What is replayed on which of them; all on all of them takes a minute more.
REPLAYED = {"grpo": ("fsdp", "all"), "ppo": ("data", "tensor")}
LONG = {"grpo": tuple(MESHES), "ppo": tuple(MESHES)}
# Without --long: each takes ten seconds, and the single run that it is compared with as much again.
QUICK: dict[str, tuple[str, ...]] = {"grpo": (), "ppo": ("all",)}
SAMPLED = ("all",)
LONG_JOBS = ("grpo", "experts", "sequence_parallel")  # a quarter of a minute each
IS_LONG = bool(os.environ.get("JAXRL_LLM_LONG_TESTS"))
PACKED: dict[str, Any] = {"model__use_remove_padding": True, "model__packed_widths": (0.99,)}
# Adam takes a whole step even where a gradient is nothing but rounding; a larger eps than usual keeps it from that.
OPTIMIZER = {"optimizer__lr": 3e-3, "optimizer__eps": 1e-4, "optimizer__schedule": "cosine"}


def case(name: str, shards: int) -> dict[str, Any]:
    """The config's overrides; what is counted per device is the same for all rows together, whatever the shards."""
    common = {
        "data__train_batch_size": GROUPS,
        "rollout__n": 2,
        "rollout__response_length": 16,
        "model__logprob_chunk": 128 // shards,
        **OPTIMIZER,
    }
    if name == "grpo":
        # A mini-batch of 4 prompts: fewer than 8 shards, so that responses must share less than all of their prompt.
        return common | {
            "rollout__temperature": 0.8,
            "model__scan_layers": False,
            "actor__use_kl_loss": True,
            "actor__kl_loss_coef": 0.1,
            "actor__entropy_coeff": 0.01,
            "actor__mini_batch_size": 4,
        }
    return common | {
        "algorithm__estimator": "gae",
        "algorithm__lam": 0.9,
        "algorithm__use_kl_in_reward": True,
        "algorithm__kl_ctrl__type": "adaptive",
        "actor__mini_batch_size": 8,
        "actor__epochs": 2,
        "actor__micro_batch_size": 8 // shards,
        "critic__mini_batch_size": 8,
        "critic__micro_batch_size": 8 // shards,
        "critic__optimizer__lr": 3e-3,
        "critic__optimizer__eps": 1e-4,
        "trainer__score_micro_batch_size": 16 // shards,
    }


def layout(mesh: str) -> Layout:
    return Layout(make_mesh(**MESHES[mesh])) if mesh in MESHES else Layout.single()


def program(name: str, mesh: str) -> Program:
    where = layout(mesh)
    config = tiny.config(**case(name, where.batch_shards), **PACKED)
    model = functools.partial(make_transformer, SHAPE, constrain=where.constrain)
    critic = model(value_head=True) if config.algorithm.estimator == "gae" else None
    made = make_program(config, model(), critic, layout=where, stops=where.put_whole(stops()))
    return packed(made) if where.mesh.shape["tensor"] > 1 else made


def packed(p: Program) -> Program:
    """The same, computed in packed lines."""

    def one(by_width: Any) -> Any:
        (found,) = by_width.values()
        return found

    scoring: dict[str, Any] = {name: one(by_width) for name, by_width in p.packed.items()}
    training: dict[str, Any] = {
        role: dataclasses.replace(found, update=one(found.packed))
        for role in ("actor", "critic")
        if (found := getattr(p, role)) is not None
    }
    return dataclasses.replace(p, **scoring, **training)


def stops() -> StopRules:
    return no_stop_rules(tiny.VOCAB).replace(ids=jnp.asarray([3, 5], jnp.int32))


# Recorded tokens, replayed


def replay(name: str) -> dict[str, Any]:
    """mesh -> the state, metrics and batch after each step, and what the compiled step costs.

    "single" samples its tokens, the meshes are given them; they are there as "tokens", and the first state as "first".
    """
    single, tokens = program(name, "single"), []
    first = start(single)
    sample = jax.jit(single.gen)

    def fresh(state: RunState, number: int) -> Batch:
        prompts = tiny.prompts(GROUPS, seed=number, first_uid=100 * number)
        batch = sample(state.actor.params, prompts, jax.random.key(number), single.stops)
        tokens.append(jax.tree.map(np.asarray, batch))
        return batch

    found: dict[str, Any] = {"single": run(single, first, fresh)}
    for mesh in (LONG if IS_LONG else QUICK)[name]:
        found[mesh] = run(program(name, mesh), first, lambda state, number: tokens[number])
    return found | {"tokens": tokens, "first": jax.tree.map(np.asarray, first)}


def replay_again(recorded: Path) -> dict[str, Any]:
    """case -> mesh -> as `replay`, of the tokens that it recorded in `recorded`'s folder."""
    found: dict[str, Any] = {}
    for name, meshes in REPLAYED.items():
        given = pickle.loads((recorded / name).read_bytes())
        for mesh in meshes:
            each = run(program(name, mesh), given["first"], lambda state, number, given=given: given["tokens"][number])
            found.setdefault(name, {})[mesh] = each
    return found


def start(p: Program) -> RunState:
    def fresh(model: Model, key: Array) -> Params:
        return jax.tree.map(lambda x: 6 * x if x.ndim > 2 else x, init_params(model, key))

    def state(keys: Array) -> RunState:
        return p.init(fresh(p.actor_model, keys[0]), fresh(p.critic_model, keys[1]) if p.critic_model else None)

    return jax.jit(state)(jax.random.split(jax.random.key(0)))


def run(p: Program, first: RunState, tokens: Callable[[RunState, int], Batch]) -> dict[str, Any]:
    """Steps of `make_step`, with what the rollout would have written given by `tokens`."""

    def step(state: RunState, recorded: Batch, number: Array) -> Any:
        given = dataclasses.replace(p, gen=lambda view, prompts, key, stops: recorded)
        return make_step(given, tiny.even_tokens)(state, None, step_key(0, number))  # type: ignore[arg-type]

    shardings = state_shardings(p), p.layout.replicated, p.layout.rows
    state, compiled, after = jax.tree.map(put, first, shardings[0]), None, []
    for number in range(STEPS):
        given = state, p.layout.put_rows(tokens(state, number)), np.int32(number)
        compiled = compiled or Compiled("step", step, *given, report=no_report, out_shardings=shardings)
        state, metrics, batch = compiled(*given)
        after.append(fetch((state, metrics, batch)))
    assert compiled is not None
    return {"after": after, **costs(compiled, p)}


# Fresh tokens


def sample() -> dict[str, Batch]:
    """mesh -> what the rollout samples in float64 (jax_enable_x64 is set)."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), tiny.params())
    kind, found = {"param_dtype": jnp.float64, "compute_dtype": jnp.float64}, {}
    for mesh in (*(["single"] if jax.process_count() == 1 else []), *(MESHES if IS_LONG else SAMPLED)):
        where = layout(mesh)
        model = tiny.model(constrain=where.constrain, **kind)

        def rollout(view: Params, prompts: Prompts, where: Layout = where, model: Model = model) -> Batch:
            sampling = Sampling(temperature=0.7, top_p=0.95)
            # Two widths of the cache and three numbers of rows.
            shapes = Cascade(width=4, min_rows=1, shards=where.batch_shards)
            how: dict[str, Any] = {"n": 4, "width": 12, "sampling": sampling, "cascade": shapes}
            return gen(model, where, view, prompts, step_key(0, 1), stops(), **how)

        view = jax.tree.map(put, params, where.params(model.declare()))
        batch = jax.jit(rollout, out_shardings=where.rows)(view, where.put_rows(tiny.prompts(GROUPS)))
        found[mesh] = fetch(batch)
    return found


# The trainer


def train() -> dict[str, Any]:
    """Two steps of a run, evaluated, on the mesh of all three axes; what each phase costs there and on one device."""
    mesh = {f"mesh__{axis}": size for axis, size in MESHES["all"].items()}
    overrides = case("ppo", layout("all").batch_shards) | mesh | {"trainer__steps": 2, "eval__batch_size": 8}
    with fit(tiny_folder.config(**overrides)) as live:
        first, p = live._state, live._program
        steps = list(live)
        found = {
            "metrics": [metrics for metrics, _ in steps],
            "state": shard_shapes(live._state),
            "declared": shard_shapes(abstract_state(p)),
            "batch": shard_shapes(steps[-1][1]),
            "donated": [x.is_deleted() for x in jax.tree.leaves((first.actor, first.critic))],
            "kept": [x.is_deleted() for x in jax.tree.leaves(first.reference)],
            "phases": {name: costs(c, p) for name, c in phases(live._phases)},
            "layout": placed(p.layout),
        }
    single = tiny_folder.config(**case("ppo", 1))
    inputs = load_inputs(single)
    p = build_program(single, inputs, Layout.single(), 2)
    assert inputs.train is not None
    prompts = jax.tree.map(np.asarray, inputs.train.batch(0, GROUPS).prompts)
    abstract_prompts = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=p.layout.rows), prompts)
    alone = compile_step(p, abstract_state(p), abstract_prompts, weights=(1.0,), jax_rewards={}, report=no_report)
    return found | {"single": {name: costs(c, p) for name, c in phases(alone)}, "scored": scored()}


def scored() -> dict[str, Any]:
    """mesh -> what a reward model says of twelve responses, of which eight devices take some each and the rest is
    filled up; and where its parameters lie."""
    found, pairs = {}, tiny_folder.pairs(count=12)
    for mesh in ("single", "all"):
        scorer = RewardScorer(tiny_folder.config(reward__model__path=str(tiny_folder.reward_folder())), layout(mesh))
        scorer.load()
        scorer.compile(no_report)
        rows = scorer([""] * len(pairs), [pair["chosen"] for pair in pairs], pairs)
        found[mesh] = {"scores": [row["score"] for row in rows], "placed": shard_shapes(scorer.params)}
    return found


# Experts


def experts() -> dict[str, dict[str, Any]]:
    """mesh -> loss, gradients and FLOPs of one device for a mixture of experts: of many tokens, and of few."""
    shape, found = dataclasses.replace(SHAPE, moe=MoeConfig(num_experts=16, per_token=2, width=32, normalized=True)), {}
    params = jax.tree.map(lambda x: 6 * x if x.ndim > 2 else x, init_params(make_transformer(shape), jax.random.key(0)))
    for mesh in ("single", *MESHES):
        where = layout(mesh)
        model = make_transformer(shape, constrain=where.constrain)

        def loss(params: Params, tokens: Array, model: Model = model) -> Array:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
            hidden, _ = model.forward(params, tokens, positions, jnp.ones_like(tokens))
            return jax.nn.logsumexp(model.heads["logits"](params, hidden), -1).mean()

        shardings = where.params(model.declare())
        given = jax.device_put(params, shardings)
        graded = jax.jit(jax.value_and_grad(loss), out_shardings=(where.replicated, shardings))
        for name, length in (("many", 32), ("few", 2)):
            tokens = where.put_rows(np.random.default_rng(0).integers(0, tiny.VOCAB, (16, length), np.int32))
            compiled: Any = graded.lower(given, tokens).compile()
            result = jax.tree.map(np.asarray, compiled(given, tokens))
            found.setdefault(name, {})[mesh] = {"result": result, "flops": compiled.cost_analysis()["flops"]}
    return found


def placed(where: Layout) -> dict[str, Any]:
    """Which rows `put_rows` gives to how many devices; the shapes, whole and in part, of what is constrained."""

    def shapes(function: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        x = jax.jit(function)(np.zeros((8, 4, 6)))
        return x.shape, x.sharding.shard_shape(x.shape)

    put = where.put_rows({"rows": np.arange(8)})["rows"]
    return {
        "devices": collections.Counter(tuple(shard.data.tolist()) for shard in put.addressable_shards),
        "constrained": shapes(lambda x: where.constrain(x, ("batch", None, "heads"))),
        "constrained_rows": shapes(where.constrain_rows),
    }


def phases(step: CompiledStep) -> Iterable[tuple[str, Compiled]]:
    """Those that do work."""
    for field in dataclasses.fields(step):
        phase = getattr(step, field.name)
        if field.name not in ("update_weights", "reward", "group", "packed") and phase is not None:
            yield field.name, getattr(phase, "update", phase)


def shard_shapes(tree: Any) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """path -> the leaf's shape, and that of one device's part."""
    leaves = jax.tree.flatten_with_path(tree)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (x.shape, x.sharding.shard_shape(x.shape))
        for path, x in leaves
    }


# What a compiled program does


def costs(compiled: Compiled, p: Program) -> dict[str, Any]:
    """FLOPs of one device, and the arrays that are gathered from several."""
    executable: Any = compiled.executable
    return {"flops": executable.cost_analysis()["flops"], "gathers": gathers(executable.as_text(), p)}


def gathers(text: str, p: Program) -> dict[str, int]:
    """Floating results of all-gathers, such as "f32[16,20,32]", but for parameters, which fsdp gathers by nature."""
    tensor = p.layout.mesh.shape["tensor"]
    parameters = set()
    for leaf in jax.tree.leaves(p.actor_model.declare(), is_leaf=lambda x: isinstance(x, Param)):
        parts = [tensor if RULES.get(axis or "") == "tensor" else 1 for axis in leaf.axes]
        cut = [size // count for size, count in zip(leaf.shape, parts, strict=True)]
        parameters |= {tuple(sorted(cut)), tuple(sorted(cut[1:]))}
    found: collections.Counter[str] = collections.Counter()
    for results in re.findall(r"= (.*?) all-gather(?:-start)?\(", text):
        for kind, dims in re.findall(r"(b?f\d+)\[([\d,]*)\]", results):
            shape = [int(n) for n in dims.split(",") if n not in ("", "1")]
            if tuple(sorted(shape)) not in parameters:
                found[f"{kind}[{dims}]"] += 1
    return dict(found)


def no_report(text: object) -> None:
    del text


JOBS = {
    "grpo": functools.partial(replay, "grpo"),
    "ppo": functools.partial(replay, "ppo"),
    "sample": sample,
    "experts": experts,
    "sequence_parallel": cut_tokens.sequence_parallel,
    "attention": fused_on_devices.attention,
    "train": train,
}


def main(job: str, file: str, *peers: str) -> None:
    if peers:
        join_run(peers[0], int(peers[1]), int(peers[2]))
    assert jax.device_count() == DEVICES, os.environ.get("XLA_FLAGS")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    found = replay_again(Path(file).parent) if job == "again" else JOBS[job]()
    if jax.process_index() == 0:
        Path(file).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

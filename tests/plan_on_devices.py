"""What test_plan.py asks of eight devices: `python -m tests.plan_on_devices FILE` pickles the examined programs of each
case. test_plan.py holds them against what costs.py and phase_costs.py say.

A process of its own, since the number of CPU devices is fixed when jax starts.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.compiled import compile_step
from jaxrl_llm.config import Config, need_critic
from jaxrl_llm.dry_run import DryRun, examine, named_programs, whole_state
from jaxrl_llm.models.architecture import MoeConfig, TransformerConfig
from jaxrl_llm.models.transformer import make_transformer
from jaxrl_llm.sharding import Layout, make_mesh
from jaxrl_llm.steps.phases import make_program
from tests import quick, tiny

DEVICES = 8
FLAGS = " ".join([f"--xla_force_host_platform_device_count={DEVICES}", *quick.FLAGS])
# No two sizes alike, and a vocabulary of several blocks of the sampler's (64 entries).
SHAPE = TransformerConfig(
    vocab_size=512, real_vocab_size=512, num_layers=2, width=48, num_heads=8, num_kv_heads=4, head_dim=8, mlp_width=80,
    max_positions=256, tie_embeddings=True,
)  # fmt: skip
UNTIED = dataclasses.replace(SHAPE, tie_embeddings=False, qkv_bias=True)
LENGTHS = {
    "data__train_batch_size": 16,
    "rollout__n": 2,
    "rollout__prompt_length": 24,
    "rollout__response_length": 12,
    "rollout__cascade__halvings": 0,  # one loop over tokens
}
GRPO = LENGTHS | {"actor__use_kl_loss": True, "actor__mini_batch_size": 8, "model__logprob_chunk": 8}
PPO = LENGTHS | {"algorithm__estimator": "gae", "algorithm__use_kl_in_reward": True}
MESHES = {
    "data": {"data": 8, "fsdp": 1, "tensor": 1},
    "fsdp": {"data": 1, "fsdp": 8, "tensor": 1},
    "tensor": {"data": 2, "fsdp": 1, "tensor": 4},
    "all": {"data": 2, "fsdp": 2, "tensor": 2},
}
GATHERED = {"rollout__gather_params": True}
UNROLLED = GRPO | {"model__scan_layers": False, "model__logprob_chunk": 64, "actor__use_kl_loss": False}
EXPERTS = dataclasses.replace(SHAPE, moe=MoeConfig(num_experts=16, per_token=2, width=24, normalized=True))
MICRO = GRPO | {"actor__micro_batch_size": 2, "trainer__score_micro_batch_size": 4, "actor__use_kl_loss": False}
# name -> shape, overrides, mesh
CASES: dict[str, tuple[TransformerConfig, dict[str, Any], str]] = {
    # No loop but that over tokens, so that XLA's own count of FLOPs says something.
    "unrolled": (
        SHAPE,
        GRPO | {"model__scan_layers": False, "model__logprob_chunk": 64, "actor__use_kl_loss": False},
        "data",
    ),
    "fsdp": (SHAPE, GRPO | {"model__remat": "full"}, "fsdp"),
    "tensor": (UNTIED, GRPO, "tensor"),
    # Lines of 46 tokens, which four devices do not divide.
    "length": (SHAPE, GRPO | {"model__remat": "full", "model__sequence_parallel": True}, "tensor"),
    "ppo": (SHAPE, PPO | {"model__remat": "dots"}, "all"),
    "micro": (UNTIED, MICRO, "all"),
    "experts": (EXPERTS, PPO | {"model__remat": "dots"}, "all"),
    "experts, fsdp": (EXPERTS, GRPO | {"model__remat": "full"}, "fsdp"),
    "experts, data": (EXPERTS, GRPO, "data"),
    "twice": (UNTIED, MICRO | {"data__train_batch_size": 32, "actor__mini_batch_size": 16} | GATHERED, "all"),
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was found of a case."""

    run: DryRun
    cache_is_there: bool  # whether the rollout's program has arrays of the cache's shape on a device


def case(name: str) -> tuple[Config, TransformerConfig, dict[str, int]]:
    shape, overrides, mesh = CASES[name]
    return tiny.config(**overrides), shape, MESHES[mesh]


def measure(config: Config, shape: TransformerConfig, mesh: dict[str, int]) -> Measured:
    devices = make_mesh(data=mesh["data"], fsdp=mesh["fsdp"], tensor=mesh["tensor"])
    layout = Layout(devices, sequence_parallel=config.model.sequence_parallel)
    model = partial(make_transformer, shape, constrain=layout.constrain, remat=config.model.remat)
    critic = model(value_head=True) if need_critic(config) else None
    program = make_program(config, model(), critic, layout=layout)
    state, groups, r = whole_state(program), config.data.train_batch_size, config.rollout
    prompts = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.rows),
        jax.tree.map(np.asarray, tiny.prompts(groups, r.prompt_length)),
    )
    step = compile_step(program, state, prompts, weights=(1.0,), jax_rewards={}, report=lambda text: None)
    programs = list(named_programs(step))
    shards, heads = layout.batch_shards, f"{shape.num_kv_heads // mesh['tensor']},{shape.head_dim}"
    layers = f"{shape.num_layers}," if config.model.scan_layers else ""  # or each layer's by themselves
    shapes = [  # of keys, whose slots come last
        f"f32[{layers}{groups // shards},{heads},{r.prompt_length}]",
        f"f32[{layers}{groups * r.n // shards},{heads},{r.response_length}]",
    ]
    text = dict(programs)["gen"].executable.as_text() or ""
    there = all(wanted in text for wanted in shapes)
    return Measured(examine(program, state, prompts, programs, view=step.update_weights.out, extra={}), there)


def main(file: str, *names: str) -> None:
    assert jax.device_count() == DEVICES, os.environ.get("XLA_FLAGS")
    found = {name: measure(*case(name)) for name in names or CASES}
    Path(file).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    from tests import plan_on_devices  # what is pickled belongs to this module, not to __main__

    plan_on_devices.main(*sys.argv[1:])

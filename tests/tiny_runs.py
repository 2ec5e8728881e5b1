"""Two runs that several tests look at: GRPO and PPO on the tiny folder, four steps each."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.compiled import Compiled
from jaxrl_llm.config import Config, to_json
from jaxrl_llm.loading import load_inputs, make_layout, make_models, policy_params
from jaxrl_llm.trainer import Run, fit
from jaxrl_llm.types import Params, RunState
from jaxrl_llm.writers import read_jsonl
from tests import tiny_folder

GRPO = {
    "reward__functions": ("tests.tiny_folder:digits", "tests.tiny_folder:brief"),
    "reward__weights": (1.0, 0.5),
    **tiny_folder.KL_LOSS,
}
PPO = {
    "algorithm__estimator": "gae",
    "algorithm__gamma": 0.97,
    "algorithm__lam": 0.9,
    "algorithm__use_kl_in_reward": True,
    "algorithm__kl_ctrl__type": "adaptive",
    "algorithm__kl_ctrl__kl_coef": 0.1,
    "algorithm__kl_ctrl__target_kl": 0.02,
    "algorithm__kl_ctrl__horizon": 100,
    "actor__loss_agg_mode": "seq-mean-token-mean",
    "critic__mini_batch_size": 2,
    "critic__epochs": 2,
    "reference__sync_steps": 3,
    "reference__sync_alpha": 0.25,
}
QUIET = {"data__eval": (), "eval__interval": 0, "trainer__save_interval": 0}
COMPILED = "/jax/core/compile/backend_compile_duration"
Rows = list[dict[str, Any]]


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The events of everything that is compiled in this context, or read back compiled, as they come."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        del duration_secs, kwargs
        if event == COMPILED:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def calls(tell: Callable[[str], None]) -> Iterator[None]:
    """Tells the name of each compiled program that is called in this context."""
    plain = Compiled.__call__

    def told(self: Compiled, *args: Any) -> Any:
        tell(self.name)
        return plain(self, *args)

    Compiled.__call__ = told
    try:
        yield
    finally:
        Compiled.__call__ = plain


@dataclasses.dataclass
class Watched:
    """What happened in a run."""

    config: Config
    folder: Path
    killed: Path  # the folder as it was after the third step, with a line cut short
    metrics: list[dict[str, float]]  # as yielded
    states: list[RunState]  # before the first step, and after each
    compiled: int  # while the steps ran
    ran: set[tuple[str, str]]  # (program, phase) of all that ran on devices

    def lines(self) -> Rows:
        return read_jsonl(self.folder / "metrics.jsonl")

    def rollouts(self, step: int) -> Rows:
        return read_jsonl(self.folder / "rollouts" / f"{step}.jsonl")


@functools.cache
def grpo() -> Watched:
    return _watch("grpo", tiny_folder.config(**GRPO))


@functools.cache
def ppo() -> Watched:
    return _watch("ppo", tiny_folder.config(**PPO))


def _watch(name: str, config: Config) -> Watched:
    folder = tiny_folder.session_folder() / "runs" / name
    watched = Watched(config, folder, folder.with_name(f"{name}-killed"), [], [], 0, set())
    with fit(config, folder) as run, calls(lambda name: watched.ran.add((name, run._timers.phase))):
        watched.states.append(on_host(run))
        while run.step < run.total_steps:
            with compilations() as events:
                metrics, _ = next(run)
            watched.compiled += len(events)
            watched.metrics.append(metrics)
            watched.states.append(on_host(run))
            if run.step == 3:
                assert run._keeper
                run._keeper.wait()  # a kill before that would cost a step more
                shutil.copytree(folder, watched.killed)
                with (watched.killed / "metrics.jsonl").open("a") as file:
                    file.write('{"step": 4, "critic/sc')
    return watched


def on_host(run: Run) -> RunState:
    return jax.tree.map(np.asarray, run.state())


def checkpointed(folder: Path, config: Config, steps: Sequence[int] = (1,)) -> Params:
    """A run's folder, with checkpoints of the policy alone, without a run: the model's parameters, times the step."""
    inputs, layout = load_inputs(config, train=False), make_layout(config)
    model, _ = make_models(config, inputs, layout)
    params, _ = policy_params(config, model, layout, inputs.folder)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(to_json(config))
    checkpoints = Checkpoints(folder / "checkpoints")
    for step in steps:
        scaled = jax.tree.map(lambda x, step=step: step * x, params)
        checkpoints.save(step, {"actor": {"params": scaled}}, {})
    checkpoints.close()
    return params

"""Runs that something happens to: hooks and programs for tests/test_faults.py and tests/test_killed.py.

python -m tests.faulty train PHASE STEP ARGUMENT...   the command train, killed (SIGKILL) in a phase of a step
python -m tests.faulty starve PHASE ARGUMENT...       the command train, with little more memory from a phase on
python -m tests.faulty save FOLDER                    saves one step after the other until it is killed
python -m tests.faulty meshes FOLDER                  saves on 2 x 4 devices, restores on others
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import checkpoint, timers, train
from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.errors import leave
from jaxrl_llm.metrics import CLOCKS
from jaxrl_llm.rewards import batched
from jaxrl_llm.trainer import Run, fit
from tests import tiny_folder, tiny_runs
from tests.tiny_runs import Rows

ROOT = Path(__file__).resolve().parents[1]

# Beside the phases that have a timer: within a save, before the checkpoint has its mark, and right after.
IN_A_SAVE = ("checksums", "newest")


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[Run], None]) -> None:
    """Does something to a run before its step of this number (the first is 0)."""
    original = Run._step

    def stepping(run: Run) -> Any:
        if run.step == step:
            action(run)
        return original(run)

    monkeypatch.setattr(Run, "_step", stepping)


def digest(*trees: Any) -> str:
    """SHA-256 of every leaf's dtype, shape and bytes."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        array = np.asarray(leaf)
        found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def start(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`python -m tests.faulty …`; programs are compiled once, and what it leaves lying about lies in `tmp_path`."""
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    given = {
        **os.environ,
        "TMPDIR": str(scratch),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tiny_folder.session_folder() / "killed"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        **environment,
    }
    command = [sys.executable, "-m", "tests.faulty", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=given, text=True, stdout=pipe, stderr=pipe)


def without_clocks(lines: Rows) -> Rows:
    return [{name: value for name, value in line.items() if not name.startswith(CLOCKS)} for line in lines]


# Rewards


def at_times_for_ever(prompt: str, response: str, record: Any) -> float:
    """Never comes to an end where the response begins with a digit below 5."""
    if "0" <= response[:1] < "5":
        threading.Event().wait()
    return 1.0


def backtracking(prompt: str, response: str, record: Any) -> float:
    """Never gives the interpreter's lock back."""
    return float(bool(re.match(r"(a|aa)+$", 60 * "a" + "b")))


@batched
def one_too_few(prompts: list[str], responses: list[str], records: list[Any]) -> list[float]:
    return [1.0] * (len(responses) - 1)


# The programs


def recipe(overrides: dict[str, Any]) -> str:
    return f"from tests import tiny_folder\n\n\ndef get_config():\n    return tiny_folder.raw_config(**{overrides!r})\n"


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_train(phase: str, step: int, arguments: list[str]) -> int:
    """Ends amid the phase: after it has begun, before what it did is written down."""
    entered, wanted = Run._step, False

    def stepping(run: Run) -> Any:
        nonlocal wanted
        wanted = run.step == step
        return entered(run)

    Run._step = stepping  # pyright: ignore[reportAttributeAccessIssue]
    whole = timers.Timers.__call__

    @contextlib.contextmanager
    def timed(self: timers.Timers, name: str) -> Iterator[Any]:
        with whole(self, name) as wait:
            yield wait
            if wanted and name == phase:
                die()

    timers.Timers.__call__ = timed  # pyright: ignore[reportAttributeAccessIssue]
    if phase in IN_A_SAVE:
        name = {"checksums": "_write_checksums", "newest": "_write_whole"}[phase]
        original = getattr(checkpoint, name)

        def dying(path: Path, *rest: Any) -> None:
            saved = rest[0].strip() if path.name == checkpoint.NEWEST else path.name
            if saved == str(step + 1):
                die()
            original(path, *rest)

        setattr(checkpoint, name, dying)
    return train.main(arguments)


def starved_train(phase: str, arguments: list[str]) -> int:
    """From the phase on the process may have a megabyte more of data than it has then."""
    import resource

    entered, limited = timers.Timers._enter, False

    def enter(self: timers.Timers, name: str) -> None:
        nonlocal limited
        entered(self, name)
        if name == phase and not limited:
            limited = True
            lines = Path("/proc/self/status").read_text().splitlines()
            has = next(int(line.split()[1]) for line in lines if line.startswith("VmData:")) << 10
            resource.setrlimit(resource.RLIMIT_DATA, (has + (1 << 20), has + (1 << 20)))

    timers.Timers._enter = enter  # pyright: ignore[reportAttributeAccessIssue]
    return train.main(arguments)


def state_of(step: int, size: int) -> dict[str, jax.Array]:
    return {f"{i}": jnp.arange(size, dtype=jnp.float32) * step + i for i in range(4)}


SIZE = 1 << 20


def save_for_ever(folder: Path) -> None:
    store = Checkpoints(folder, keep=2)
    found, _ = store.newest_good()
    step = found or 0
    print("ready", flush=True)
    while True:
        step += 1
        store.save(step, state_of(step, SIZE), {"step": step})


def on_meshes(folder: Path) -> None:
    """Prints what a run on 2 x 4 devices (data x fsdp) saves, and what others read of it and then draw."""
    common: dict[str, Any] = {
        **tiny_runs.GRPO,
        **tiny_runs.QUIET,
        "data__train_batch_size": 8,
        "actor__mini_batch_size": 8,
        "trainer__save_interval": 2,
    }

    def config(data: int, fsdp: int, steps: int) -> Any:
        return tiny_folder.config(**common, mesh__data=data, mesh__fsdp=fsdp, trainer__steps=steps)

    found = {}
    with fit(config(2, 4, 2), folder / "first") as run:
        list(run)
        found["2x4"] = [digest(tiny_runs.on_host(run))]
    for data, fsdp in ((2, 4), (4, 2), (1, 8)):
        again = folder / f"{data}x{fsdp}"
        shutil.copytree(folder / "first", again)
        with fit(config(data, fsdp, 3), again) as run:
            read = digest(tiny_runs.on_host(run))
            _, batch = next(run)
            found[f"on {data}x{fsdp}"] = [read, digest(batch.prompts, batch.uid)]
    print(json.dumps(found))


if __name__ == "__main__":
    job, *rest = sys.argv[1:]
    if job == "train":
        sys.exit(killed_train(rest[0], int(rest[1]), rest[2:]))
    if job == "starve":
        leave(starved_train(rest[0], rest[1:]))
    {"save": save_for_ever, "meshes": on_meshes}[job](Path(rest[0]))

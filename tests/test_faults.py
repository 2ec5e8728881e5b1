"""What happens to runs, done to tiny ones: signals, kills, full disks, damage, bad numbers (docs/reliability.md).

Faults that checkpoints alone can be put to stand in test_checkpoint.py, failing rewards in test_reward_pool.py, bad
inputs in test_data.py, test_sources.py and test_commands.py.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import checkpoint, train
from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.collect import start_scoring
from jaxrl_llm.errors import OutOfMemory, StorageError, TryAgain, exit_code
from jaxrl_llm.sharding import abstract_like
from jaxrl_llm.trainer import Run, fit
from jaxrl_llm.writers import read_jsonl
from tests import faulty, tiny_folder
from tests.faulty import at_step, digest, start, without_clocks
from tests.tiny_runs import GRPO, QUIET, Watched, on_host

ROOT = Path(__file__).resolve().parents[1]


pytestmark = pytest.mark.usefixtures("compile_once")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(faulty.recipe(GRPO))
    return path


def assert_same_run(folder: Path, expected: Watched) -> None:
    """Another folder holds the same run: metrics, samples, every response, and the last checkpoint, bit for bit."""
    assert without_clocks(read_jsonl(folder / "metrics.jsonl")) == without_clocks(expected.lines())
    for name in ("samples.jsonl", *(f"rollouts/{step}.jsonl" for step in (1, 2, 3, 4))):
        assert (folder / name).read_bytes() == (expected.folder / name).read_bytes(), name
    target = abstract_like(jax.tree.map(jnp.asarray, expected.states[-1]))
    found, _ = Checkpoints(folder / "checkpoints").restore(target, 4)
    assert digest(found) == digest(expected.states[-1])


# 3, 5: signals


def own_signal(number: signal.Signals) -> Any:
    return lambda *_: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("step", "number"), [(1, signal.SIGTERM), pytest.param(2, signal.SIGUSR1, marks=pytest.mark.long)]
)
def test_a_signal_lets_the_step_end_and_saves(
    grpo: Watched, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, step: int, number: Any
) -> None:
    """In the second step, which is evaluated and saved anyhow (the evaluation is made up for), and in the third."""
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)]
    options = [f"--config={recipe}", f"--workdir={tmp_path / 'run'}"]
    with monkeypatch.context() as patch:
        at_step(patch, step, own_signal(number))
        assert train.main(options) == 75
    done = step + 1
    assert f"stopped: {number.name}: after step {done} of 4; it is saved" in capsys.readouterr().err
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    assert max(Checkpoints(tmp_path / "run" / "checkpoints").steps()) == done
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(done + 1))
    assert not any(name.startswith("val-") for name in lines[-1])
    end = read_jsonl(tmp_path / "run" / "events.jsonl")[-1]
    assert (end["kind"], end["step"], end["outcome"]) == ("end", done, "stopped") and number.name in end["why"]
    assert train.main(options) == 0
    assert_same_run(tmp_path / "run", grpo)


def test_a_signal_ends_an_evaluation_after_its_batch(
    grpo: Watched, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two batches, after the second step: the step is saved, and its evaluation is made up for."""
    options, scored = [f"--config={recipe}", f"--workdir={tmp_path / 'run'}"], []

    def signalling(*given: Any) -> Any:
        scored.append(given)
        if len(scored) == 3:  # two before the first step
            os.kill(os.getpid(), signal.SIGTERM)
        return start_scoring(*given)

    with monkeypatch.context() as patch:
        patch.setattr("jaxrl_llm.evaluation.start_scoring", signalling)
        assert train.main(options) == 75
    assert len(scored) == 3
    assert Checkpoints(tmp_path / "run" / "checkpoints").newest_good(strict=True) == (2, [])
    assert not any(name.startswith("val-") for name in read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1])
    assert train.main(options) == 0
    assert_same_run(tmp_path / "run", grpo)


def test_a_second_signal_while_it_is_saved_changes_nothing(
    grpo: Watched, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    options = [f"--config={recipe}", f"--workdir={tmp_path / 'run'}"]
    write = checkpoint._write_checksums

    def signalling(folder: Path) -> None:
        if folder.name == "3":
            os.kill(os.getpid(), signal.SIGTERM)
        write(folder)

    with monkeypatch.context() as patch:
        at_step(patch, 2, own_signal(signal.SIGTERM))
        patch.setattr("jaxrl_llm.checkpoint._write_checksums", signalling)
        assert train.main(options) == 75
    assert "SIGTERM: the run is stopping already" in capfd.readouterr().err
    assert Checkpoints(tmp_path / "run" / "checkpoints").newest_good(strict=True) == (3, [])
    assert train.main(options) == 0
    assert_same_run(tmp_path / "run", grpo)


def test_a_signal_before_the_first_step_ends_at_once(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("jaxrl_llm.run_start.make_layout", own_signal(signal.SIGTERM))
    assert train.main([f"--config={recipe}", f"--workdir={tmp_path / 'run'}"]) == 75
    assert "SIGTERM: stopped before the first step" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_signal_is_heard_while_the_configuration_is_read(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("jaxrl_llm.train.parse_args", own_signal(signal.SIGTERM))
    assert train.main([f"--config={recipe}"]) == 75
    assert "SIGTERM: stopped before the first step" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(("kind", "code"), [(KeyboardInterrupt, 130), (TryAgain, 75)])
def test_an_interruption_that_python_ignores_comes_again(kind: type[BaseException], code: int) -> None:
    """As in a callback of the garbage collector, where exceptions are printed and forgotten."""

    class Interrupted:
        def __del__(self) -> None:
            raise kind

    def handle(*_: object) -> None:
        raise TryAgain("asked again")

    def body() -> None:
        Interrupted()
        end = time.monotonic() + 30
        while time.monotonic() < end:
            time.sleep(0.01)

    before = signal.signal(signal.SIGTERM, handle)
    try:
        assert exit_code(body) == code
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_notebook_has_its_own_handlers(grpo: Watched) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with fit(grpo.config) as run:
        assert signal.getsignal(signal.SIGTERM) is before
        assert not run._guard.signals.received


# 8: stuck

STUCK = """
import re, sys, time
from jaxrl_llm import watchdog
from jaxrl_llm.guard import Guard
watchdog.LATER = 0.5
with Guard(phase_timeout=1, workdir=sys.argv[1]).standing() as guard:
    guard.watchdog.tell = print
    for _ in range(4):  # each in time
        with guard.watchdog.phase("data"):
            time.sleep(0.3)
    with guard.watchdog.phase("reward"):
        {stuck}
"""


@pytest.mark.parametrize(
    ("stuck", "where"),
    [("time.sleep(60)", "stacks.txt"), ("re.match('(a|aa)+$', 60 * 'a' + 'b')", "stderr")],
    ids=["waits", "keeps the interpreter"],
)
def test_a_stuck_phase_ends_with_75_and_its_stacks(tmp_path: Path, stuck: str, where: str) -> None:
    command = [sys.executable, "-c", STUCK.format(stuck=stuck), str(tmp_path)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert ran.returncode == 75, ran.stderr
    stacks = (tmp_path / "stacks.txt").read_text() if where == "stacks.txt" else ran.stderr
    assert re.search(r'File "<string>", line 12 in <module>', stacks)
    if where == "stacks.txt":
        assert "the phase reward takes longer than trainer.phase_timeout = 1 s" in ran.stdout
        assert "line 12 in <module>" in ran.stderr


@pytest.mark.long
@pytest.mark.parametrize("reward", ["at_times_for_ever", "backtracking"])
def test_a_run_that_is_stuck_in_a_reward_ends_with_75(tmp_path: Path, reward: str) -> None:
    """In the run's own process, without a worker that could be killed."""
    stuck = {"reward__functions": (f"tests.faulty:{reward}",), "trainer__phase_timeout": 15.0}
    recipe, folder = tmp_path / "recipe.py", tmp_path / "run"
    recipe.write_text(faulty.recipe({**tiny_folder.KL_LOSS, **QUIET, **stuck}))
    with start(tmp_path, "train", "none", "0", f"--config={recipe}", f"--workdir={folder}") as process:
        _, told = process.communicate()
    assert process.returncode == 75, told
    assert f"in {reward}" in told and "tests/faulty.py" in told
    if reward == "at_times_for_ever":
        assert f"in {reward}" in (folder / "stacks.txt").read_text()
        end = read_jsonl(folder / "events.jsonl")[-1]
        assert (end["kind"], end["outcome"]) == ("end", "aborted")
        assert "the phase reward takes longer than trainer.phase_timeout = 15 s" in end["why"]


# 11: a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


LEFT_OPEN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # by orbax, where it fails


@LEFT_OPEN
def test_a_full_disk_leaves_the_last_good_checkpoint(small_disk: Path) -> None:
    def state(step: int) -> dict[str, jax.Array]:
        return {"x": jax.random.normal(jax.random.key(step), (5 << 18,))}  # 5 MB that cannot be compressed

    store = Checkpoints(small_disk / "checkpoints")
    store.save(1, state(1), {})
    store.wait()
    store.save(2, state(2), {})  # begins well
    with pytest.raises(StorageError, match="checkpoints/2: cannot be saved"):
        store.save(3, state(3), {})
    gc.collect()
    again = Checkpoints(small_disk / "checkpoints")
    assert again.newest_good(strict=True) == (1, [])
    assert digest(again.restore(abstract_like(state(1)))[0]) == digest(state(1))


@LEFT_OPEN
def test_a_run_on_a_full_disk_ends_with_4(recipe: Path, small_disk: Path, capsys: Any) -> None:
    """Full but for 64 kB when the second step begins."""

    def fill(run: Run) -> None:
        assert run._keeper
        run._keeper.wait()
        free = shutil.disk_usage(small_disk).free
        (small_disk / "other").write_bytes(bytes(max(free - (1 << 16), 0)))

    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 2, fill)
        options = [f"--config={recipe}", f"--workdir={small_disk / 'run'}"]
        assert train.main([*options, "--config.trainer.save_interval=1"]) == 4
    gc.collect()
    told = capsys.readouterr().err
    assert "No space left on device" in told and "never retrieved" not in told
    assert Checkpoints(small_disk / "run" / "checkpoints").newest_good(strict=True) == (2, [])
    (small_disk / "other").unlink()
    assert train.main([*options, "--config.trainer.save_interval=1"]) == 0
    assert [line["step"] for line in read_jsonl(small_disk / "run" / "metrics.jsonl")] == [0, 1, 2, 3, 4]


# 12: another model, optimizer, dtype (leaves: test_checkpoint.py)


def test_a_checkpoint_of_another_dtype_is_named_leaf_by_leaf(grpo: Watched, tmp_path: Path) -> None:
    """Where config.json was changed along with the command; else that is what is refused."""
    shutil.copytree(grpo.folder, tmp_path / "run")
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text().replace('"param_dtype": "float32"', '"param_dtype": "bfloat16"'))
    expected = r"checkpoints/4: holds another model or optimizer .*\n.* expected bfloat16\[.*\], found float32\["
    with pytest.raises(StorageError, match=expected):
        fit(tiny_folder.config(**GRPO, model__param_dtype="bfloat16"), tmp_path / "run")


# Memory


def test_out_of_memory_says_where_and_what_makes_it_smaller(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """XLA's own error, of an array that no machine has room for."""

    def greedy(run: Run) -> None:
        def allocate(*_: Any) -> Any:
            return jnp.zeros((1 << 50,), jnp.uint8).block_until_ready()

        update = dataclasses.replace(run._phases.update_actor, update=allocate)
        run._phases = dataclasses.replace(run._phases, update_actor=update)

    at_step(monkeypatch, 1, greedy)
    assert train.main([f"--config={recipe}", f"--workdir={tmp_path / 'run'}"]) == OutOfMemory.exit_code == 5
    told = capsys.readouterr().err
    assert "out of memory in the phase update_actor: RESOURCE_EXHAUSTED: Out of memory allocating" in told
    assert "4 prompts x 4 responses = 16 rows of 31 + 8 tokens" in told
    assert re.search(r"\n    gen: \d+\.\d MiB \(\d+\.\d MiB \+ \d+\.\d MiB \+ \d+\.\d MiB\)", told)
    assert "actor.micro_batch_size = 0; rows per device" in told and "model.remat = 'none'" in told
    assert "out of memory" in read_jsonl(tmp_path / "run" / "events.jsonl")[-1]["why"]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as Linux does it")
@pytest.mark.parametrize("phase", ["gen", "update_actor", "testing", "save_checkpoint"])
def test_a_process_that_may_have_no_more_memory_ends_with_5(tmp_path: Path, phase: str) -> None:
    """Of a model and a batch that need some 30 MB a phase, where the system gives one."""
    more = {"rollout.n": 64, "actor.mini_batch_size": 4, "trainer.steps": 3, "trainer.save_interval": 1}
    more |= {"actor.use_kl_loss": True, "eval.interval": 1, "eval.batch_size": 500}
    options = [f"--config={ROOT / 'configs/quickstart.py'}", f"--workdir={tmp_path / 'run'}"]
    options += [f"--config.{name}={value}" for name, value in more.items()]
    with start(tmp_path, "starve", phase, *options) as process:
        _, told = process.communicate()
    assert process.returncode == 5, told
    assert re.search(rf"out of memory in the phase ({phase}|update_actor|close): ", told)
    assert "32 prompts x 64 responses = 2048 rows" in told


def test_out_of_the_hosts_memory_is_5_too(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("jaxrl_llm.resume.initial_state", fail)
    assert train.main([f"--config={recipe}", f"--workdir={tmp_path / 'run'}"]) == 5


# 15, 16, 17: rewards (and test_reward_pool.py)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_rewards_that_raise_are_late_or_are_no_numbers_cost_their_rows(tmp_path: Path, workers: int) -> None:
    """Some of the responses are scored by nothing, some by NaN, some by an exception; with a worker some never."""
    functions = ("tests.tiny_folder:picky", "tests.faulty:at_times_for_ever")
    settings: dict[str, Any] = {
        "reward__functions": functions[: 1 + workers],
        "reward__num_workers": workers,
        "reward__timeout": 1.0,
        "trainer__steps": 2,
    }
    with fit(tiny_folder.config(**tiny_folder.KL_LOSS, **QUIET, **settings), tmp_path) as run:
        found = [metrics for metrics, _ in run]
        final = on_host(run)
    assert all(0 < metrics["reward/failed_ratio"] < 1 for metrics in found)
    assert (int(final.actor.updates), int(final.actor.skipped)) == (2, 0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(final.actor.params))
    assert "the reward failed on" in (tmp_path / "events.jsonl").read_text()


@pytest.mark.parametrize("workers", [0, 1])
def test_scores_of_the_wrong_number_are_the_users_error(
    recipe: Path, tmp_path: Path, workers: int, capsys: Any
) -> None:
    options = [f"--config={recipe}", f"--workdir={tmp_path / 'run'}", f"--config.reward.num_workers={workers}"]
    wrong = ["--config.reward.functions=tests.faulty:one_too_few", "--config.reward.weights=()"]
    assert train.main([*options, *wrong]) == 2
    assert "one_too_few" in capsys.readouterr().err


# 19: what can be known before the first step


def edited(tmp_path: Path, file: str, **values: Any) -> str:
    """The tiny model's folder with other values in one of its files."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder.folder(), folder)
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return str(folder)


BAD_LINES = {
    "malformed": ('{"prompt": "1+1=?", "answer": "2"', "records.jsonl:2"),
    "a field missing": ('{"answer": "2"}', "prompt"),
    "too long": (json.dumps({"prompt": 40 * "1+"}), "longer than rollout.prompt_length"),
    "no text": ('{"prompt": 7}', "prompt"),
}


@pytest.mark.parametrize(("line", "expected"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_record_is_told_before_anything_is_written(
    recipe: Path, tmp_path: Path, capsys: Any, line: str, expected: str
) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text('{"prompt": "1+1=?", "answer": "2"}\n' + f"{line}\n")
    assert train.main([f"--config={recipe}", f"--workdir={tmp_path / 'run'}", f"--config.data.train={records}"]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_end_token_past_the_embedding_is_told_before_anything_is_written(
    recipe: Path, tmp_path: Path, capsys: Any
) -> None:
    model = edited(tmp_path, "generation_config.json", eos_token_id=[99])
    assert train.main([f"--config={recipe}", f"--workdir={tmp_path / 'run'}", f"--config.model.path={model}"]) == 2
    assert "the embedding has 48 rows, and token id 99 is in use" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# 18: numbers that are not finite (K in a row: test_trainer.py)


def test_one_bad_gradient_is_skipped_and_the_run_goes_on(grpo: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and moments are bit for bit those before it; the next update is applied."""

    def poison(run: Run) -> None:
        whole = run._phases.update_actor

        def update(state: Any, batch: Any, *rest: Any) -> Any:
            run._phases = dataclasses.replace(run._phases, update_actor=whole)
            return whole.update(state, batch.replace(advantages=jnp.nan * batch.advantages), *rest)

        run._phases = dataclasses.replace(run._phases, update_actor=dataclasses.replace(whole, update=update))

    at_step(monkeypatch, 1, poison)
    with fit(tiny_folder.config(**GRPO, **QUIET, trainer__steps=3)) as run:
        states = [on_host(run) for _ in run]
        found = states[1].actor
    assert digest(found.params, found.opt_state) == digest(states[0].actor.params, states[0].actor.opt_state)
    assert [(int(s.actor.updates), int(s.actor.skipped)) for s in states] == [(1, 0), (1, 1), (2, 0)]
    assert digest(states[2].actor.params) != digest(states[1].actor.params)


# The best checkpoint


@pytest.mark.long
def test_the_best_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is remembered through a resume, and by whatever metric is asked for."""
    scores = {0: 0.1, 1: 0.2, 2: 0.9, 3: 0.4, 4: 0.3, 5: 0.5, 6: 0.95, 7: 0.1}
    evaluate = Run._evaluate

    def scored(run: Run, *given: Any) -> dict[str, float]:
        return (evaluate(run, *given) or {}) | {"val-core/signs/reward/mean@1": scores[run.step] * 2}

    monkeypatch.setattr(Run, "_evaluate", scored)
    monkeypatch.setattr("jaxrl_llm.resume.EVALUATED", "val-core/signs/reward/mean@1")
    often: dict[str, Any] = {"trainer__save_interval": 1, "eval__interval": 1, "trainer__keep_checkpoints": 1}
    list(fit(tiny_folder.config(**GRPO, **often, trainer__steps=4), tmp_path))
    store = Checkpoints(tmp_path / "checkpoints")
    assert store.steps() == [2, 4]
    assert store.read_meta(4)["best"] == {"metric": "", "step": 2, "score": 1.8}
    list(fit(tiny_folder.config(**GRPO, **often, trainer__steps=5), tmp_path))
    assert store.steps() == [2, 5]
    list(fit(tiny_folder.config(**GRPO, **often, trainer__steps=7), tmp_path))
    assert store.steps() == [6, 7]
    named = {**often, "trainer__best_metric": "val-core/signs/reward/maen@1", "trainer__steps": 8}
    scores[8] = 0.2
    list(fit(tiny_folder.config(**GRPO, **named), tmp_path))
    assert store.steps() == [8]
    notes = [row["text"] for row in read_jsonl(tmp_path / "events.jsonl") if row["kind"] == "note"]
    assert len([x for x in notes if "no such metric; did you mean 'val-core/signs/reward/mean@1'?" in x]) == 1

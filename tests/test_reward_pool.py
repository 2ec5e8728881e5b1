"""Rewards in worker processes: the same scores, deadlines, crashes, and no process left."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_llm.errors import RunAborted, UserError
from jaxrl_llm.rewards import RewardSet, Scores, batched, jax_reward, make_rewards, pooled
from jaxrl_llm.rewards.processes import marked
from jaxrl_llm.rewards.worker_process import WorkerProcess
from jaxrl_llm.trainer import fit
from tests import tiny_folder, tiny_runs

ROOT = Path(__file__).parents[1]
HERE = "tests.hostile_rewards"
TIMEOUT = 1.5  # seconds: short, and yet long enough for a row on a loaded machine


def run(rewards: RewardSet, responses: Sequence[str], records: Any = None) -> Scores:
    return rewards.score([""] * len(responses), responses, records or [{"row": i} for i in range(len(responses))])


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def soon(condition: Callable[[], Any], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


SHARED: list[str] = []  # marks of pools that outlive a test, whose workers come and go


def workers() -> set[int]:
    """Of all pools of this process but shared ones, with what they have started."""
    return set(marked(f"{os.getpid()}-")) - {pid for mark in SHARED for pid in marked(mark)}


def assert_same(a: Scores, b: Scores) -> None:
    np.testing.assert_array_equal(a.scores, b.scores)
    np.testing.assert_array_equal(a.valid, b.valid)
    assert a.extras == b.extras and a.failures == b.failures


@pytest.fixture(scope="module", autouse=True)
def _compile_once() -> Iterator[None]:
    with tiny_folder.compile_once():
        yield


@pytest.fixture(scope="module")
def hostile() -> Iterator[RewardSet]:
    with pooled(make_rewards([f"{HERE}:obey"]), num_workers=2, timeout=TIMEOUT, memory_limit=1.0) as rewards:
        assert rewards.pool is not None
        SHARED.append(rewards.pool.mark)
        yield rewards
        SHARED.clear()


# The same as in this process


def test_every_form_scores_as_in_this_process_and_in_order() -> None:
    note = "from here"

    def closure(prompt: str, response: str, record: Any) -> dict[str, Any]:
        return {"score": np.float32(len(response)), "note": note, "numbers": np.arange(2), "prompt": prompt}

    @jax_reward()
    def on_tokens(responses: Any, mask: Any, record_arrays: Any) -> Any:
        raise AssertionError("not to be called here")

    @batched
    def shares(prompts: Any, responses: Any, records: Any) -> Any:
        return np.array([len(response) for response in responses]) / max(map(len, responses))

    names = ["obey", "lengths", "of_verl", "of_verl_in_batches"]
    functions = [*(f"{HERE}:{name}" for name in names), "number", closure, on_tokens, shares, lambda p, r, c: c["row"]]
    rewards = make_rewards(functions, data_sources=["", "a", *[""] * 7])
    words = ["7", "raise", "none", "nan", "", "huge", "\ud800 and \U0001f600\x00\r\n", "object", "x" * 1_000_000]
    responses = [words[i % len(words)] for i in range(25)]
    records = [
        {"row": i, "answer": "7", "data_source": "ab"[i % 2], "extra_info": {"index": np.int64(i)}} for i in range(25)
    ]
    prompts = [f"prompt {i} \udfff" for i in range(25)]
    here = rewards.score(prompts, responses, records)
    with pooled(rewards, num_workers=2, timeout=60) as there:
        assert there.rewards is rewards.rewards and there.jax_functions == {6: on_tokens}
        found = there.score(prompts, responses, records)
        assert_same(found, here)
        assert there.score([], [], []).scores.shape == (0, 9)
    valid = here.valid
    assert valid.any() and not valid.all() and found.extras[0]["closure/numbers"] == [0, 1]
    assert found.extras[6]["obey/end"] == "\r\n" and found.scores[8, 0] == 1_000_000


def test_wrong_types_and_lengths_are_user_errors_that_name_the_function() -> None:
    with pooled(make_rewards([f"{HERE}:obey", f"{HERE}:lengths"]), num_workers=1, timeout=60) as rewards:
        with pytest.raises(UserError, match=r"reward 'obey' returned '1.0' \(str\); expected a number"):
            run(rewards, ["a", "text"])
        scored = rewards.with_model(lambda *_: 1 / 0, 1.0)  # which is not there yet when functions are tried out
        scored.try_out("", {})
        with pytest.raises(UserError, match="reward 'lengths' returned 1 scores for 2 rows"):
            run(rewards, ["a", "few"])
        assert run(rewards, ["a", "bb"]).scores.tolist() == [[1, 1], [2, 2]]
        with pytest.raises(UserError, match=r"a record cannot be sent .* reward.num_workers=0"):
            run(rewards, ["a"], [{"row": threading.Lock()}])


def test_batches_in_flight_together(tmp_path: Path) -> None:
    """The first two rows wait for each other, and for what is written only when all batches have been handed over."""
    with pooled(make_rewards([f"{HERE}:obey"]), num_workers=2, timeout=60) as rewards:
        record = {"note": str(tmp_path)}
        pending = [rewards.start([""] * 2, [f"meet {i}", "x" * i], [record] * 2) for i in range(1, 5)]
        (tmp_path / "all").touch()
        for i, batch in reversed(list(enumerate(pending, 1))):
            assert batch.result().scores.tolist() == [[6], [i]]
            assert batch.result() is batch.result()


# Functions that misbehave


DEATHS = {
    "exit": "its worker has died: exit code 3",
    "kill": "killed by SIGKILL",
    "segfault": "killed by SIGSEGV",
    "interrupt": "killed by SIGINT",
    "fork-and-exit": "exit code 3",  # although the child holds the connection open
    "sys.exit": "SystemExit: 3",
    "memory": "MemoryError",
    "recursion": "RecursionError",
    "raise": "RuntimeError: the reason",
    "none": "returned None",
    "nan": "returned nan",
    "huge": "returned extras that cannot be kept: 10000",
    "object": "a object is no plain data",
    "deep": "recursion",
    "hang": f"no answer within {TIMEOUT} s (reward.timeout); its worker has been killed",
    "regex": "no answer within",
}


def test_a_row_fails_alone_and_says_why(hostile: RewardSet) -> None:
    responses = [order for i, order in enumerate(DEATHS) for order in (order, "good" + "!" * i)]
    responses += ["print", "fork", "x" * 1_000_000]
    found = run(hostile, responses)
    for row, response in enumerate(responses):
        bad = response in DEATHS
        assert found.valid[row] == (not bad), (response, found.failures)
        assert found.scores[row, 0] == (0 if bad else len(response))
        assert bad or response == "print" or found.extras[row]["obey/row"] == row
    by_row = {int(text.split(",")[0].removeprefix("row ")): text for text in found.failures}
    assert list(by_row) == [2 * i for i in range(len(DEATHS))]
    for i, (order, reason) in enumerate(DEATHS.items()):
        assert by_row[2 * i].startswith(f"row {2 * i}, reward 'obey'") and reason in by_row[2 * i], (order, by_row)


def test_what_a_row_leaves_behind_is_not_the_next_ones_failure() -> None:
    with pooled(make_rewards([f"{HERE}:obey"]), num_workers=1, timeout=60) as rewards:
        assert run(rewards, ["later", "wait", "good"]).scores.tolist() == [[5], [4], [4]]


def test_a_batched_function_has_the_time_of_its_rows() -> None:
    with pooled(make_rewards([f"{HERE}:lengths"]), num_workers=1, timeout=0.3) as rewards:
        found = run(rewards, ["hang", "a", "b"])
    assert not found.valid.any() and "reward 'lengths': no answer for 3 rows within 0.9 s" in found.failures[0]


def test_no_jax_and_no_accelerator_in_a_worker(hostile: RewardSet) -> None:
    found = run(hostile, ["modules"] * 8)
    assert found.scores.max() == 0
    assert found.extras[0] == {"obey/platform": "cpu", "obey/gpus": ""}


def test_what_is_slow_at_first_is_done_before_the_clock_starts() -> None:
    def late(prompt: str, response: str, record: Any) -> float:
        return float(hasattr(math, "warm"))

    def warm_up() -> None:
        time.sleep(2 * TIMEOUT)
        math.warm = True  # type: ignore[attr-defined]

    late.warm_up = warm_up  # type: ignore[attr-defined]
    with pooled(make_rewards([late]), num_workers=1, timeout=TIMEOUT) as rewards:
        assert run(rewards, ["a"]).scores.tolist() == [[1]]


def test_state_lives_in_a_worker() -> None:
    with pooled(make_rewards([f"{HERE}:count"]), num_workers=1, timeout=60) as rewards:
        assert run(rewards, [""] * 3).scores[:, 0].tolist() == [1, 2, 3]


# Functions that do not come to work


def test_what_cannot_be_sent_or_loaded_names_the_function(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(prompt: str, response: str, record: Any) -> float:
        return float(lock.locked())

    with pytest.raises(UserError, match=r"reward 'locked' cannot be sent .* reward.num_workers=0"):
        pooled(make_rewards([locked]), num_workers=1)
    file = tmp_path / "once.py"
    file.write_text("def f(prompt, response, record):\n    return 1\n")
    rewards = make_rewards([f"{file}:f"])
    file.write_text("import os\nos._exit(5)\n")
    with pooled(rewards, num_workers=1) as dying, pytest.raises(UserError, match="do not start: exit code 5"):
        run(dying, ["a"])
    file.write_text("raise OSError('no such licence')\n")
    with pooled(rewards, num_workers=1) as broken:
        for _ in range(2):
            with pytest.raises(UserError, match="reward 'f': a worker cannot load it: .*no such licence"):
                run(broken, ["a", "b"])


def test_nothing_starts_for_nothing() -> None:
    @jax_reward()
    def on_tokens(responses: Any, mask: Any, record_arrays: Any) -> Any:
        return mask

    before = threading.active_count()
    assert pooled(make_rewards([on_tokens])).with_model(lambda *_: [], 1.0).pool is None
    assert pooled(make_rewards(["number"]), num_workers=0).pool is None
    assert threading.active_count() == before


# No process is left


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
def test_a_deadline_ends_the_children_too(hostile: RewardSet, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    found = run(hostile, ["hidden"], [{"note": str(note)}])
    assert not found.valid.any()
    assert soon(lambda: not any(map(alive, json.loads(note.read_text()))))


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
def test_nothing_is_left_after_close_and_after_being_forgotten(tmp_path: Path) -> None:
    threads = threading.active_count()
    note = tmp_path / "pids"
    rewards = pooled(make_rewards([f"{HERE}:obey"]), num_workers=2, timeout=60)
    pending = rewards.start([""] * 9, ["hidden", *["wait"] * 8], [{"note": str(note)}] * 9)
    assert soon(note.exists) and soon(note.read_text)
    assert workers()
    rewards.close()
    rewards.close()
    assert not workers() and threading.active_count() == threads
    assert soon(lambda: not any(map(alive, json.loads(note.read_text()))))  # a process takes a moment to die
    for ask in (pending.result, lambda: run(rewards, ["a"])):
        with pytest.raises(RuntimeError, match="closed"):
            ask()

    forgotten = pooled(make_rewards(["number"]), num_workers=1)
    assert forgotten.try_out("", {"answer": "1"}) is None and workers()
    del forgotten
    gc.collect()
    assert soon(lambda: not workers())


def test_no_thread_ends_before_all_workers_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux kills the workers that a thread has started when that thread ends; their children would be left."""
    threads = []
    kill = WorkerProcess.kill

    def slow(worker: WorkerProcess) -> int | None:
        time.sleep(0.2)  # for an idle thread to end in
        threads.append(sum(thread.name.startswith("reward worker") for thread in threading.enumerate()))
        return kill(worker)

    before = sum(thread.name.startswith("reward worker") for thread in threading.enumerate())
    with pooled(make_rewards(["number"]), num_workers=2) as rewards:
        run(rewards, ["1", "2"])
        monkeypatch.setattr(WorkerProcess, "kill", slow)
    assert set(threads[:3]) == {before + 2}  # of two workers and a spare one


PROGRAM = """
    import os, sys, time
    from jaxrl_llm.rewards import make_rewards, pooled
    rewards = pooled(make_rewards(["tests.hostile_rewards:obey"]), num_workers=2, timeout=60)
    rewards.try_out("", {})
    pending = rewards.start(["", ""], ["children", "regex"], [{"note": sys.argv[1]}] * 2)
    while not (os.path.exists(sys.argv[1]) and open(sys.argv[1]).read()):
        time.sleep(0.02)
    print("up", flush=True)
    if sys.argv[2] == "exit":
        sys.exit(7)
    if sys.argv[2] == "raise":
        raise ZeroDivisionError
    pending.result()
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks into /proc")
@pytest.mark.parametrize("end", ["exit", "raise", "SIGKILL", "SIGTERM", "SIGINT"])
def test_nothing_is_left_when_the_program_ends(end: str, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(note), end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as program:
        assert program.stdout is not None and program.stdout.readline() == b"up\n"
        mark = f"{program.pid}-"
        assert end in ("exit", "raise") or list(marked(mark))
        if end.startswith("SIG"):
            program.send_signal(getattr(signal, end))
        code = program.wait(20)
    assert code == {"exit": 7, "raise": 1, "SIGKILL": -9, "SIGTERM": -15, "SIGINT": -2}[end]
    assert soon(lambda: not list(marked(mark)))
    assert soon(lambda: not any(map(alive, json.loads(note.read_text()))))


# In a run


def test_a_run_with_workers_is_the_run_without() -> None:
    expected = tiny_runs.grpo().states[1]
    run = fit(tiny_folder.config(**tiny_runs.GRPO, **tiny_runs.QUIET, reward__num_workers=1))
    next(run)
    assert workers()
    run.close()
    assert not workers()
    jax.tree.map(np.testing.assert_array_equal, tiny_runs.on_host(run), expected)


def test_too_many_failures_end_a_run() -> None:
    """Here any failure is too many. At the start, on an empty response, the function hangs: the run does not."""
    picky = {"reward__functions": (f"{HERE}:picky",), "reward__num_workers": 1}
    settings = {**tiny_folder.KL_LOSS, **tiny_runs.QUIET, "reward__max_failed_ratio": 0.0, "reward__timeout": TIMEOUT}
    run = fit(tiny_folder.config(**settings, **picky))
    with pytest.raises(RunAborted, match=r"failed on [0-9]+% of the responses .*max_failed_ratio=0.0") as caught:
        list(run)
    assert "reward 'picky'" in str(caught.value) and not workers()


def test_a_start_that_fails_leaves_no_process(tmp_path: Path) -> None:
    settings = {**tiny_runs.QUIET, "reward__functions": (f"{HERE}:obey",), "reward__num_workers": 1}
    poisoned = tmp_path / "model"
    shutil.copytree(tiny_folder.folder(), poisoned)
    (poisoned / "model.safetensors").unlink()
    with pytest.raises(UserError, match="model"):
        fit(tiny_folder.config(**settings, model__path=str(poisoned)))
    assert not workers()


def test_a_scheduler_s_signal_to_the_workers_ends_no_row_and_what_they_fork_can_be_ended() -> None:
    with pooled(
        make_rewards(["tests.hostile_rewards:signalled", "tests.hostile_rewards:ends_a_child"]), num_workers=1
    ) as rewards:
        found = rewards.score(["", ""], ["a", "b"], [{}, {}])
    assert found.failures == [] and found.scores.tolist() == [[1.0, 1.0], [1.0, 1.0]]

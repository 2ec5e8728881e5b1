"""A run of two processes with four devices each: the same run as in one process with eight."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from jaxrl_llm.command_line import make_parser, parse_args
from jaxrl_llm.config import to_json
from jaxrl_llm.errors import UserError
from jaxrl_llm.metrics import CLOCKS
from jaxrl_llm.peers import Peers, must_agree
from jaxrl_llm.rewards import make_rewards, pooled
from jaxrl_llm.writers import read_jsonl
from tests import quick, tiny, tiny_folder
from tests.on_devices import MESHES, REPLAYED, STEPS

ROOT = Path(__file__).parents[1]
CHANGES: dict[str, Any] = {
    "data__train_batch_size": 8,
    "eval__batch_size": 8,
    "trainer__steps": 2,
    "trainer__save_interval": 1,
    "trainer__export": True,
    "reward__num_workers": 1,
    "mesh__fsdp": 2,
    "mesh__tensor": 2,
    "logging__progress": "plain",
}
Start = Callable[..., list[subprocess.Popen[str]]]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def environment(count: int, **changes: str) -> dict[str, str]:
    """Of one of `count` processes that have eight devices together."""
    flags = " ".join([f"--xla_force_host_platform_device_count={8 // count}", *quick.FLAGS])
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **changes}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(processes, workdir, **changes): the processes of a run, which are ended with the test."""
    running: list[subprocess.Popen[str]] = []

    def begin(count: int, workdir: Path, **changes: Any) -> list[subprocess.Popen[str]]:
        config = tmp_path / f"{workdir.name}.json"
        config.write_text(to_json(tiny_folder.config(**{**CHANGES, **changes})))
        port = free_port()
        command = [sys.executable, "-m", "jaxrl_llm.train", "--config", str(config), "--workdir", str(workdir)]
        peers = ["--coordinator", f"localhost:{port}", "--num_processes", str(count), "--process_id"]
        begun = []
        for index in range(count):
            with (tmp_path / f"{workdir.name}-{index}.log").open("a") as log:
                own = [*command, *peers, str(index)] if count > 1 else command
                begun.append(subprocess.Popen(own, env=environment(count), stdout=log, stderr=log, text=True))
        running.extend(begun)
        return begun

    yield begin
    for process in running:
        process.kill()
        process.wait()


def ended(processes: Sequence[subprocess.Popen[Any]], logs: Path, seconds: float = 300) -> list[int]:
    try:
        return [process.wait(seconds) for process in processes]
    except subprocess.TimeoutExpired:
        pytest.fail("\n".join(path.read_text()[-3000:] for path in sorted(logs.glob("*.log"))))


def until(condition: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.long
def test_two_processes_are_one_run(start: Start, tmp_path: Path) -> None:
    """Tokens can differ where sums do, in their last bits, so that the first step is compared; then the run goes on
    from its checkpoint in one process with eight devices."""
    assert ended(start(1, tmp_path / "one"), tmp_path) == [0]
    assert ended(start(2, tmp_path / "two"), tmp_path) == [0, 0]
    one, two = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [line["step"] for line in two] == [0, 1, 2]
    for name, value in one[1].items():
        if not name.startswith(CLOCKS):
            assert two[1][name] == pytest.approx(value, rel=1e-3, abs=1e-3), name
    rows = [read_jsonl(tmp_path / name / "rollouts/1.jsonl") for name in ("one", "two")]
    for a, b in zip(*rows, strict=True):
        assert (a["uid"], a["prompt"], a["response"], a["score"]) == (b["uid"], b["prompt"], b["response"], b["score"])
        np.testing.assert_allclose(a["advantages"], b["advantages"], atol=1e-4)
    assert (tmp_path / "two/model/model.safetensors").stat().st_size == (
        tmp_path / "one/model/model.safetensors"
    ).stat().st_size
    assert ended(start(1, tmp_path / "two", trainer__steps=3), tmp_path) == [0]
    assert [line["step"] for line in read_jsonl(tmp_path / "two/metrics.jsonl")] == [0, 1, 2, 3]


Find = Callable[..., Any]


@pytest.fixture
def find(tmp_path: Path) -> Iterator[Find]:
    """find(processes, job, x64=False): what tests/on_devices.py finds in so many processes with eight devices."""
    running: list[subprocess.Popen[bytes]] = []

    def run(count: int, job: str, *, x64: bool = False) -> Any:
        command = [sys.executable, "-W", "error", "-m", "tests.on_devices", job, str(tmp_path / job)]
        # Every mesh for what is sampled; what is replayed is recorded once.
        meshes = {"JAXRL_LLM_LONG_TESTS": "1" if job == "sample" else ""}
        own, port = environment(count, JAX_ENABLE_X64=str(x64), **meshes), free_port()
        begun = []
        for index in range(count):
            peers = [f"localhost:{port}", str(count), str(index)] if count > 1 else []
            with (tmp_path / f"{job}-{count}-{index}.log").open("w") as log:
                begun.append(subprocess.Popen([*command, *peers], cwd=ROOT, env=own, stdout=log, stderr=log))
        running.extend(begun)
        assert ended(begun, tmp_path, 600) == [0] * count, "\n".join(p.read_text() for p in tmp_path.glob("*.log"))
        return pickle.loads((tmp_path / job).read_bytes())

    yield run
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.long
def test_recorded_tokens_give_the_same_run_in_two_processes(find: Find) -> None:
    """State, metrics and evidence of five steps on meshes over both processes, as on one device."""
    single = {case: find(1, case)["single"]["after"] for case in REPLAYED}
    replayed = find(2, "again")
    assert {case: tuple(meshes) for case, meshes in replayed.items()} == REPLAYED
    for case, meshes in replayed.items():
        for found in meshes.values():
            assert len(found["after"]) == STEPS == 5
            for (state, metrics, batch), expected in zip(found["after"], single[case], strict=True):
                np.testing.assert_array_equal(batch.responses, expected[2].responses)
                tiny.assert_close((state, metrics, batch), expected)


@pytest.mark.long
def test_in_float64_two_processes_sample_the_same_tokens(find: Find) -> None:
    one, two = find(1, "sample", x64=True), find(2, "sample", x64=True)
    assert one.keys() == two.keys() | {"single"} and len(two) == len(MESHES)
    for batch in (*two.values(), *one.values()):
        for name in ("responses", "response_mask", "response_length", "finish_reason", "uid"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(one["single"], name), err_msg=name)
        np.testing.assert_allclose(batch.rollout_log_probs, one["single"].rollout_log_probs, atol=1e-12)


@pytest.mark.long
def test_a_signal_to_one_of_two_stops_both_and_saves(start: Start, tmp_path: Path) -> None:
    run = tmp_path / "run"
    processes = start(2, run, trainer__steps=1000, trainer__save_interval=1000, eval__interval=0)
    until(lambda: (run / "metrics.jsonl").exists() and len(read_jsonl(run / "metrics.jsonl")) > 1)
    processes[1].send_signal(signal.SIGTERM)
    assert ended(processes, tmp_path) == [75, 75]
    last = read_jsonl(run / "metrics.jsonl")[-1]["step"]
    assert (run / f"checkpoints/{last}/checksums.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_a_dead_process_ends_the_other(start: Start, tmp_path: Path, killed: int) -> None:
    run = tmp_path / "run"
    processes = start(2, run, trainer__steps=10_000, trainer__save_interval=1, eval__interval=0)
    until(lambda: len(list((run / "checkpoints").glob("*/checksums.json"))) > 1)
    processes[killed].kill()
    assert processes[1 - killed].wait(150) != 0
    assert ended(start(1, run, trainer__steps=3, trainer__save_interval=1, eval__interval=0), tmp_path)[0] in (0, 2)


# What needs no second process


class Threads:
    """Two threads that share as two processes do."""

    def __init__(self, index: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.index, self.count, self._values, self._barrier = index, 2, values, barrier

    def share(self, value: Any) -> list[Any]:
        self._values[self.index] = value
        self._barrier.wait(30)
        shared = list(self._values)
        self._barrier.wait(30)  # nobody shares again before everybody has read
        return shared


def as_two(body: Callable[[Threads], Any]) -> list[Any]:
    """body(peers) as each of two processes, side by side."""
    values, barrier = [None, None], threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda i: body(Threads(i, values, barrier)), range(2)))


def test_each_process_scores_its_own_rows() -> None:
    texts, records = [f"it is {i}" for i in range(5)], [{"answer": str(i % 3)} for i in range(5)]

    def score(peers: Threads) -> Any:
        with pooled(make_rewards(["number", "tests.tiny_folder:sleeping"]), num_workers=1, peers=peers) as rewards:
            found = rewards.score([""] * 5, texts, records)
        return found.scores.tolist(), found.valid.tolist(), [len(part) for part in peers._values]

    first, second = as_two(score)
    assert first == second
    scores, valid, parts = first
    assert [row[0] for row in scores] == [1, 1, 1, 0, 0] and all(valid)
    assert parts == [1, 0], "a batched function is called once, by the first process"


def test_what_one_process_finds_wrong_all_of_them_raise() -> None:
    def score(peers: Threads) -> str:
        with pooled(make_rewards(["tests.test_processes:wrong"]), num_workers=1, peers=peers) as rewards:
            with pytest.raises(UserError) as error:
                rewards.score([""] * 2, ["a", "b"], [{}] * 2)
            return str(error.value)

    first, second = as_two(score)
    assert first == second and "returned 'b'" in first


def wrong(prompt: str, response: str, record: Any) -> Any:
    return 1.0 if response == "a" else response


def test_processes_that_were_given_something_else_all_say_so() -> None:
    """Each would compute its share of another run, and nothing would tell but the numbers."""
    given = {"config.seed": 0, "config.optimizer.lr": 1e-6, "--workdir": "/runs/x"}

    def agree(threads: Threads) -> str:
        peers = cast(Peers, threads)
        must_agree(peers, given)
        with pytest.raises(UserError) as error:
            must_agree(peers, given | ({"config.seed": 3} if peers.index else {}))
        return str(error.value)

    first, second = as_two(agree)
    assert (
        first
        == second
        == ("the processes of a run must be given the same:\n  config.seed: 0 in process 0, 3 in process 1")
    )


ALONE = """
import sys
from jaxrl_llm import peers
peers.JOIN_SECONDS = 1
peers.join_run(sys.argv[1], 2, int(sys.argv[2]))
"""


@pytest.mark.parametrize("process", [0, 1])
def test_a_process_that_nobody_joins_ends_with_75(process: int) -> None:
    """The first waits for the other; the other finds nobody at the address."""
    command = [sys.executable, "-c", ALONE, f"localhost:{free_port()}", str(process)]
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True, timeout=120)
    assert done.returncode == 75
    assert "not all of the run's processes have come within 1 s" in done.stderr


def test_outside_of_a_cluster_nobody_says_who_is_who() -> None:
    command = [sys.executable, "-m", "jaxrl_llm.train", "--config", "configs/quickstart.py", "--workdir", "x"]
    done = subprocess.run(
        [*command, "--distributed"], cwd=ROOT, env=environment(1), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: --distributed: no cluster says who is who here; give --coordinator")


def test_one_process_shares_with_itself() -> None:
    peers = Peers.of_run()
    assert peers.first and peers.share({"a": 1}) == [{"a": 1}]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--coordinator", "localhost:1"], "belong together"),
        (["--num_processes", "2", "--process_id", "0"], "belong together"),
        (["--coordinator", "localhost:1", "--num_processes", "2", "--process_id", "2"], "expected 0 to"),
        (["--coordinator", "localhost:1", "--num_processes", "0", "--process_id", "0"], "num_processes=0: must be at"),
        (["--coordinator", "localhost", "--num_processes", "2", "--process_id", "0"], "localhost: expected HOST:PORT"),
        (["--coordinator", "a:70000", "--num_processes", "2", "--process_id", "0"], "expected HOST:PORT, with a port"),
    ],
)
def test_flags_that_make_no_run(flags: list[str], words: str) -> None:
    from jaxrl_llm.command_line import join_peers

    parser = make_parser("train", "")
    config, args = parse_args(parser, ["--config", "configs/quickstart.py", "--workdir", "x", *flags])
    with pytest.raises(UserError, match=words):
        join_peers(config, args)
    with pytest.raises(UserError, match="--workdir: must be given"):
        parse_args(parser, ["--config", "configs/quickstart.py", "--coordinator", "localhost:1"])

"""Reward functions that do what a response says, in a module without jax; named `tests.hostile_rewards:NAME`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from jaxrl_llm.rewards.forms import batched

calls = 0


def obey(prompt: str, response: str, record: Any) -> Any:
    """The response's length, or what its first word orders; a record's "note" is a file for process ids."""
    order = response.partition(" ")[0]
    if order in ("children", "hidden"):  # one in its group, one in a session of its own
        own = subprocess.Popen(["sleep", "100"])
        away = subprocess.Popen(["sleep", "100"], start_new_session=True)
        found = [os.getpid(), own.pid, away.pid]
        if order == "hidden":  # and one that has given up all that it could be known by
            script = "import subprocess as s; print(s.Popen(['sleep', '100'], start_new_session=True, stdout=-3).pid)"
            found.append(int(subprocess.check_output([sys.executable, "-S", "-c", script], env={})))
        with open(record["note"], "w") as file:
            json.dump(found, file)
    match order:
        case "hang" | "children" | "hidden":
            time.sleep(100)
        case "regex":
            re.match(r"(a+)+$", "a" * 40 + "b")
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(3)
        case "fork":
            os.fork()
        case "fork-and-exit":
            if os.fork():
                os._exit(3)
            time.sleep(100)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(100)
        case "memory":
            return len(b"x" * 2**31)
        case "print":
            for stream in (sys.stdout, sys.__stdout__):
                print("\x00noise" * 10, file=stream, flush=True)
            os.write(1, b"\xff" * 1000)
            return sys.stdin.read() == "" and len(response)
        case "recursion":
            return obey(prompt, response, record)
        case "raise":
            raise RuntimeError("the reason")
        case "later":  # kills the worker while it has another row
            threading.Timer(0.3, os._exit, (4,)).start()
        case "wait":
            time.sleep(0.6)
        case "meet":  # goes on when its mark is one of three
            Path(record["note"], response).touch()
            while len(os.listdir(record["note"])) < 3:
                time.sleep(0.01)
        case "none":
            return None
        case "nan":
            return {"score": float("nan"), "kept": 1}
        case "text":
            return "1.0"
        case "huge":
            return {"score": 1.0, "text": "x" * 1_000_000}
        case "object":
            return {"score": 1.0, "what": object()}
        case "deep":
            nested: list[Any] = []
            for _ in range(100_000):
                nested = [nested]
            return {"score": 1.0, "nested": nested}
        case "modules":
            heavy = {"jax", "flax", "torch", "transformers"} & set(sys.modules)
            return {"score": len(heavy), "platform": os.environ["JAX_PLATFORMS"], "gpus": _visible()}
    return {"score": len(response), "end": response[-2:], "row": record.get("row")}


def _visible() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


def picky(prompt: str, response: str, record: Any) -> float | None:
    """Hangs on nothing, fails on a letter."""
    if not response:
        time.sleep(100)
    return None if response[0].isalpha() else 1.0


def count(prompt: str, response: str, record: Any) -> int:
    """How often it has been called: of each process."""
    global calls
    calls += 1
    return calls


@batched
def lengths(prompts: list[str], responses: list[str], records: list[Any]) -> list[Any]:
    if "hang" in responses:
        time.sleep(100)
    if "few" in responses:
        return [1.0]
    return [ValueError("empty") if not response else len(response) for response in responses]


def of_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> dict[str, Any]:
    return {"score": float(solution_str == ground_truth), "index": extra_info["index"]}


def of_verl_in_batches(data_sources: list[str], solution_strs: list[str], ground_truths: list[str]) -> list[float]:
    return [float(a == b) for a, b in zip(solution_strs, ground_truths, strict=True)]


def signalled(prompt: str, response: str, record: Any) -> float:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    return 1.0


def ends_a_child(prompt: str, response: str, record: Any) -> float:
    """As rewards with a time limit of their own do, by multiprocessing.Process.terminate."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    return float(os.WTERMSIG(status) == signal.SIGTERM)


# Rewards that wait for the run


def waiting_records(folder: str) -> list[dict[str, str]]:
    """Of two steps of four prompts; the second step's wait for a file `updating` in the folder."""
    return [{"prompt": f"{i}+1=?", "folder": folder if i >= 4 else ""} for i in range(8)]


def patient(prompt: str, response: str, record: Any) -> float:
    """Says that it has begun, by a file, and returns once the file that it waits for is there."""
    if record["folder"]:
        folder = Path(record["folder"])
        (folder / "begun").touch()
        while not (folder / "updating").exists():
            time.sleep(0.01)
    return float(len(response))

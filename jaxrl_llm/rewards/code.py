"""Runs a response's Python against the record's tests, in processes that are locked down. Off unless asked for.

Two processes: one runs the model's code, the other the tests, and only plain data passes between them, so that the
code can do what it likes to its own process (print, exit, patch assert's builtins, return objects that claim to equal
everything) and has still only returned values. Programs that are tested by stdin and stdout run alone; their output is
compared here. See docs/rewards.md for what this is not.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards.answers import CONTROL, LONGEST_PRED, in_tags
from jaxrl_llm.rewards.forms import Record, checked

SANDBOX = Path(__file__).with_name("sandbox.py")
LONGEST_CODE = 100_000  # characters
MOST_OUTPUT = 1_000_000  # bytes of a program's stdout, or of the tests' verdict
MOST_TESTS = 1_000
FENCE = re.compile(r"^[ \t]*```[ \t]*([A-Za-z0-9_+.-]*)[^\n`]*$", re.MULTILINE)
PYTHON = ("python", "py", "python3", "")
SLOWEST_START = 20.0  # seconds that a process may take to lock itself down; the response's time starts after that


def _check(
    run_model_code: bool = False,
    share: bool = False,
    seconds: float = 5.0,
    memory_mb: int = 512,
    file_mb: int = 10,
    namespaces: bool = True,
) -> None:
    if run_model_code is not True:
        raise UserError(
            "runs programs that the model has written on this machine; say code(run_model_code=True) if that is what "
            "you want, after reading what it does and does not protect from: docs/rewards.md, 'code'"
        )
    for name, value in (("seconds", seconds), ("memory_mb", memory_mb), ("file_mb", file_mb)):
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UserError(f"{name} is {value!r}; expected a number above 0")
    if not sys.platform.startswith("linux"):
        raise UserError(f"runs on Linux alone, this is {sys.platform}")
    if namespaces and "namespaces" not in protections():
        raise UserError(
            "there are no user namespaces here, so model code could reach the network and end other processes; in a "
            "container of its own without either, code(run_model_code=True, namespaces=False) does without"
        )


@checked(_check)
def code(
    prompt: str,
    response: str,
    record: Record,
    run_model_code: bool = False,
    share: bool = False,
    seconds: float = 5.0,
    memory_mb: int = 512,
    file_mb: int = 10,
    namespaces: bool = True,
) -> dict[str, Any]:
    """1 if the last ```python block of the response passes the record's tests, else 0.

    Args:
      run_model_code: has to be True.
      share: the score is the share of tests that pass; a HumanEval-like `test` is one.
      seconds: for everything that one response does, however many tests there are. The deadline of the process that
        scores has to be later.
      memory_mb, file_mb: of each process, and of each file that it writes.
      namespaces: False: without the namespaces that keep it off the network and other processes, if there are none.

    The record has `test_list` (MBPP: asserts, with test_setup_code), or `test` and `entry_point` (HumanEval), or
    `inputs` and `outputs` (texts on stdin and stdout, or with `fn_name` lists of arguments and results), itself, or in
    its answer (as JSON text or a dict).
    """
    if run_model_code is not True:
        raise UserError("code: say code(run_model_code=True) to run programs that the model has written")
    task = _task(record)
    text = last_block(response)
    if text is None or len(text) > LONGEST_CODE or "\0" in text:
        return {"score": 0.0, "passed": 0.0, "error": "no Python that can be read"}
    limits = {
        "memory_mb": int(memory_mb),
        "seconds": int(seconds) + 1,
        "file_mb": int(file_mb),
    }
    given = {"limits": limits, "namespaces": namespaces, "code": text.encode("utf-8", "replace").decode()}
    if "outputs" in task:
        passed, errors = _run_programs(given, task["inputs"], task["outputs"], seconds, share)
        total = len(task["outputs"])
    else:
        passed, errors = _run_tests(given, task, seconds)
        total = len(task["tests"])
    score = passed / total if share else float(passed == total)
    error = CONTROL.sub(" ", errors[0])[:LONGEST_PRED] if errors else None
    return {"score": score, "passed": passed / total, "error": error}


def last_block(response: str) -> str | None:
    r"""The last block marked as Python, or as nothing, that is closed or at the end; without any mark the whole text.

    >>> last_block("First\n```python\nx = 1\n```\nthen\n```python\nx = 2\n```\nDone.")
    'x = 2\n'
    """
    text = response.rpartition("</think>")[2][-2 * LONGEST_CODE :]
    inside = in_tags(text)
    text = text if inside is None else inside
    found, start = None, None
    marks = list(FENCE.finditer(text))
    for mark in marks:
        if start is None:
            start = mark
        elif not mark[1]:
            if start[1].lower() in PYTHON:
                found = text[start.end() + 1 : mark.start()]
            start = None
    if start is not None and start[1].lower() in PYTHON[:-1]:  # cut off before its end, or never closed
        found = text[start.end() + 1 :]
    return found if found is not None or marks else text


# --- the record


def _task(record: Record) -> dict[str, Any]:
    """{"setup", "tests", "entry_point"} or {"inputs", "outputs"}"""
    fields = _fields(record)
    setup = "\n".join(
        part if isinstance(part, str) else "\n".join(part)
        for part in (fields.get("test_setup_code"), fields.get("test_imports"))
        if part is not None
    )
    if (tests := fields.get("test_list")) is not None:
        tests = [tests] if isinstance(tests, str) else [str(test) for test in tests]
        task = {"setup": setup, "tests": tests, "entry_point": fields.get("entry_point")}
    elif isinstance(fields.get("test"), str) and isinstance(fields.get("entry_point"), str):
        name = fields["entry_point"]
        task = {"setup": setup, "tests": [f"{fields['test']}\n\ncheck({name})\n"], "entry_point": name}
    elif fields.get("inputs") is not None and fields.get("outputs") is not None:
        inputs, outputs = list(fields["inputs"]), list(fields["outputs"])
        if len(inputs) != len(outputs):
            raise ValueError(f"the record has {len(inputs)} inputs and {len(outputs)} outputs; expected as many")
        if name := fields.get("fn_name"):
            calls = [f"assert {name}(*{list(i)!r}) == {o!r}" for i, o in zip(inputs, outputs, strict=True)]
            task = {"setup": setup, "tests": calls, "entry_point": name}
        else:
            task = {"inputs": [_lines(text) for text in inputs], "outputs": [_lines(text) for text in outputs]}
    else:
        raise ValueError(
            "the record needs test_list, or test and entry_point, or inputs and outputs, itself or in its answer "
            f"(found: {list(record)})"
        )
    count = len(task["tests"] if "tests" in task else task["outputs"])
    if not 1 <= count <= MOST_TESTS:
        raise ValueError(f"the record has {count} tests; expected 1 to {MOST_TESTS}")
    return task


def _fields(record: Record) -> dict[str, Any]:
    from jaxrl_llm.rewards.gold import raw_gold

    fields: dict[str, Any] = {}
    for given in (record.get("input_output"), raw_gold(record)):
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                given = None
        if isinstance(given, list):
            given = {"test_list": given}
        if isinstance(given, Mapping):
            fields |= given
    return fields | {key: value for key, value in record.items() if value is not None}


def _lines(text: Any) -> str:
    return text if isinstance(text, str) else "\n".join(map(str, text)) if isinstance(text, list) else str(text)


# --- running


@functools.lru_cache(maxsize=1)
def protections() -> frozenset[str]:
    """What this machine has to shut a process off: some of namespaces, landlock, seccomp. docs/rewards.md says what is
    lost without each."""
    limits = {"memory_mb": 512, "seconds": 5, "file_mb": 1}
    given = {"limits": limits, "namespaces": False, "code": "", "stdin": ""}
    try:
        with _folder() as folder, _started("script", given, folder) as (_, said):
            return frozenset(said.decode().split()[1:])
    except RuntimeError:
        return frozenset()


def _run_tests(given: dict[str, Any], task: dict[str, Any], seconds: float) -> tuple[int, list[str]]:
    to_answer, to_tests, verdict = os.pipe(), os.pipe(), os.pipe()
    opened = [*to_answer, *to_tests, *verdict]
    setup = {key: value for key, value in given.items() if key != "code"} | task
    try:
        with (
            _folder() as folder,
            _folder() as other,
            _started("answer", given, folder, to_answer[0], to_tests[1]),
            _started("tests", setup, other, to_tests[0], to_answer[1], verdict[1]),
        ):
            for end in (to_answer[0], to_tests[1], to_tests[0], to_answer[1], verdict[1]):
                os.close(end)
                opened.remove(end)
            deadline = time.monotonic() + seconds
            said = _read(verdict[0], deadline)
            if not said.endswith(b"\n"):
                return 0, [
                    "the tests did not end in time" if time.monotonic() >= deadline else "the tests' process ended"
                ]
    finally:
        for end in opened:
            os.close(end)
    report = json.loads(said)
    if report["broken"] is not None:
        raise ValueError(f"the record's tests cannot be run: {report['broken']}")
    results = report["results"]
    return sum(result is None for result in results), [result for result in results if result is not None]


def _run_programs(
    given: dict[str, Any], inputs: Sequence[str], outputs: Sequence[str], seconds: float, share: bool
) -> tuple[int, list[str]]:
    passed, errors = 0, []
    for at, (stdin, wanted) in enumerate(zip(inputs, outputs, strict=True)):
        if seconds <= 0:
            errors.append(f"test {at}: no time is left")
            break
        with _folder() as folder, _started("script", {**given, "stdin": stdin}, folder) as (process, _):
            start = time.monotonic()
            output = _output(process, start + seconds)
            seconds -= time.monotonic() - start
        if output is not None and _same_output(output.decode("utf-8", "replace"), wanted):
            passed += 1
            continue
        errors.append(f"test {at}: {'no end, too much output or an error' if output is None else 'another output'}")
        if not share:
            break
    return passed, errors


def _same_output(found: str, wanted: str) -> bool:
    """Line by line, but for white space at the ends of lines and of the whole."""
    return [line.rstrip() for line in found.rstrip().splitlines()] == [
        line.rstrip() for line in wanted.rstrip().splitlines()
    ]


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="code_reward_")
    try:
        yield folder
    finally:
        # Code may have taken its own rights on it away.
        with contextlib.suppress(OSError):
            os.chmod(folder, 0o700)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _started(
    role: str, given: dict[str, Any], folder: str, *pipes: int
) -> Iterator[tuple[subprocess.Popen[bytes], bytes]]:
    """A process that has locked itself down, and what it said of that; all of its group is gone afterwards.

    Raises:
      RuntimeError: it could not. That is before it sees any code, so that no code can bring it about.
    """
    output = subprocess.PIPE if role == "script" else subprocess.DEVNULL
    ready, says_ready = os.pipe()
    with tempfile.TemporaryFile() as file:  # and not a pipe, which the process might never read
        file.write(json.dumps(given).encode())
        file.seek(0)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-W", "ignore", str(SANDBOX), role, *map(str, (says_ready, *pipes))],
                stdin=file,
                stdout=output,
                stderr=subprocess.DEVNULL,
                pass_fds=(says_ready, *pipes),
                cwd=folder,
                env={"LC_ALL": "C.UTF-8"},
                start_new_session=True,
            )
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(says_ready)
    try:
        said = _read(ready, time.monotonic() + SLOWEST_START)
        if not said.startswith(b"ready"):
            raise RuntimeError("code: a process could not lock itself down, and has run nothing")
        yield process, said
    finally:
        os.close(ready)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _output(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """All of a program's stdout; None if it did not end well and in time, or wrote too much."""
    assert process.stdout is not None
    output = _read(process.stdout.fileno(), deadline)
    try:
        status = process.wait(max(deadline - time.monotonic(), 0.01))
    except subprocess.TimeoutExpired:
        return None
    return output if status == 0 and len(output) <= MOST_OUTPUT else None


def _read(stream: int, deadline: float) -> bytes:
    """What a pipe brings until it is closed, the deadline has come, or it is too much."""
    parts, size = [], 0
    while size <= MOST_OUTPUT and (left := deadline - time.monotonic()) > 0:
        if not select.select([stream], [], [], left)[0]:
            break
        part = os.read(stream, 1 << 16)
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)

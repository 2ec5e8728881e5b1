"""One worker as the parent sees it: a process that is started, asked, and killed with all that it has started."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards.forms import LARGEST_SCORE, Record, Result
from jaxrl_llm.rewards.processes import MARK, kill_children, kill_group, kill_marked
from jaxrl_llm.rewards.worker import LENGTH

START_SECONDS = 120.0  # until a worker must be ready: imports on a loaded machine
REPLY_PER_ROW = 200_000  # bytes; what `forms` lets through is always less
LOOK = 0.25  # seconds between looks at whether a silent worker is still there

# What a worker starts with: the parent's import path, and not this script's folder, in which a `numbers.py` stands.
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from jaxrl_llm.rewards.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
ENVIRONMENT = {
    # A user's module may import jax: it must not take the accelerator that trains.
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    # Workers are one per core; threads of theirs would only get in each other's way.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
}


class WorkerDied(Exception):
    """A worker is gone, or says what no worker says."""


class WorkerProcess:
    """A process of its own session. What is raised by `ready` and `ask` but UserError leaves it to be killed."""

    def __init__(self, settings: bytes, mark: str) -> None:
        """
        Args:
          settings: pickled, what `worker.main` reads first.
          mark: its own, see `processes.MARK`.
        """
        self.served = 0  # tasks
        self._mark, self._lock, self._ready, self.killed = mark, threading.RLock(), False, False
        self._started = time.monotonic()
        self._channel, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as unless_started:
            unless_started.callback(self._channel.close)
            path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", PROGRAM, str(theirs.fileno()), str(os.getpid()), path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_stderr(),
                stderr=_stderr(),
                start_new_session=True,
                env={**os.environ, **ENVIRONMENT, MARK: mark},
            )
            unless_started.pop_all()
        # It seldom blocks, since the socket holds some 200 kB; if it fails, `ready` will say so.
        with contextlib.suppress(OSError):
            self._send(settings, self._started + START_SECONDS)

    def ready(self) -> None:
        """Waits until it is.

        Raises:
          UserError: a function cannot be loaded.
          WorkerDied, TimeoutError: it has not come up.
        """
        if self._ready:
            return
        reply = self._receive(self._started + START_SECONDS, REPLY_PER_ROW)
        if "error" in reply:
            raise UserError(str(reply["error"]))
        if reply != {"ready": True}:
            raise WorkerDied("it said something else than that it is ready")
        self._ready = True

    def ask(
        self,
        index: int,
        prompts: Sequence[str],
        responses: Sequence[str],
        records: Sequence[Record],
        seconds: float,
    ) -> list[Result]:
        """Scores rows by the function of that index; the clock starts now.

        Raises:
          UserError: the function returned what is no score, or a record cannot be sent.
          TimeoutError: there is no answer in time.
          WorkerDied: there will be none.
        """
        self.served += 1
        number = self.served
        try:
            message = pickle.dumps((number, index, list(prompts), list(responses), list(records)))
        except Exception as error:
            raise UserError(
                f"a record cannot be sent to a reward worker ({type(error).__name__}: {error}); use plain data in "
                "records, or set reward.num_workers=0"
            ) from error
        deadline = time.monotonic() + seconds
        self._send(message, deadline)
        reply = self._receive(deadline, REPLY_PER_ROW * max(len(responses), 1))
        if isinstance(reply.get("error"), str):
            raise UserError(reply["error"])
        results = _results(reply)
        if reply.get("number") != number or results is None or len(results) != len(responses):
            raise WorkerDied("it did not keep to the protocol")
        return results

    def _send(self, message: bytes, deadline: float) -> None:
        try:
            for part in (LENGTH.pack(len(message)), message):
                self._channel.settimeout(max(deadline - time.monotonic(), 0.001))
                self._channel.sendall(part)
        except TimeoutError:
            raise
        except OSError as error:
            raise WorkerDied(self._how_it_ended()) from error

    def _receive(self, deadline: float, limit: int) -> dict[str, Any]:
        (size,) = LENGTH.unpack(self._exactly(LENGTH.size, deadline))
        if size > limit:
            raise WorkerDied(f"it answered with {size} bytes, more than {limit}")
        try:
            reply = json.loads(self._exactly(size, deadline))
        except (ValueError, RecursionError) as error:
            raise WorkerDied("it did not keep to the protocol") from error
        if not isinstance(reply, dict):
            raise WorkerDied("it did not keep to the protocol")
        return reply

    def _exactly(self, size: int, deadline: float) -> bytes:
        parts = []
        while size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            ended = self._ended()  # looked at before the socket, so that its last words are not lost
            try:
                self._channel.settimeout(min(left, LOOK))
                part = self._channel.recv(min(size, 2**20))
            except TimeoutError:
                if ended:  # a process that it has forked holds the other end open
                    raise WorkerDied(self._how_it_ended()) from None
                continue
            except OSError:
                part = b""
            if not part:
                raise WorkerDied(self._how_it_ended())
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _ended(self) -> bool:
        """Whether the process is over, without waiting for it: its id, which is its group's, must not be free yet."""
        if not hasattr(os, "waitid"):  # macOS, before Python 3.13
            return False
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        return True

    def _how_it_ended(self) -> str:
        """To be asked once nothing more comes from it; it is killed then."""
        end = time.monotonic() + 1.0  # a socket is closed some moments before its process is over
        while not (ended := self._ended()) and time.monotonic() < end:
            time.sleep(0.005)
        code = self.kill()
        if code is None or (code == -signal.SIGKILL and not ended):
            return "it closed the connection"
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"

    def kill(self) -> int | None:
        """Kills it and all that it has started; its exit code, negative for a signal."""
        with self._lock:
            if not self.killed:
                self.killed = True
                kill_children(self.process.pid)
                kill_group(self.process.pid)  # before it is waited for: afterwards the id may be another's
                kill_marked(self._mark)
                with contextlib.suppress(OSError):
                    self._channel.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
                self._channel.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(10)
            return self.process.returncode


def _results(reply: dict[str, Any]) -> list[Result] | None:
    """A reply's results; None if it has none, or others than a worker's."""
    results = []
    rows = reply.get("results")
    for row in rows if isinstance(rows, list) else [None]:
        if not isinstance(row, list) or len(row) != 3:
            return None
        score, extras, failure = row
        if not isinstance(extras, dict):
            return None
        if isinstance(failure, str) and score is None:
            results.append(Result(extras=extras, failure=failure))
        elif failure is None and isinstance(score, float) and abs(score) <= LARGEST_SCORE:
            results.append(Result(score, extras))
        else:
            return None
    return results


def _stderr() -> int:
    """Where workers print: the standard error, if there is one."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2

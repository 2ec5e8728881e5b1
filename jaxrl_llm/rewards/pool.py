"""Reward functions in processes of their own, which a deadline ends: no thread and no signal could end a regular
expression, and a crash is not the run's.

One thread a worker takes tasks from a queue, a task being one row (of a batched function: all rows), asks its worker
and replaces it where it has to. One more worker stands ready, so that a replacement is there at once. A guard, a small
process, ends what is left if this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import secrets
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards import processes
from jaxrl_llm.rewards.forms import Record, Result
from jaxrl_llm.rewards.reward_set import REWARD_MODEL, Reward, RewardSet
from jaxrl_llm.rewards.worker_process import START_SECONDS, WorkerDied, WorkerProcess

MOST_BY_DEFAULT = 8  # workers
SPARES = 1
STARTS = 3  # workers in a row that do not come up, after which none will


def pooled(
    rewards: RewardSet,
    *,
    num_workers: int = -1,
    timeout: float = 10.0,
    memory_limit: float = 4.0,
    others: Sequence[Reward] = (),
    peers: Peers | None = None,
) -> RewardSet:
    """The rewards, with those over text to be scored by a pool of worker processes, which `close` ends. Nothing is
    started where there are none: JAX rewards and a reward model stay here.

    Args:
      num_workers: -1: one per CPU core, but at most 8; 0: no pool, and no deadline.
      timeout: seconds that a row may take, a call of a batched function that times its rows.
      memory_limit: GB of each worker and of each process that it starts; 0: none.
      others: functions that are no columns of the scores but are called in the same workers, by `RewardPool.start`.
      peers: the processes of the run, of which each scores its own rows; None: this one alone.

    Raises:
      UserError: a function cannot be sent to a worker.

    >>> from jaxrl_llm.rewards import make_rewards
    >>> with pooled(make_rewards(["number"]), num_workers=1) as rewards:
    ...     rewards.score(["What is 3+4?"], ["It is 7."], [{"answer": "7"}]).scores.tolist()
    [[1.0]]
    """
    functions = [reward for reward in rewards.rewards if reward.form != "jax" and reward.name != REWARD_MODEL]
    functions += others
    if num_workers == 0 or not functions:
        return rewards
    count = min(_cores(), MOST_BY_DEFAULT) if num_workers < 0 else num_workers
    pool = RewardPool(functions, num_workers=count, timeout=timeout, memory_limit=memory_limit, peers=peers)
    return RewardSet(rewards.rewards, pool)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class RewardPool:
    """Workers that score rows; they are starting when this returns. Ended by `close`, when it is no longer referred to,
    at the interpreter's exit, and when this process is killed."""

    def __init__(
        self,
        rewards: Sequence[Reward],
        *,
        num_workers: int,
        timeout: float,
        memory_limit: float = 0.0,
        peers: Peers | None = None,
    ) -> None:
        """
        Raises:
          UserError: a function cannot be sent to a worker.
        """
        if not sys.executable:
            raise UserError("sys.executable names no Python to start reward workers with; set reward.num_workers=0")
        self.names = {reward.name: index for index, reward in enumerate(rewards)}
        self.num_workers, self._peers = num_workers, peers
        functions = [(reward.name, reward.form, reward.source or _pickled(reward)) for reward in rewards]
        settings = pickle.dumps({"functions": functions, "memory": int(memory_limit * 2**30)})
        self._batched = {reward.name: reward.form.endswith("batched") for reward in rewards}
        # Its threads must not keep this object alive, which would then never be given up.
        self._crew = _Crew(list(self.names), settings, num_workers, timeout)
        self.mark = self._crew.mark  # with which the marks of its workers begin, see `processes`
        self.close = weakref.finalize(self, self._crew.close)

    def start(
        self, name: str, prompts: Sequence[str], responses: Sequence[str], records: Sequence[Record]
    ) -> Callable[[], list[Result]]:
        """Begins to score rows; what is returned waits for their results, in the order of the rows.

        Raises (when waited for):
          UserError: the function returned what is no score, a worker cannot load it, or a record cannot be sent.
        """
        index, rows, peers = self.names[name], len(responses), self._peers
        parts = [slice(0, rows)] if self._batched[name] else [slice(row, row + 1) for row in range(rows)]
        own = parts if peers is None else parts[peers.index :: peers.count]
        futures = [self._crew.add(index, prompts[part], responses[part], records[part]) for part in own]

        def wait(pool: RewardPool = self) -> list[list[Result]]:  # which lives until then
            return [future.result() for future in futures]

        def joined() -> list[Result]:
            found = wait() if peers is None else _shared(wait, peers)
            return [result for part in found for result in part]

        return joined


def _shared(wait: Callable[[], list[list[Result]]], peers: Peers) -> list[list[Result]]:
    """The results of the parts of every process, in the parts' order. What one of them raises all of them do: a process
    alone that went on or ended would leave the others waiting for it."""
    try:
        own: list[list[Result]] | Exception = wait()
    except Exception as error:
        own = error
    by_process = peers.share(own)
    for found in by_process:
        if isinstance(found, Exception):
            raise found
    return [by_process[part % peers.count][part // peers.count] for part in range(sum(map(len, by_process)))]


class Peers(Protocol):
    """The processes of a run, see peers.py."""

    @property
    def index(self) -> int: ...
    @property
    def count(self) -> int: ...
    def share(self, value: Any, /) -> list[Any]: ...


class _Task(NamedTuple):
    future: Future[list[Result]]
    index: int  # of the function
    prompts: Sequence[str]
    responses: Sequence[str]
    records: Sequence[Record]


class _Closed(RuntimeError):
    """The pool is closed: what was asked of it will not be answered."""

    def __init__(self) -> None:
        super().__init__("the reward workers have been closed")


class _Crew:
    """The threads, their workers and what these share."""

    def __init__(self, names: Sequence[str], settings: bytes, count: int, timeout: float) -> None:
        self._names, self._settings, self._timeout = names, settings, timeout
        self._owner, self.mark = os.getpid(), f"{os.getpid()}-{secrets.token_hex(8)}."
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # Reentrant: the garbage collector may call `close` in a thread that holds it.
        self._lock = threading.RLock()
        self._closed, self._broken, self._started = False, "", 0
        self._workers: set[WorkerProcess] = set()
        self._spares: list[WorkerProcess] = []
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", processes.__file__, str(os.getpid()), self.mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._threads = [
            threading.Thread(target=self._serve, name=f"reward worker {i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, index: int, prompts: Sequence[str], responses: Sequence[str], records: Sequence[Record]) -> Future:
        task = _Task(Future(), index, prompts, responses, records)
        with self._lock:
            if self._closed:
                raise _Closed
            self._tasks.put(task)
        return task.future

    def close(self) -> None:
        """Ends all workers; what is not scored yet never will be."""
        with self._lock:
            if self._closed or os.getpid() != self._owner:  # a forked process has not these children
                return
            self._closed = True
            workers = list(self._workers)
        # Before any thread ends: Linux would kill the workers that it has started (`worker._die_with`), and what they
        # leave behind would be nobody's.
        for worker in workers:
            worker.kill()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(10)
        with contextlib.suppress(queue.Empty):
            while True:
                if task := self._tasks.get_nowait():
                    task.future.set_exception(_Closed())
        with contextlib.suppress(OSError):
            assert self._guard.stdin is not None
            self._guard.stdin.close()
        try:
            self._guard.wait(10)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()

    def _serve(self) -> None:
        """A thread's life."""
        worker: WorkerProcess | None = None
        while True:
            if worker is None:
                with contextlib.suppress(Exception):  # the next task is told
                    worker = self._ready()
            task = self._tasks.get()
            if task is None:
                break
            try:
                worker, results = self._answer(task, worker or self._ready())
            except BaseException as error:
                if worker is not None and (worker.killed or not isinstance(error, UserError)):
                    self._end(worker)  # it may have been asked and not have answered
                    worker = None
                task.future.set_exception(error)
            else:
                task.future.set_result(results)
        if worker is not None:
            self._end(worker)

    def _answer(self, task: _Task, worker: WorkerProcess) -> tuple[WorkerProcess | None, list[Result]]:
        """The task's results, and the worker that has given them, if it still lives."""
        name, rows = self._names[task.index], len(task.responses)
        seconds = self._timeout * max(rows, 1)
        while True:
            try:
                return worker, worker.ask(task.index, task.prompts, task.responses, task.records, seconds)
            except TimeoutError:
                self._end(worker)
                what = "no answer" if rows == 1 else f"no answer for {rows} rows"
                failure = f"{what} within {seconds:g} s (reward.timeout); its worker has been killed"
            except WorkerDied as error:
                self._end(worker)
                if self._closed:
                    raise _Closed from None
                # What an earlier row has left behind, a thread or a process, may have done it. A fresh worker tells.
                if worker.served > 1:
                    worker = self._ready()
                    continue
                failure = f"its worker has died: {error}"
            return None, [Result(failure=f"reward {name!r}: {failure}")] * rows

    def _ready(self) -> WorkerProcess:
        """A worker that can be asked.

        Raises:
          UserError: there will be none.
        """
        why = ""
        for _ in range(STARTS):
            if self._broken:
                break
            worker = self._take()
            try:
                worker.ready()
            except UserError as error:
                self._end(worker)
                self._broken = str(error)
            except (WorkerDied, TimeoutError) as error:
                self._end(worker)
                why = str(error) or f"it was not ready after {START_SECONDS:g} s"
            else:
                return worker
        else:
            self._broken = (
                f"reward workers do not start: {why}; is reward.memory_limit too low? "
                "reward.num_workers=0 scores in this process"
            )
        if self._closed:
            raise _Closed
        raise UserError(self._broken)

    def _take(self) -> WorkerProcess:
        """A worker that has been started, a spare one if there is one; and another spare one for later.

        Raises:
          UserError: no process can be started, for as long as a worker may take to start.
        """
        end = time.monotonic() + START_SECONDS
        while True:
            try:
                with self._lock:
                    worker = self._spares.pop() if self._spares else self._start()
                    with contextlib.suppress(OSError):
                        if len(self._spares) < SPARES:
                            self._spares.append(self._start())
                    return worker
            except OSError as error:
                if time.monotonic() > end:
                    raise UserError(f"no reward worker can be started: {error}; lower reward.num_workers") from error
                time.sleep(0.2)  # a row may be forking on and on; its deadline will end it

    def _start(self) -> WorkerProcess:
        if self._closed:
            raise _Closed
        self._started += 1
        worker = WorkerProcess(self._settings, f"{self.mark}{self._started}.")
        self._workers.add(worker)
        self._tell_guard(f"+{worker.process.pid}")
        return worker

    def _end(self, worker: WorkerProcess) -> None:
        worker.kill()
        with self._lock:
            self._workers.discard(worker)
            self._tell_guard(f"-{worker.process.pid}")

    def _tell_guard(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # it may have been killed, or closed
            assert self._guard.stdin is not None
            os.write(self._guard.stdin.fileno(), f"{line}\n".encode())


def _pickled(reward: Reward) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps(reward.function)
    except Exception as error:
        raise UserError(
            f"reward {reward.name!r} cannot be sent to a worker process ({type(error).__name__}: {error}); give it as "
            "module:function, or set reward.num_workers=0 to score in this process"
        ) from error

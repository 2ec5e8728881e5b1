"""A watchdog: a phase that takes too long ends the process with exit code 75, and the stacks tell where it was.

A process can be stuck in two ways. Where something waits (a reward that sleeps, a compilation, a collective), a
thread of Python's still runs: it writes all stacks to stderr and to the run's stacks.txt, says in events.jsonl how the
run ended, and exits. Code that never gives the interpreter's lock back (a regular expression that backtracks) stops
that thread too: then faulthandler, whose thread is C, writes the stacks to stderr, and a timer of the system, which
calls the C library's `_exit`, ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxrl_llm.errors import TRY_AGAIN

STACKS = "stacks.txt"
LATER = 5.0  # seconds after which a thread that has not ended the process is taken to be stuck itself
STDERR = 2


class Watchdog:
    """`with watchdog.watching(): … with watchdog.phase("gen"): …`. Until it watches, a phase takes its time."""

    def __init__(self, seconds: float = 0.0, folder: str | Path | None = None) -> None:
        """
        Args:
          seconds: that a phase may take; 0: any time.
          folder: of the run, for stacks.txt, if it is there by then.
        """
        self._seconds, self._folder = seconds, None if folder is None else Path(folder)
        self._phase, self._deadline, self._watched = "", float("inf"), False
        self._exit: _ExitTimer | None = None
        self.tell: Callable[[str], None] | None = None  # told why the process ends, just before

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        if not self._seconds:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="watchdog", daemon=True)
        self._watched, self._exit = True, _ExitTimer.make()
        thread.start()
        try:
            yield
        finally:
            self._arm("")
            self._watched = False
            ended.set()
            thread.join()
            if self._exit:
                self._exit.delete()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer = self._phase
        self._arm(name)
        try:
            yield
        finally:
            self._arm(outer)

    def alive(self) -> None:
        """The phase has got somewhere: its time begins again."""
        self._arm(self._phase)

    def _arm(self, phase: str) -> None:
        """Sets the clocks for a phase; "": stops them."""
        self._phase = phase
        if not self._watched:
            return
        self._deadline = time.monotonic() + self._seconds if phase else float("inf")
        if self._exit:
            self._exit.set(self._seconds + 2 * LATER if phase else 0.0)
        if phase:  # where the system has no such timer, faulthandler ends the process, with its exit code 1
            with contextlib.suppress(RuntimeError):  # memory is short: no thread. The phase will say so better
                faulthandler.dump_traceback_later(self._seconds + LATER, file=STDERR, exit=self._exit is None)
        else:
            faulthandler.cancel_dump_traceback_later()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(min(1.0, self._seconds / 10)):
            if time.monotonic() > self._deadline:
                self._end(self._phase)

    def _end(self, phase: str) -> None:
        where = f"; stacks in {self._folder / STACKS}" if self._folder else ""
        why = (
            f"the phase {phase} takes longer than trainer.phase_timeout = {self._seconds:g} s: it is taken to be stuck "
            f"(raise it if the phase is only slow){where}; the same command goes on from the newest checkpoint"
        )
        try:  # a disk that is stuck may stop this too: the clocks behind it still run
            os.write(STDERR, f"\nerror: {why}\n".encode())
            faulthandler.dump_traceback(STDERR, all_threads=True)
            if self._folder and self._folder.is_dir():
                with (self._folder / STACKS).open("a") as file:
                    file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')} {why}\n")
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
            if self.tell:
                self.tell(why)
        finally:
            sys.stdout.flush()
            os._exit(TRY_AGAIN)


class _Event(ctypes.Structure):
    """struct sigevent of Linux: glibc and musl, 64 bits."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_char * 32),
    )


class _Times(ctypes.Structure):
    """struct itimerspec: every, then first, each in seconds and nanoseconds."""

    _fields_ = (("every", ctypes.c_long * 2), ("first", ctypes.c_long * 2))


class _ExitTimer:
    """Calls `_exit(75)` in a thread of the C library's, whoever holds the interpreter's lock."""

    CLOCK_MONOTONIC, SIGEV_THREAD = 1, 2

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        leave = ctypes.cast(self._library._exit, ctypes.c_void_p)
        event = _Event(value=TRY_AGAIN, notify=self.SIGEV_THREAD, function=leave)
        self._timer = ctypes.c_void_p()
        if self._library.timer_create(self.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create")

    @classmethod
    def make(cls) -> _ExitTimer | None:
        """None where the system has none."""
        if sys.platform != "linux" or sys.maxsize < 2**32:
            return None
        try:
            return cls()
        except (OSError, AttributeError):
            return None

    def set(self, seconds: float) -> None:
        """From now; 0: never."""
        whole, rest = divmod(seconds, 1)
        times = _Times(first=(int(whole), int(rest * 1e9)))
        self._library.timer_settime(self._timer, 0, ctypes.byref(times), None)

    def delete(self) -> None:
        self._library.timer_delete(self._timer)

"""What can go wrong, by exit code (DESIGN 8), how a command ends, and the nearest valid name for an error's text."""

from __future__ import annotations

import _thread
import contextlib
import difflib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO


class UserError(Exception):
    """Something the user gave is wrong: a config key, a file, a record, a reward function. Exit code 2."""

    exit_code = 2
    kind = ""  # of a record, what sort of thing is wrong with it, see `of_kind`


class RunAborted(Exception):
    """The run cannot go on: non-finite numbers, or a reward that fails too often. Exit code 3."""

    exit_code = 3


class StorageError(Exception):
    """A checkpoint cannot be written or read. Exit code 4."""

    exit_code = 4


class OutOfMemory(Exception):
    """A device or the host has too little memory for the run. Exit code 5."""

    exit_code = 5


TRY_AGAIN = 75  # sysexits.h, EX_TEMPFAIL


class TryAgain(BaseException):
    """The run was stopped from outside, and the same command goes on. Exit code 75. Like KeyboardInterrupt no
    Exception, so that nothing takes it for a failure of its own."""

    exit_code = TRY_AGAIN


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Puts what was wrong, a config key say, in front of a user error's text."""
    try:
        yield
    except UserError as error:
        named = UserError(f"{what}: {error}")
        named.kind = error.kind
        raise named from error


@contextlib.contextmanager
def of_kind(kind: str) -> Iterator[None]:
    """What is wrong with a record is of this kind, unless it is said to be of another already."""
    try:
        yield
    except UserError as error:
        error.kind = error.kind or kind
        raise


def nearest(name: str, valid: Iterable[str]) -> str:
    """A clause that names the nearest valid name, or all of them if none is near.

    >>> nearest("clip_ration", ["clip_ratio", "epochs"])
    "did you mean 'clip_ratio'?"
    >>> nearest("zzz", ["clip_ratio", "epochs"])
    'valid: clip_ratio, epochs'
    """
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"valid: {', '.join(valid)}"


def nearest_path(path: str | Path) -> str:
    """A clause that names what lies where a path is not, if its name is near; else "".

    >>> nearest_path("configs/bose.py"), nearest_path("confgs/base.py"), nearest_path("zzz")
    ("did you mean 'configs/base.py'?", "did you mean 'configs/base.py'?", '')
    """
    path, found = Path(path).expanduser(), Path()
    if path.exists():
        return ""
    for part in path.parts:
        if not (found / part).exists():
            there = (x.name for x in found.iterdir()) if found.is_dir() else ()
            close = difflib.get_close_matches(part, sorted(there), n=1, cutoff=0.6)
            if not close:
                return ""
            part = close[0]
        found /= part
    return f"did you mean {str(found)!r}?"


INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended


FULL = (errno.ENOSPC, errno.EDQUOT)


def exit_code(body: Callable[[], None]) -> int:
    """Runs a command's body: 0 done, 2 user error, 3 numeric or reward abort, 4 storage, 5 out of memory, 75 try again
    (stopped from outside, or stuck), 130 interrupted (DESIGN 8). Any other exception is a bug, and goes on up."""
    open_streams()
    try:
        with _asked_again():
            body()
    except (UserError, RunAborted, StorageError, OutOfMemory) as error:
        say(f"error: {error}", sys.stderr)
        return error.exit_code
    except TryAgain as error:
        say(f"stopped: {error}", sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted", sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if is_out_of_memory(error):
            notes = getattr(error, "__notes__", [])
            why = str(error) or f"the host has too little ({type(error).__name__})"
            say("\n".join([f"error: out of memory: {why}", *notes]), sys.stderr)
            return OutOfMemory.exit_code
        if isinstance(error, OSError) and error.errno in FULL:
            say(f"error: {error}", sys.stderr)
            return StorageError.exit_code
        raise
    return 0


@contextlib.contextmanager
def _asked_again() -> Iterator[None]:
    """Who interrupts a command while Python runs a finalizer, or a callback of its garbage collector (jax has one),
    interrupts that alone: Python prints that it ignores it, and goes on. Here the main thread is asked once more, a
    moment later."""
    before, timers = sys.unraisablehook, list[threading.Timer]()

    def hook(found: sys.UnraisableHookArgs) -> None:
        if not issubclass(found.exc_type, KeyboardInterrupt | TryAgain):
            before(found)
            return
        # Of the signals that make a TryAgain (signals.py) any will do.
        number = signal.SIGINT if issubclass(found.exc_type, KeyboardInterrupt) else signal.SIGTERM
        timers.append(threading.Timer(0.05, _thread.interrupt_main, (number,)))
        timers[-1].daemon = True
        timers[-1].start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in timers:
            timer.cancel()


def open_streams() -> None:
    """Where a process was started without one of the standard streams, nothing else may take its number: what is
    printed would go into a checkpoint."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints a line, if there is anywhere to print it: a closed pipe or a full disk is no reason to fail.

    Args:
      stream: None is stdout.
    """
    with contextlib.suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


def put(text: str, end: str = "\n") -> None:
    """Prints a result on stdout. A reader who has seen enough (`… | head -1`) is no failure, a full disk is one.

    Raises:
      StorageError: it cannot be written.
    """
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        pass
    except OSError as error:
        raise StorageError(f"standard output: cannot be written: {error}") from error


# Of XLA's: on a CPU the second may stand within an INTERNAL error.
NO_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory allocating", "std::bad_alloc")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or a device (XLA has several ways to say so) had too little memory.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))
    (True, False)
    """
    # By name: jax is not imported here. The second is the first one's name in older versions.
    from_device = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't start new thread" in str(error)):
        return True
    return from_device and any(text in str(error) for text in NO_MEMORY)


def leave(code: int) -> None:
    """Ends the process. After an interruption or a signal at once: threads that still compile can crash an orderly end,
    and so can all of them where there is no memory.
    One of several processes leaves the others first: an orderly end would wait for them, and they for it, without end.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):  # or Python would try again at its end, and change the exit code
                with contextlib.suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if code in (INTERRUPTED, OutOfMemory.exit_code):
        os._exit(code)
    jax = sys.modules.get("jax")
    if code and jax is not None and jax.distributed.is_initialized():
        with contextlib.suppress(Exception):
            jax.distributed.shutdown()  # waits for the others, but not for long (peers.py)
        os._exit(code)
    if code == TRY_AGAIN:
        os._exit(code)
    sys.exit(code)

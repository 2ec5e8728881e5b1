"""Ending processes and all that they have started; also a program, the guard, that does so when the run is gone.

The guard runs this file by itself, so that only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Every worker has a mark of its own in its environment, and what it starts inherits it.
MARK = "JAXRL_LLM_REWARD_WORKER"
SWEEPS = 200  # at most: a process that forks on and on may be faster than us
PROC = Path("/proc")


def kill_group(group: int) -> None:
    """Kills a process group; one that is gone is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Kills every process whose mark begins with `mark`, those too that have left their group; nothing where there is
    no /proc."""
    for _ in range(SWEEPS):
        found = list(marked(mark))
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.005)  # a killed process is there for some moments


def kill_children(pid: int) -> None:
    """Kills what a process, which is stopped for that, has started, directly or not; nothing where there is no /proc.

    As a worker adopts orphans (`worker.main`), this finds those too that have left its group and given up its mark.
    """
    if not PROC.is_dir():
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGSTOP)
    for _ in range(SWEEPS):
        found = _descendants(pid)
        for child in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.005)


def _descendants(pid: int) -> list[int]:
    """Those of a process that are alive."""
    children: dict[int, list[int]] = {}
    alive = set()
    for entry in PROC.iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal():
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append(int(entry.name))
                if state not in "ZX":
                    alive.add(int(entry.name))
    found = list(children.get(pid, ()))
    for child in found:  # which grows
        found += children.get(child, ())
    return [child for child in found if child in alive]


def marked(mark: str) -> Iterator[int]:
    """The processes, other than this one, whose mark begins with `mark`."""
    wanted = f"{MARK}={mark}".encode()
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        # A process may end, or belong to someone else.
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                environment = (entry / "environ").read_bytes()
                if environment.startswith(wanted) or b"\0" + wanted in environment:
                    yield int(entry.name)


def guard(parent: int, mark: str) -> None:
    """Waits until the parent closes its end of stdin or is gone, then kills what it has left behind.

    Lines on stdin name the groups that are alive: "+123", then "-123" when the parent has ended it itself.
    """
    groups: set[int] = set()
    rest = b""
    while os.getppid() == parent:
        # With a timeout: a process that the parent has forked may hold the other end open.
        if not select.select([0], [], [], 1.0)[0]:
            continue
        read = os.read(0, 65_536)
        if not read:
            break
        *lines, rest = (rest + read).split(b"\n")
        for line in lines:
            (groups.add if line.startswith(b"+") else groups.discard)(int(line[1:]))
    for group in groups:
        kill_group(group)
    kill_marked(mark)


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2])

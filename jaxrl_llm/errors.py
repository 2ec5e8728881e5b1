"""What can go wrong, by exit code (DESIGN 8), how a command ends, and the nearest valid name for an error's text."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


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


def exit_code(body: Callable[[], None]) -> int:
    """Runs a command's body: 0 done, 2 user error, 3 numeric or reward abort, 4 storage, 130 interrupted (DESIGN 8)."""
    try:
        body()
    except (UserError, RunAborted, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def leave(code: int) -> None:
    """Ends the process. After an interruption at once: threads that still compile can crash an orderly end."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code == INTERRUPTED:
        os._exit(code)
    sys.exit(code)

"""What can go wrong, by exit code (DESIGN 8), and the nearest valid name for an error's text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user gave is wrong: a config key, a file, a record, a reward function. Exit code 2."""

    exit_code = 2


class RunAborted(Exception):
    """The run cannot go on: non-finite numbers, or a reward that fails too often. Exit code 3."""

    exit_code = 3


class StorageError(Exception):
    """A checkpoint cannot be written or read. Exit code 4."""

    exit_code = 4


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

"""Host memory in pages of 2 MB, for the commands.

XLA's CPU programs ask for their temporaries anew at each call, gigabytes of them, and Linux hands these out page by
page: 4 KB at a time this is a good part of an update's system time. glibc asks for huge ones if it is told to before
a process begins, so a command starts itself once more. GLIBC_TUNABLES=glibc.malloc.hugetlb=0 keeps it from that.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

TUNABLE = "glibc.malloc.hugetlb"
VARIABLE = "GLIBC_TUNABLES"
KNOWN_SINCE = (2, 35)  # glibc's version
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def in_huge_pages() -> None:
    """Starts the running command again in the same process, with huge pages, where the system gives them to those who
    ask (Linux, whose setting is "madvise"), they were not asked for yet, and no debugger looks on. Nothing else of the
    command must have happened before."""
    if sys.executable and sys.gettrace() is None and (changed := _environment(os.environ, _setting(), _glibc())):
        with contextlib.suppress(OSError):  # the command goes on as it is
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], changed)


def _environment(environ: Mapping[str, str], setting: str, glibc: tuple[int, ...]) -> dict[str, str] | None:
    """The environment to start again with; None: not to.

    >>> _environment({}, "always [madvise] never", (2, 36))
    {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}
    """
    given = environ.get(VARIABLE, "")
    if "[madvise]" not in setting or glibc < KNOWN_SINCE or TUNABLE in given:
        return None
    return {**environ, VARIABLE: f"{given}:{TUNABLE}=1".lstrip(":")}


def _setting() -> str:
    """Of the system: `always`, `madvise` or `never` stands in brackets; "" where there is none."""
    try:
        return SETTING.read_text()
    except OSError:
        return ""


def _glibc() -> tuple[int, ...]:
    """Its version; () of another library."""
    name, version = platform.libc_ver()
    return tuple(map(int, version.split("."))) if name == "glibc" else ()

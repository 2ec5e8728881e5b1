"""Host memory that a command keeps, in pages of 2 MB where Linux gives them.

XLA's CPU programs ask for their temporaries anew at each call, gigabytes of them. glibc hands those back to Linux each
time and gets them again page by page, emptied: a fifth of an update's time, and in pages of 4 KB more. It keeps them if
it is told to before a process begins, so a command starts itself once more. GLIBC_TUNABLES with any setting of
glibc.malloc, `glibc.malloc.hugetlb=0` say, keeps it from that.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "GLIBC_TUNABLES"
PREFIX = "glibc.malloc."
# No memory by mmap, which goes back when it is freed, and none back from the end of the heap either. One heap: in those
# that threads get, what is large can only come by mmap. Of small pieces each thread has 200 of a size at hand, not 7:
# compilers, which ask for many on several threads, would wait for each other.
KEPT = {"mmap_max": "0", "trim_threshold": str(2**40), "arena_max": "1", "tcache_count": "200"}
KEPT_SINCE = (2, 26)  # glibc's version
HUGE = {"hugetlb": "1"}
HUGE_SINCE = (2, 35)
PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def in_huge_pages() -> None:
    """Starts the running command again in the same process, with memory that it keeps, where the C library is glibc,
    its memory was not spoken of yet, and no debugger looks on; with huge pages where Linux gives them to those who ask
    ("madvise"). Nothing else of the command must have happened before."""
    if sys.executable and sys.gettrace() is None and (changed := _environment(os.environ, _pages(), _glibc())):
        with contextlib.suppress(OSError):  # the command goes on as it is
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], changed)


def _environment(environ: Mapping[str, str], pages: str, glibc: tuple[int, ...]) -> dict[str, str] | None:
    """The environment to start again with; None: not to.

    >>> _environment({}, "always [madvise] never", (2, 36))["GLIBC_TUNABLES"].split(":")[-2:]
    ['glibc.malloc.tcache_count=200', 'glibc.malloc.hugetlb=1']
    """
    given = environ.get(VARIABLE, "")
    if glibc < KEPT_SINCE or PREFIX in given:
        return None
    wanted = KEPT | (HUGE if "[madvise]" in pages and glibc >= HUGE_SINCE else {})
    settings = [given, *(f"{PREFIX}{name}={value}" for name, value in wanted.items())]
    return {**environ, VARIABLE: ":".join(settings).lstrip(":")}


def _pages() -> str:
    """Of the system: `always`, `madvise` or `never` stands in brackets; "" where there is none."""
    try:
        return PAGES.read_text()
    except OSError:
        return ""


def _glibc() -> tuple[int, ...]:
    """Its version; () of another library."""
    name, version = platform.libc_ver()
    return tuple(map(int, version.split("."))) if name == "glibc" else ()

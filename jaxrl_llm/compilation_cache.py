"""Compiled programs kept on disk from one start of a command to the next: jax's persistent compilation cache, where it
lies, how large it grows, and what becomes of it when the disk gives trouble.

Its key holds the program, the versions of jaxlib and XLA, XLA's flags, and the device's kind; of a CPU the features
that code may be compiled for, so that another processor's code is never run. A cache holds code: who can write to the
folder can run theirs, so it is made for its owner alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

AUTO = "auto"
LARGEST = 2 << 30  # bytes that the programs of all runs may take; the longest unused ones go first
LEAST_FREE = 512 << 20  # bytes of the disk below which nothing is added
NEVER = 1e9  # seconds that a program must have taken to compile for it to be written
Report = Callable[[str], None]


def open_cache(setting: str, report: Report, *, writes: bool = True) -> Path | None:
    """Makes jax keep what this process compiles from now on, where nobody else has said where.

    A folder that cannot be written, or a disk that is nearly full, is told once; what is there is still read. Nothing
    that goes wrong with the cache ends a command.

    Args:
      setting: of `trainer.compilation_cache`: a folder; "auto", jax's own setting (JAX_COMPILATION_CACHE_DIR) or else
        `default_folder()`; "", none.
      report: told, once, why nothing is kept.
      writes: whether this process is the one of its run that writes (jax lets the first one alone).

    Returns:
      The folder; None where nothing is kept.
    """
    import jax

    if not setting:
        jax.config.update("jax_enable_compilation_cache", False)
    if not jax.config.values["jax_enable_compilation_cache"]:
        return None
    own = jax.config.values["jax_compilation_cache_dir"]
    if setting == AUTO and own:
        return Path(own)
    folder = default_folder() if setting == AUTO else Path(setting).expanduser()
    if folder is None:
        return None
    # Every program: they are few, and what compiles fast loads faster still.
    least = 0.0
    if writes:
        why = _unwritable(folder)
        least = NEVER if why else 0.0
        if why:
            report(f"notice: what is compiled is not kept for the next start: {why} (trainer.compilation_cache)")
        else:
            prune(folder, LARGEST)
        if not folder.is_dir():
            return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _tell_of_trouble_once(folder, report)
    return folder


def default_folder() -> Path | None:
    """Where the platform keeps what a program could make again, per user; None where there is no such place."""
    try:
        if sys.platform == "darwin":
            place = Path.home() / "Library" / "Caches"
        elif sys.platform == "win32":
            place = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        else:
            given = os.environ.get("XDG_CACHE_HOME", "")
            place = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:  # no home
        return None
    return place / "jaxrl_llm" / "programs"


def prune(folder: Path, largest: int) -> None:
    """Removes programs, the longest unused first, until they take at most `largest` bytes. Several processes may.

    (jax's own bound, jax_compilation_cache_max_size, locks the folder for every look, and one process killed between
    two writes ends all writing.)
    """
    found = []
    for path in folder.glob("*-cache"):
        with contextlib.suppress(OSError):  # another process was faster
            stat = path.stat()
            found.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= largest:
            break
        total -= size
        with contextlib.suppress(OSError):
            path.unlink()


def _unwritable(folder: Path) -> str:
    """Why nothing can be written there; "" if it can."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return "" if free >= LEAST_FREE else f"{folder}: the disk has {free >> 20} MiB left"


_TROUBLE = re.compile(r"Error (reading|writing) persistent compilation cache entry for '(.*?)': (.*)", re.DOTALL)


def _tell_of_trouble_once(folder: Path, report: Report) -> None:
    """jax goes on when an entry cannot be read or written, and warns of each. Here the first one is told, and what is
    broken removed: a process that was killed, or a full disk, leaves half an entry, and jax would never replace it."""
    import jax

    shown, told = warnings.showwarning, []

    def show(message: Warning | str, *args: object, **kwargs: object) -> None:
        found = _TROUBLE.match(str(message))
        if not found:
            shown(message, *args, **kwargs)  # pyright: ignore[reportArgumentType]
            return
        what, program, why = found.groups()
        for path in folder.glob(f"{program}-*-cache"):
            with contextlib.suppress(OSError):
                path.unlink()
        if what == "writing":
            jax.config.update("jax_persistent_cache_min_compile_time_secs", NEVER)
        if not told:
            told.append(why)
            report(f"notice: {folder}: {what} {program}: {why}; the run goes on without it (trainer.compilation_cache)")

    warnings.filterwarnings("always", message="Error (reading|writing) persistent compilation cache entry")
    warnings.showwarning = show  # pyright: ignore[reportAttributeAccessIssue]

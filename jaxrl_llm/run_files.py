"""The files of a run's folder: lines of JSON, written so that whoever reads them finds whole ones."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from jaxrl_llm.errors import StorageError

LOCK = "lock"  # see run_mark.py


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a file that a run wrote; a last line that was cut short is left out.

    Raises:
      StorageError: another line is not JSON.
    """
    *lines, _ = Path(path).read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise StorageError(f"{path}:{number}: not JSON: {error}") from error
    return found


def numbered(folder: Path, pattern: str) -> list[tuple[int, Path]]:
    """What a run has named by a step, with it, oldest first; "4 (copy)" and "4.bak", which a person made, are no steps.

    Args:
      pattern: such as "rollouts/*.jsonl".
    """
    return sorted((int(path.stem), path) for path in folder.glob(pattern) if re.fullmatch(r"\d+", path.stem, re.ASCII))


def append_jsonl(path: Path, *rows: Mapping[str, Any]) -> None:
    """
    Raises:
      StorageError: the file cannot be written.
    """
    # Not kept open: a run that is left in the middle of its loop leaves nothing behind that wants closing.
    with storage(path), _open(path, "a") as file:
        file.writelines(map(to_line, rows))


def keep_steps(path: Path, last: int | None) -> list[str]:
    """Drops the lines after step `last` (None: lines have no step), one that was cut short, and damaged ones, of which
    a copy of the file stays.

    Returns:
      What a person should know.
    """
    if not path.exists():
        return []
    *lines, cut = path.read_bytes().split(b"\n")
    rows = [_row(line, steps=last is not None) for line in lines]
    kept = [line for line, row in zip(lines, rows, strict=True) if row and (last is None or row["step"] <= last)]
    bad = [number for number, row in enumerate(rows, 1) if row is None]
    damaged = path.with_name(f"damaged-{path.name}")
    if bad:
        shutil.copyfile(path, damaged)
    if cut or len(kept) < len(lines):
        replace_file(path, "".join(f"{line.decode()}\n" for line in kept))
    if not bad:
        return []
    count = f"{len(bad)} of {len(lines)} lines are damaged, the first: {bad[0]}"
    return [f"{path}: {count}; the others are kept, and the file as it was in {damaged.name}"]


def _row(line: bytes, steps: bool) -> dict[str, Any] | None:
    """None: the line is not one that a run has written."""
    try:
        row = json.loads(line.decode())
    except ValueError:
        return None
    return row if isinstance(row, dict) and (not steps or isinstance(row.get("step"), int)) else None


def replace_file(path: Path, text: str) -> None:
    """Writes a file in one piece: whoever looks finds the old one or the new one."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with _open(unfinished, "w") as file:
            file.write(text)
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def to_line(row: Mapping[str, Any]) -> str:
    """One line of JSON: arrays as lists, numbers that are not finite as null, anything strange as text.

    >>> to_line({"a": float("nan"), "b": (1, 2)})
    '{"a": null, "b": [1, 2]}\\n'
    """
    return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n"


@contextlib.contextmanager
def storage(path: Path) -> Iterator[None]:
    """Turns the system's errors into a StorageError that names the file."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error}") from error


def _open(path: Path, mode: str) -> IO[str]:
    # A lone surrogate, which UTF-8 cannot hold, becomes its JSON escape.
    return path.open(mode, encoding="utf-8", errors="backslashreplace")


def _plain(value: Any) -> Any:
    match value:
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case bool() | int() | str() | None:
            return value
        case float():
            return value if math.isfinite(value) else None
        case _ if hasattr(value, "tolist"):
            return _plain(value.tolist())
        case _:
            return str(value)

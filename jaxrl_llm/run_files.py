"""The files of a run's folder: lines of JSON, written so that whoever reads them finds whole ones."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from jaxrl_llm.errors import StorageError


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a file that a run wrote; a last line that was cut short is left out.

    Raises:
      StorageError: another line is not JSON.
    """
    *lines, _ = Path(path).read_text(encoding="utf-8").split("\n")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise StorageError(f"{path}:{number}: not JSON: {error}") from error
    return found


def append_jsonl(path: Path, *rows: Mapping[str, Any]) -> None:
    """
    Raises:
      StorageError: the file cannot be written.
    """
    # Not kept open: a run that is left in the middle of its loop leaves nothing behind that wants closing.
    with storage(path), _open(path, "a") as file:
        file.writelines(map(to_line, rows))


def keep_steps(path: Path, last: int) -> None:
    """Drops the lines after step `last`, and one that was cut short."""
    if path.exists():
        replace_file(path, "".join(to_line(row) for row in read_jsonl(path) if row["step"] <= last))


def replace_file(path: Path, text: str) -> None:
    """Writes a file in one piece: whoever looks finds the old one or the new one."""
    unfinished = path.with_name(f"{path.name}.tmp")
    with _open(unfinished, "w") as file:
        file.write(text)
    os.replace(unfinished, path)


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

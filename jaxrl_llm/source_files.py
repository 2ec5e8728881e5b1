"""Records in files: JSON lines, a JSON array, Parquet."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.errors import UserError, of_kind

Record = Mapping[str, Any]

COMPRESSED = {".gz": "gunzip", ".zst": "unzstd", ".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip"}
UNPACK = {
    b"\x1f\x8b": "gunzip",
    b"\x28\xb5\x2f\xfd": "unzstd",
    b"BZh": "bunzip2",
    b"\xfd7zXZ": "unxz",
    b"PK\x03\x04": "unzip",
}
BLANK = b" \t\r\n\f\v\xef\xbb\xbf"  # a byte order mark too
LARGEST_DOCUMENT = 50_000_000  # bytes of a file that is read whole to say what it is


def open_file(path: Path) -> JsonLines | JsonArray | ParquetFile:
    """
    Raises:
      UserError: the file is not what its name says, and what to do about it.
    """
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    tool = next((tool for magic, tool in UNPACK.items() if start.startswith(magic)), COMPRESSED.get(path.suffix))
    if tool:
        raise UserError(f"{path}: is compressed; unpack it first, as with: {tool} {path}")
    if path.suffix == ".parquet":
        return ParquetFile(path)
    if start.startswith(b"PAR1"):
        raise UserError(f"{path}: is a Parquet file; its name must end in .parquet")
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{path}: is UTF-16; expected UTF-8, as from: iconv -f UTF-16 -t UTF-8 {path}")
    first, more = _first_lines(path)
    if first.startswith(b"[") and path.suffix == ".json":
        return JsonArray(path)
    if first.startswith((b"[", b"{")) and not _is_json(first):
        _refuse_document(path)
    if first.startswith(b"[") and not more:
        _refuse_document(path)
    return JsonLines(path)


def _first_lines(path: Path) -> tuple[bytes, bool]:
    """The first line that is not blank, and whether there is another."""
    with path.open("rb") as file:
        found = [*itertools.islice((line.strip(BLANK) for line in file if line.strip(BLANK)), 2), b""]
    return found[0], len(found) > 2


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_document(path: Path) -> None:
    """
    Raises:
      UserError: the file as a whole is one JSON array or object, and not one object a line.
    """
    if path.stat().st_size > LARGEST_DOCUMENT:
        return
    try:
        document = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return  # the lines' own errors say more
    if isinstance(document, list):
        raise UserError(f"{path}: holds one JSON array; name it {path.stem}.json, or write one object a line")
    expected = "expected one object a line, or (in a .json file) one array of objects"
    lists = [key for key, value in document.items() if isinstance(value, list)]
    hint = f"; its {lists[0]!r} may be that array" if lists else ""
    raise UserError(f"{path}: holds one JSON object over several lines, with {', '.join(document)}; {expected}{hint}")


class JsonLines:
    """One JSON object a line; empty lines do not count. Only the lines' positions are held in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        starts, lines, at = [], [], 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip(BLANK):
                    starts.append(at)
                    lines.append(number)
                at += len(line)
        self._starts, self._lines = np.array(starts, np.int64), np.array(lines, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Record:
        with self._path.open("rb") as file:
            file.seek(self._starts[index], os.SEEK_SET)
            line = file.readline()
        where, shown = self.where(index), line.strip()[:60].decode(errors="replace")
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            with of_kind("not UTF-8"):
                raise UserError(f"{where}: not UTF-8: byte {error.start} of the line; found {shown!r}") from error
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            with of_kind("not JSON"):
                raise UserError(f"{where}: not a JSON object on one line: {error}; found {shown!r}") from error
        return _object(record, where, escapes=b"\\ud" in line.lower())

    def where(self, index: int) -> str:
        return f"{self._path}:{self._lines[index]}"


class JsonArray:
    """An array of JSON objects, held in memory; a record's line is where it begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            text = path.read_bytes().decode("utf-8-sig")
            self._items, self._escapes = list(_elements(text)), "\\ud" in text.lower()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8: byte {error.start} of the file") from error
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{error.lineno}: not a JSON array of objects: {error}") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: not a JSON array of objects: {error}") from error

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Record:
        return _object(self._items[index][1], self.where(index), escapes=self._escapes)

    def where(self, index: int) -> str:
        return f"{self._path}:{self._items[index][0]}"


def _elements(text: str) -> Iterator[tuple[int, Any]]:
    """(line, value) of each element of a JSON array.

    >>> list(_elements('[{"a": 1},\\n {}]'))
    [(1, {'a': 1}), (2, {})]
    """
    decoder, line, counted = json.JSONDecoder(), 1, 0

    def skip(at: int) -> int:
        while text[at : at + 1] in (" ", "\t", "\r", "\n"):
            at += 1
        return at

    at = skip(skip(0) + 1)  # behind the bracket
    while text[at : at + 1] != "]":
        value, end = decoder.raw_decode(text, at)
        line, counted = line + text.count("\n", counted, at), at
        yield line, value
        at = skip(end)
        if text[at : at + 1] == ",":
            at = skip(at + 1)
        elif text[at : at + 1] != "]":
            raise json.JSONDecodeError("expected ',' or ']'", text, at)
    if rest := text[at + 1 :].strip():
        raise json.JSONDecodeError(f"nothing is expected behind the array, found {rest:.20}", text, at + 1)


def _object(record: Any, where: str, *, escapes: bool) -> Record:
    """The record, which must be an object; with escapes of half characters it must hold no single half, which could not
    be written down again."""
    if not isinstance(record, dict):
        with of_kind("not an object"):
            raise UserError(f"{where}: expected a JSON object, found {type(record).__name__}")
    try:
        _ = escapes and json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        with of_kind("broken character"):
            code = f"\\u{ord(error.object[error.start]):04x}"
            raise UserError(f"{where}: half of a character (a lone surrogate, {code})") from error
    return record


class ParquetFile:
    """A row a record, verl's schema (prompt, data_source, reward_model, extra_info) unchanged."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self._path = path
        try:
            # As one file: of a path it would make columns ("split=test/"). One chunk a column: looking up a row among
            # many would be a search each time.
            self._table = pyarrow.parquet.ParquetFile(path).read().combine_chunks()
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"{path}: not a Parquet file, or not a whole one: {error}") from error
        names = self._table.column_names
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"{path}: several columns are named {', '.join(map(repr, twice))}")

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Record:
        try:
            return {name: self._table[name][index].as_py() for name in self._table.column_names}
        except Exception as error:  # a value that Python has no like of
            raise UserError(f"{self.where(index)}: {type(error).__name__}: {error}") from error

    def where(self, index: int) -> str:
        return f"{self._path}, row {index}"

"""Records in files: JSON lines, a JSON array, Parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.errors import UserError

Record = Mapping[str, Any]


class JsonLines:
    """One JSON object a line; empty lines do not count. Only the lines' positions are held in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        starts, lines, at = [], [], 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
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
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            shown = line.strip()[:60].decode(errors="replace")
            raise UserError(f"{self.where(index)}: not a JSON object on one line: {error}; found {shown!r}") from error
        if not isinstance(record, dict):
            raise UserError(f"{self.where(index)}: expected a JSON object, found {type(record).__name__}")
        return record

    def where(self, index: int) -> str:
        return f"{self._path}:{self._lines[index]}"


class ParquetFile:
    """A row a record, verl's schema (prompt, data_source, reward_model, extra_info) unchanged."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self._path = path
        try:
            # One chunk a column: looking up a row among many chunks would be a search each time.
            self._table = pyarrow.parquet.read_table(path).combine_chunks()
        except pyarrow.ArrowException as error:
            raise UserError(f"{path}: not a Parquet file: {error}") from error

    def __len__(self) -> int:
        return self._table.num_rows

    def __getitem__(self, index: int) -> Record:
        return {name: self._table[name][index].as_py() for name in self._table.column_names}

    def where(self, index: int) -> str:
        return f"{self._path}, row {index}"

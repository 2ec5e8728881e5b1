"""Where records come from. A source is a sequence of records that can say where each of them stands."""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jaxrl_llm import dotted
from jaxrl_llm.errors import UserError, nearest, of_kind
from jaxrl_llm.source_files import COMPRESSED, Record, open_file


@runtime_checkable
class Source(Protocol):
    """Records by index, each in a form that may be read many times."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Record: ...

    def where(self, index: int) -> str:
        """How an error names a record: "train.jsonl:17"."""
        ...


def open_source(spec: str | Path | Source | Sequence[Record], kwargs: Mapping[str, Any] | None = None) -> Source:
    """The source that a name stands for, or a sequence of records (a grain.MapDataset too) as one.

    - `file.jsonl` (one JSON object a line), `file.json` (the same, or one array of objects) and `file.parquet`
    - `folder`, `folder:split`: a dataset that `datasets.save_to_disk` wrote
    - `hf:name`, `hf:name:config:split`: a dataset of the Hugging Face hub; the split is "train" if none is given
    - `module:function`, `module:function(key=value)`, `file.py:function`: a function that returns a sequence of records

    `kwargs` are further arguments of the function, or of `datasets.load_dataset`; what the name says goes first.

    Raises:
      UserError: what is named does not exist, cannot be reached, or is not a sequence of records.
    """
    if isinstance(spec, Source):
        return spec
    if not isinstance(spec, str | Path):
        return RecordSequence(spec, "record")
    name = str(spec)
    path = Path(name).expanduser()
    if name.startswith("hf:"):
        return _from_hub(name, kwargs or {})
    if path.suffix in (".jsonl", ".json", ".parquet", *COMPRESSED):
        if path.is_dir():
            raise UserError(f"{name!r} is a folder; expected a file, or a dataset folder without such an ending")
        if not path.is_file():
            beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
            close = difflib.get_close_matches(path.name, beside, n=1)
            raise UserError(f"there is no file {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        return open_file(path)
    folder, _, split = name.partition(":")
    if Path(folder).expanduser().is_dir():
        return _from_folder(Path(folder).expanduser(), split)
    if ":" in name:
        return _from_function(name, kwargs or {})
    raise UserError(
        f"{name!r} is no source: expected a .jsonl or .parquet file, a dataset folder, hf:NAME, or module:function"
    )


class RecordSequence:
    """A sequence of records that stands anywhere but in a file."""

    def __init__(self, records: Any, label: str) -> None:
        if not (hasattr(records, "__len__") and hasattr(records, "__getitem__")) or isinstance(records, str | Mapping):
            raise UserError(f"{label}: expected a sequence of records (dicts), found {type(records).__name__}")
        self._records, self._label = records, label

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        try:
            record = self._records[index]
        except Exception as error:  # somebody's own sequence may fail as any
            raise UserError(f"{self.where(index)}: {type(error).__name__}: {error}") from error
        if not isinstance(record, Mapping):
            with of_kind("not an object"):
                raise UserError(f"{self.where(index)}: expected a dict, found {type(record).__name__}")
        return record

    def where(self, index: int) -> str:
        return f"{self._label} [{index}]"


def _from_folder(folder: Path, split: str) -> Source:
    datasets = _import_datasets(str(folder))
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise UserError(f"{folder}: not a dataset folder as datasets.save_to_disk writes it: {error}") from error
    label = f"{folder}:{split}" if split else str(folder)
    return RecordSequence(_pick_split(found, split, label), label)


def _from_hub(name: str, kwargs: Mapping[str, Any]) -> Source:
    _, repository, *rest = name.split(":")
    if len(rest) > 2:
        raise UserError(f"{name!r}: expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT")
    named = {key: value for key, value in zip(("name", "split"), rest, strict=False) if value}
    datasets = _import_datasets(name)
    try:
        found = datasets.load_dataset(repository, **{"split": "train", **kwargs, **named})
    except Exception as error:  # network, authentication, unknown names: the library raises many kinds
        raise UserError(
            f"{name}: cannot load it from the Hugging Face hub: {type(error).__name__}: {error}. "
            "Where the hub is out of reach, give a .jsonl or .parquet file instead."
        ) from error
    return RecordSequence(_pick_split(found, "", name), name)


def _pick_split(found: Any, split: str, label: str) -> Any:
    if not isinstance(found, dict):  # a Dataset; a DatasetDict is a dict
        if split:
            raise UserError(f"{label}: the dataset has no splits, so none can be named")
        return found
    if split not in found:
        known = nearest(split, found) if split else f"name one of its splits: {', '.join(found)}"
        raise UserError(f"{label}: {known}")
    return found[split]


def _import_datasets(label: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{label}: reading it needs the datasets library: pip install datasets") from error
    return datasets


def _from_function(name: str, kwargs: Mapping[str, Any]) -> Source:
    path, arguments = dotted.split_call(name)
    function, given = dotted.load(path), {**kwargs, **arguments}
    with contextlib.suppress(TypeError, ValueError):  # not a function, or a builtin without a signature
        known = inspect.signature(function).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        for argument in () if takes_any else given:
            if argument not in known:
                raise UserError(f"{name}: no argument {argument!r}; {nearest(argument, known)}")
    try:
        return RecordSequence(function(**given), name)
    except TypeError as error:
        raise UserError(f"{name}: {error}") from error

"""Folders of safetensors files: read a tensor at a time, written whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl_llm.errors import UserError

SUFFIX = ".safetensors"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # above this a model is written as several files, as transformers does

# The only number formats that parameters are read from; anything else is quantized and needs a reader of its own.
FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class TensorFolder:
    """The tensors of one folder, by name; only headers are read until `read` is called."""

    def __init__(self, folder: Path):
        """Opens `model.safetensors`, or the files that `model.safetensors.index.json` lists.

        Raises:
          UserError: no such files, a file that is damaged or cut short, a tensor that stands in two files, or an index
            that disagrees with the files.
        """
        self.folder = folder
        self._files: dict[str, Any] = {}
        indexed = _read_index(folder)
        for path in sorted(folder / name for name in set(indexed.values())) if indexed else [folder / WEIGHTS]:
            file = _open(path)
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name in self._files:
                    raise UserError(f"{path}: tensor {name!r} stands in another file of the folder too")
                if indexed and indexed.get(name) != path.name:
                    raise UserError(f"{path}: holds {name!r}, which {INDEX} places in {indexed.get(name)!r}")
                self._files[name] = file
        if lost := sorted(set(indexed) - set(self._files)):
            raise UserError(f"{folder / indexed[lost[0]]}: lacks {lost[0]!r}, which {INDEX} places there")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """The tensor in its own dtype.

        Raises:
          UserError: no such tensor, or one that is not of floating point numbers.
        """
        file = self._file(name)
        found = file.get_slice(name).get_dtype()
        if found not in FLOATS:
            raise UserError(f"{self.folder}: tensor {name!r} is {found}; readable are {', '.join(FLOATS)}")
        return file.get_tensor(name)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            raise UserError(f"{self.folder}: no tensor {name!r}")
        return self._files[name]


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file name; empty where the folder has one unnumbered file."""
    if not (folder / INDEX).is_file():
        if not (folder / WEIGHTS).is_file():
            raise UserError(f"{folder}: holds neither {WEIGHTS} nor {INDEX} (weights are read from safetensors only)")
        return {}
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise UserError(f"{folder / INDEX}: no 'weight_map' that says which file holds which tensor")
    for name, file in index.items():
        # A path would lead out of the folder, which an index from elsewhere has no business with.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(SUFFIX):
            raise UserError(
                f"{folder / INDEX}: weight_map of {name!r}: expected the name of a {SUFFIX} file in the folder, found "
                f"{file!r:.200}"
            )
    if (folder / WEIGHTS).is_file() and WEIGHTS not in index.values():
        raise UserError(
            f"{folder}: holds both {WEIGHTS} and {INDEX}, which places every tensor in other files; remove the one of "
            "them that is not this model's"
        )
    return index


def _open(path: Path) -> Any:
    try:
        if not path.is_file():
            raise UserError(f"{path}: no such file, though {INDEX} names it")
        return safe_open(path, "numpy")
    except OSError as error:  # no permission, a name that is too long
        raise UserError(f"{path}: cannot be read: {error}") from error
    except SafetensorError as error:
        raise UserError(f"{path}: {_first_cut_tensor(path) or f'not a sound safetensors file ({error})'}") from error


def _first_cut_tensor(path: Path) -> str:
    """Which tensor of a file that was cut short is the first to lack bytes; empty if that is not what is wrong."""
    damage = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
    with contextlib.suppress(*damage), path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(size, path.stat().st_size)))
        ends = sorted((x["data_offsets"][1], name) for name, x in header.items() if name != "__metadata__")
        have = path.stat().st_size - 8 - size
        for end, name in ends:
            if end > have:
                return f"cut short: tensor {name!r} ends at byte {end} of the data, the file has {have}"
    return ""


def write_tensors(folder: Path, tensors: Iterable[tuple[str, np.ndarray]], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the tensors to `folder` as one safetensors file, or as numbered ones and an index above `shard_bytes`.

    At most one file's tensors are held in memory. Raises:
      ValueError: a name comes twice.
    """
    written: dict[str, Path] = {}
    shards: list[Path] = []
    total = 0
    for shard in _shards(tensors, shard_bytes):
        if twice := sorted(written.keys() & shard.keys()):
            raise ValueError(f"tensor {twice[0]!r} is written twice")
        path = folder / f"part-{len(shards)}.safetensors"
        # A transposed view would be written in its memory order, not its own: make every tensor contiguous first.
        save_file({k: np.asarray(v, order="C") for k, v in shard.items()}, path, metadata={"format": "pt"})
        path.chmod(0o644)
        shards.append(path)
        written |= dict.fromkeys(shard, path)
        total += sum(v.nbytes for v in shard.values())
    if len(shards) == 1:
        shards[0].rename(folder / WEIGHTS)
        return
    final = {path: f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i, path in enumerate(shards, 1)}
    for path, name in final.items():
        path.rename(folder / name)
    weight_map = {name: final[path] for name, path in sorted(written.items())}
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(tensors: Iterable[tuple[str, np.ndarray]], limit: int) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        if name in shard:
            raise ValueError(f"tensor {name!r} is written twice")
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill beside `folder`, which takes its place when the block ends well and vanishes if it does not.

    Raises:
      UserError: `folder` exists and holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: already exists; give another folder, or remove it first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True) as temp:
        filled = Path(temp) / folder.name
        filled.mkdir()
        yield filled
        if folder.exists():
            folder.rmdir()  # empty, or it would have been refused above
        filled.rename(folder)


def read_json(path: Path) -> dict[str, Any]:
    """Raises:
    UserError: no such file, or no JSON object in it; says the line.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copies those of `names` that `source` holds; a name may be a pattern such as `*.model`."""
    for path in sorted(set(itertools.chain.from_iterable(source.glob(name) for name in names))):
        shutil.copyfile(path, target / path.name)

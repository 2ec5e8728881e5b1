"""Checkpoints: orbax writes the arrays, this module says which of them are whole and belong to the run.

`checkpoints/STEP/` holds orbax's items `state` (the leaves of a pytree by their dotted path) and `meta` (JSON), and
`checksums.json`, written last: without it a checkpoint does not count. Restoring compares every file with its checksum,
and every leaf's path, shape and dtype with what is asked for (orbax by itself casts in silence).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from jaxrl_llm.errors import StorageError

Tree = TypeVar("Tree")
CHECKSUMS = "checksums.json"
SHOWN = 12  # mismatching leaves that an error lists


class Checkpoints:
    """The checkpoints of one run. The first save removes what an interrupted one left; reading changes nothing."""

    def __init__(self, folder: str | Path, *, keep: int = 2):
        """
        Args:
          folder: made when something is saved.
          keep: how many of the newest stay.
        """
        self.folder, self._keep = Path(folder).absolute(), keep
        self._manager: ocp.CheckpointManager | None = None

    def steps(self) -> list[int]:
        """The steps whose checkpoints are complete, oldest first."""
        return sorted(int(path.parent.name) for path in self.folder.glob(f"[0-9]*/{CHECKSUMS}"))

    def latest_step(self) -> int | None:
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Writes a checkpoint, marks it complete, then removes the oldest beyond `keep`.

        Args:
          step: there must be no complete checkpoint of this step yet.
          state: pytree of arrays.
          meta: what JSON can hold: the data cursor, the configuration, …

        Raises:
          StorageError: it could not be written; the earlier ones are still there.
        """
        if step in self.steps():
            raise StorageError(f"{self.folder / str(step)}: is already there")
        leaves = _named_leaves(state)
        manifest = {name: _signature(leaf) for name, leaf in leaves.items()}
        arguments = ocp.args.Composite(
            state=ocp.args.PyTreeSave(leaves),
            meta=ocp.args.JsonSave({"manifest": manifest, "meta": dict(meta)}),
        )
        try:
            manager = self._writer()
            manager.save(step, args=arguments, force=True)
            manager.wait_until_finished()
            _write_checksums(self.folder / str(step))
            for old in self.steps()[: -self._keep]:
                manager.delete(old)
        except Exception as error:  # orbax and tensorstore raise all kinds when a disk is full
            self.close()  # so that the next save starts by cleaning up
            raise StorageError(f"{self.folder / str(step)}: cannot be saved: {error}") from error

    def leaves(self, step: int) -> Mapping[str, str]:
        """The leaves that a checkpoint says it holds, by their dotted paths: dtype and shape of each.

        Raises:
          StorageError: there is no such checkpoint, or it cannot be read.
        """
        if step not in self.steps():
            raise StorageError(f"{self.folder / str(step)}: no complete checkpoint; there are {self.steps() or 'none'}")
        try:
            return self._read(step, meta=ocp.args.JsonRestore())["meta"]["manifest"]
        except Exception as error:  # orbax and tensorstore raise all kinds
            raise StorageError(f"{self.folder / str(step)}: cannot be read: {error}") from error

    def read_meta(self, step: int) -> dict[str, Any]:
        """What `save` was given beside the state.

        Raises:
          StorageError: the checkpoint is missing or damaged.
        """
        self.verify(step)
        return self._read(step, meta=ocp.args.JsonRestore())["meta"]["meta"]

    def restore(self, target: Tree, step: int | None = None, *, partial: bool = False) -> tuple[Tree, dict[str, Any]]:
        """The state, bit for bit and placed as `target` says, and the `meta` it was saved with.

        Args:
          target: pytree of jax.ShapeDtypeStruct with shardings (see `sharding.abstract_like`).
          step: None for the latest.
          partial: whether the checkpoint may hold more than `target` asks for.

        Raises:
          StorageError: the checkpoint is missing or damaged, or holds other paths, shapes or dtypes than `target`.
        """
        if step is None and (step := self.latest_step()) is None:
            raise StorageError(f"{self.folder}: no complete checkpoint")
        self.verify(step)
        wanted, written = _named_leaves(target), self._read(step, meta=ocp.args.JsonRestore())["meta"]
        self._compare(written["manifest"], wanted, step, partial)
        arguments = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        try:
            found = self._read(step, state=arguments)["state"]
        except Exception as error:
            raise StorageError(f"{self.folder / str(step)}: cannot be restored: {error}") from error
        state = jax.tree.unflatten(jax.tree.structure(target), [found[name] for name in wanted])
        return state, written["meta"]

    def verify(self, step: int) -> None:
        """
        Raises:
          StorageError: naming the first file of the checkpoint that is missing or not as it was written.
        """
        folder = self.folder / str(step)
        if step not in self.steps():
            raise StorageError(f"{folder}: no complete checkpoint; there are {self.steps() or 'none'}")
        try:
            expected = json.loads((folder / CHECKSUMS).read_text())
            for name, digest in expected.items():
                if _digest(folder / name) != digest:
                    raise StorageError(f"{folder / name}: is not as it was written (wrong checksum)")
        except (OSError, ValueError, AttributeError) as error:
            raise StorageError(f"{folder}: is damaged: {error}") from error

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _writer(self) -> ocp.CheckpointManager:
        if self._manager is None:
            for path in self.folder.glob("[0-9]*"):
                if not (path / CHECKSUMS).exists():
                    shutil.rmtree(path)
            self._manager = ocp.CheckpointManager(
                self.folder,
                options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False, create=True),
                item_handlers=_handlers(),
            )
        return self._manager

    def _read(self, step: int, **items: Any) -> Mapping[str, Any]:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler(**_handlers())) as reader:
            return reader.restore(self.folder / str(step), args=ocp.args.Composite(**items))

    def _compare(self, manifest: Mapping[str, str], wanted: Mapping[str, Any], step: int, partial: bool) -> None:
        expected = {name: _signature(leaf) for name, leaf in wanted.items()}
        names = [*expected, *(() if partial else (name for name in manifest if name not in expected))]
        wrong = [
            f"{name}: expected {expected.get(name, 'nothing')}, found {manifest.get(name, 'nothing')}"
            for name in names
            if expected.get(name) != manifest.get(name)
        ]
        if wrong:
            more = [f"… and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
            head = f"{self.folder / str(step)}: holds another model or optimizer ({len(wrong)} leaves differ):"
            raise StorageError("\n  ".join([head, *wrong[:SHOWN], *more]))


def _handlers() -> dict[str, Any]:
    return {"state": ocp.PyTreeCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}


def _named_leaves(tree: Any) -> dict[str, Any]:
    """{"actor.params.embed": leaf, …}: a flat dict, so that partial and whole restores are the same thing."""
    paths, _ = jax.tree.flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def _signature(leaf: Any) -> str:
    return f"{leaf.dtype.name}{list(leaf.shape)}"


def _write_checksums(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {path.relative_to(folder).as_posix(): _digest(path) for path in files}
    unfinished = folder / f"{CHECKSUMS}.tmp"
    unfinished.write_text(json.dumps(digests, indent=1))
    os.replace(unfinished, folder / CHECKSUMS)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

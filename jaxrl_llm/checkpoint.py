"""Checkpoints: orbax writes the arrays, this module says which of them are whole and belong to the run.

`checkpoints/STEP/` holds orbax's items `state` (the leaves of a pytree by their dotted path) and `meta` (JSON), and
`checksums.json`, written last: without it a checkpoint does not count. Restoring compares every file with its checksum,
and every leaf's path, shape and dtype with what is asked for (orbax by itself casts in silence). `checkpoints/newest`
names the step that was completed last, so that a checkpoint that was lost as a whole is missed.

A save copies the arrays and returns; they are written, summed up and marked complete while the run goes on. Where a run
has several processes all of them save and restore, on a file system that they share, and the first one does the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from jaxrl_llm.errors import OutOfMemory, StorageError, is_out_of_memory

Tree = TypeVar("Tree")
CHECKSUMS = "checksums.json"
NEWEST = "newest"
EXPORTED = "exported"
SHOWN = 12  # mismatching leaves that an error lists
WRITING_SECONDS = 24 * 3600  # after which orbax gives up a write; its own 20 minutes can be too short for a slow disk


class Checkpoints:
    """The checkpoints of one run. The first save removes what an interrupted one left; reading changes nothing."""

    def __init__(self, folder: str | Path, *, keep: int = 2):
        """
        Args:
          folder: made when something is saved.
          keep: how many of the newest stay.
        """
        self.folder, self._keep = Path(folder).absolute(), keep
        self._saver: ocp.AsyncCheckpointer | None = None
        self._writing: threading.Thread | None = None
        self._failure: StorageError | OutOfMemory | None = None
        self._released, self._dropped = threading.Event(), False  # see `save`, hold
        self._released.set()
        self._whole: set[int] = set()  # steps whose files were compared with their checksums
        self._damaged: set[int] = set()

    def steps(self) -> list[int]:
        """The steps whose checkpoints are complete, oldest first."""
        return [step for step, path in self._folders() if (path / CHECKSUMS).is_file()]

    def _folders(self) -> list[tuple[int, Path]]:
        """Those of steps, complete or not, oldest first; "4 (copy)" and "4.bak", which a person made, are no steps."""
        found = [path for path in self.folder.glob("[0-9]*") if path.is_dir()]
        return sorted((int(path.name), path) for path in found if re.fullmatch(r"\d+", path.name, re.ASCII))

    def latest_step(self) -> int | None:
        return max(self.steps(), default=None)

    def newest_good(self, *, strict: bool = False) -> tuple[int | None, list[str]]:
        """The newest step whose checkpoint is whole, and what is wrong with those after it; (None, []) where no
        checkpoint was ever completed. An interrupted save is nothing wrong: it never counted.

        Args:
          strict: whether anything wrong is an error.

        Raises:
          StorageError: nothing is whole though something was once complete; or something is wrong, and `strict`.
        """
        problems, found, steps = [], None, self.steps()
        completed = self._completed()
        if completed is not None and completed not in steps and completed > max(steps, default=-1):
            lost = self.folder / str(completed)
            problems.append(f"{lost}: is missing or lacks its {CHECKSUMS}; it was complete once")
        for step in reversed(steps):
            try:
                self.verify(step)
                found = step
                break
            except StorageError as error:
                problems.append(str(error))
                self._damaged.add(step)
        if problems and (strict or found is None):
            rest = f"step {found} is whole" if found is not None else "there is no other"
            advice = f"without --strict_resume the run goes on from step {found}"
            if found is None:
                advice = f"nothing is left to go on from; to start anew, take away {self.folder}"
            raise StorageError("\n  ".join([f"{self.folder}: damaged, {rest}; {advice}:", *problems]))
        return found, problems

    def save(
        self, step: int, state: Any, meta: Mapping[str, Any], *, spare: Collection[int] = (), hold: bool = False
    ) -> None:
        """Begins to write a checkpoint, after the one before it is written; `state` may be overwritten or donated as
        soon as this returns. Once written it is marked complete, and the oldest beyond `keep` are removed.

        Args:
          step: there must be no complete checkpoint of this step yet.
          state: pytree of arrays.
          meta: what JSON can hold: the data cursor, the configuration, …
          spare: steps to keep beside the newest.
          hold: whether it is not marked complete before `release`.

        Raises:
          StorageError: this one or the one before it could not be written; the earlier ones are still there.
        """
        self.wait()
        folder = self.folder / str(step)
        if step in self.steps() and step not in self._damaged:
            raise StorageError(f"{folder}: is already there")
        leaves = _named_leaves(state)
        manifest = {name: _signature(leaf) for name, leaf in leaves.items()}
        arguments = ocp.args.Composite(
            state=ocp.args.PyTreeSave(leaves),
            meta=ocp.args.JsonSave({"manifest": manifest, "meta": dict(meta)}),
        )
        try:
            saver = self._open_saver()
            saver.save(folder, args=arguments, force=True)
        except Exception as error:  # orbax and tensorstore raise all kinds when a disk is full
            self._give_up()  # so that the next save starts by cleaning up
            if is_out_of_memory(error):
                raise
            raise StorageError(f"{folder}: cannot be saved: {error}") from error
        self._released.clear()
        if not hold:
            self._released.set()
        # Not a daemon: a program that simply ends has its last checkpoint all the same.
        self._writing = threading.Thread(target=self._complete, args=(saver, step, {*spare, step}), name="checkpoint")
        self._writing.start()

    def _complete(self, saver: ocp.AsyncCheckpointer, step: int, spare: set[int]) -> None:
        """In a thread of its own: waits for the arrays to be written, marks the checkpoint, removes old ones."""
        folder = self.folder / str(step)
        try:
            saver.wait_until_finished()
            self._released.wait()
            if self._dropped or jax.process_index() > 0:  # the first one marks it, which orbax has let wait for all
                return
            _write_checksums(folder)
            _write_whole(self.folder / NEWEST, f"{step}\n")
            self._whole.discard(step)
            for old in self.steps()[: -self._keep]:
                if old not in spare:
                    _remove(self.folder / str(old))
        except BaseException as error:
            kind = OutOfMemory if is_out_of_memory(error) else StorageError
            self._failure = kind(f"{folder}: cannot be saved: {error}")
            self._failure.__cause__ = error

    def release(self) -> None:
        """What else is known of the step is written down too: its checkpoint may count."""
        self._released.set()

    def poll(self) -> None:
        """
        Raises:
          StorageError: a save that has ended meanwhile could not be written.
        """
        if self._writing is not None and not self._writing.is_alive():
            self.wait()

    def wait(self) -> None:
        """Returns once what was saved is complete.

        Raises:
          StorageError: it could not be written; the earlier ones are still there.
        """
        if self._writing is not None:
            assert self._released.is_set(), "waits for a save that is held"
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._give_up()
            raise failure

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
        if step not in self._whole:
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
        self._whole.add(step)

    def close(self) -> None:
        """Waits for what is being written; what is held will never count.

        Raises:
          StorageError: it could not be written.
        """
        self._dropped = not self._released.is_set()
        self._released.set()
        try:
            self.wait()
        finally:
            self._give_up()
            self._dropped = False

    def _give_up(self) -> None:
        if self._saver is not None:
            with contextlib.suppress(Exception):  # of a save that failed, which was told
                self._saver.close()
            self._saver = None

    def _open_saver(self) -> ocp.AsyncCheckpointer:
        if self._saver is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for step, path in self._folders() if jax.process_index() == 0 else ():
                if not (path / CHECKSUMS).exists():
                    shutil.rmtree(path)
                elif step in self._damaged:  # kept for whoever wants to know what happened
                    _set_aside(path)
            self._damaged.clear()
            options = ocp.options.AsyncOptions(timeout_secs=WRITING_SECONDS)
            self._saver = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**_handlers()), async_options=options)
        return self._saver

    def exported(self) -> int | None:
        """The step whose model was written last; None if none was, -1 where that cannot be told."""
        return _read_step(self.folder / EXPORTED)

    def mark_exported(self, step: int) -> None:
        """The model of this step is written. Does nothing where nothing was ever saved."""
        if self.folder.is_dir():
            _write_whole(self.folder / EXPORTED, f"{step}\n")

    def _completed(self) -> int | None:
        """The step that was completed last; None if none ever was, -1 where that cannot be told."""
        return _read_step(self.folder / NEWEST)

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


def _not_told_yet(record: logging.LogRecord) -> bool:
    """Where one write fails they all do, and asyncio logs each whose outcome orbax did not ask for."""
    text = record.getMessage()
    return not ("never retrieved" in text and "OCDBT" in text)


logging.getLogger("asyncio").addFilter(_not_told_yet)


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
    _write_whole(folder / CHECKSUMS, json.dumps(digests, indent=1))


def _write_whole(path: Path, text: str) -> None:
    """On the disk, not only in the system's memory, before it takes the place of the old one."""
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _read_step(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return -1


def _remove(folder: Path) -> None:
    (folder / CHECKSUMS).unlink()  # first, so that what is half removed does not count
    shutil.rmtree(folder)


def _set_aside(folder: Path) -> None:
    number, aside = 1, folder.with_name(f"damaged-{folder.name}")
    while aside.exists():
        number += 1
        aside = folder.with_name(f"damaged-{folder.name}-{number}")
    folder.rename(aside)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

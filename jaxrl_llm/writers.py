"""What a run leaves behind: config.json, metrics.jsonl, samples.jsonl, rollouts/STEP.jsonl and TensorBoard files."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from jaxrl_llm.config import Config, from_json, to_json
from jaxrl_llm.errors import StorageError, UserError
from jaxrl_llm.progress import make_display


def check_loggers(config: Config) -> None:
    """
    Raises:
      UserError: a logger that the configuration asks for is not installed.
    """
    if config.logging.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        raise UserError("config.logging.tensorboard = True: tensorboardX is not installed; pip install tensorboardX")


def previous_config(workdir: str | Path) -> Config | None:
    """The configuration of the run in `workdir`, or None if there is no run.

    Raises:
      UserError: its config.json does not hold a valid configuration.
    """
    path = Path(workdir) / "config.json"
    if not path.exists():
        return None
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


class RunWriter:
    """Writes a run's folder and shows its progress.

    Each step stands once in every file, also after a resume: what came after the step that a run resumes from is
    dropped when the writer opens. Step 0 is what is known before the first step. A run that starts anew in a folder,
    since the one before it left no checkpoint, keeps that one's files in `earlier-NUMBER/`.
    """

    def __init__(self, workdir: str | Path, config: Config, *, total_steps: int, resumed_step: int = -1):
        """
        Args:
          workdir: made if it is not there.
          total_steps: of the run.
          resumed_step: the last step that counts of what the folder holds; -1 if nothing does.

        Raises:
          UserError: a logger is missing.
          StorageError: the folder cannot be written.
        """
        check_loggers(config)
        self.workdir, self._config, self._total_steps = Path(workdir), config, total_steps
        with _storage(self.workdir):
            self.workdir.mkdir(parents=True, exist_ok=True)
            earlier = _set_aside(self.workdir) if resumed_step < 0 else None
            _replace(self.workdir / "config.json", to_json(config) + "\n")
            for name in ("metrics.jsonl", "samples.jsonl"):
                _keep_steps(self.workdir / name, resumed_step)
            for path in self.workdir.glob("rollouts/*.jsonl"):
                if int(path.stem) > resumed_step:
                    path.unlink()
        self._tensorboard = _tensorboard(self.workdir, resumed_step + 1) if config.logging.tensorboard else None
        self._display = make_display(
            config.logging.progress,
            name=config.logging.name,
            total_steps=total_steps,
            log_interval=config.trainer.log_interval,
        )
        if earlier:
            self.note(
                f"{self.workdir} held a run without a checkpoint: this one starts anew; its files are in {earlier}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl; the numbers may be arrays. What is not finite is written as null."""
        numbers = {name: np.asarray(value).item() for name, value in metrics.items()}
        path = self.workdir / "metrics.jsonl"
        # Not kept open: a run that is left in the middle of its loop leaves nothing behind that wants closing.
        with _storage(path), _open(path, "a") as file:
            file.write(_line({"step": step, **numbers}))
        if self._tensorboard is not None:
            for name, number in numbers.items():
                self._tensorboard.add_scalar(name, number, step)
            self._tensorboard.flush()
        self._display.step(step, numbers)

    def wants_samples(self, step: int) -> bool:
        trainer = self._config.trainer
        due = trainer.sample_interval and (step % trainer.sample_interval == 0 or step in (1, self._total_steps))
        return bool(due and trainer.samples_to_show)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Responses to look at: appended to samples.jsonl and shown.

        Args:
          rows: each with `prompt`, `response`, and perhaps `score`, `advantage`, `length` and whatever else is known.
        """
        path = self.workdir / "samples.jsonl"
        with _storage(path), _open(path, "a") as file:
            file.writelines(_line({"step": step, **row}) for row in rows)
        self._display.samples(step, rows)

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Every response of a step, one a line, in rollouts/STEP.jsonl; arrays become lists."""
        path = self.workdir / "rollouts" / f"{step}.jsonl"
        with _storage(path):
            path.parent.mkdir(exist_ok=True)
            _replace(path, "".join(_line({"step": step, **row}) for row in rows))

    def note(self, text: str) -> None:
        """A sentence for the person who watches."""
        self._display.note(text)

    def close(self) -> None:
        self._display.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a file that a RunWriter wrote; a last line that was cut short is left out.

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


def _tensorboard(workdir: Path, first_step: int) -> Any:
    from tensorboardX import SummaryWriter

    return SummaryWriter(str(workdir / "tensorboard"), purge_step=first_step if first_step > 0 else None)


def _set_aside(workdir: Path) -> Path | None:
    """Moves what an earlier run has written of its steps into a folder of its own, which is returned."""
    names = ("metrics.jsonl", "samples.jsonl", "rollouts", "tensorboard")
    found = [path for name in names if (path := workdir / name).exists()]
    if not found:
        return None
    number = 1
    while (earlier := workdir / f"earlier-{number}").exists():
        number += 1
    earlier.mkdir()
    for path in (*found, workdir / "config.json"):
        if path.exists():
            path.rename(earlier / path.name)
    return earlier


def _keep_steps(path: Path, last: int) -> None:
    """Drops the lines after step `last`, and one that was cut short."""
    if path.exists():
        _replace(path, "".join(_line(row) for row in read_jsonl(path) if row["step"] <= last))


def _replace(path: Path, text: str) -> None:
    """Writes a file in one piece: whoever looks finds the old one or the new one."""
    unfinished = path.with_name(f"{path.name}.tmp")
    with _open(unfinished, "w") as file:
        file.write(text)
    os.replace(unfinished, path)


def _open(path: Path, mode: str) -> IO[str]:
    # A lone surrogate, which UTF-8 cannot hold, becomes its JSON escape.
    return path.open(mode, encoding="utf-8", errors="backslashreplace")


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: arrays as lists, numbers that are not finite as null, anything strange as text."""
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


@contextlib.contextmanager
def _storage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error}") from error

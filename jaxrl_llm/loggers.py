"""Other places that a run's metrics go to: TensorBoard, Weights & Biases, trackio; each an optional package."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxrl_llm.config import Config
from jaxrl_llm.errors import UserError
from jaxrl_llm.run_files import replace_file

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}  # by key of config.logging
STATE = "loggers.json"  # in the run's folder: by which id each knows the run, and the last step that it was given


class Logger(Protocol):
    """Where metrics go; `key` is its knob in config.logging."""

    key: str

    def log(self, step: int, numbers: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def check_loggers(config: Config) -> None:
    """
    Raises:
      UserError: a logger that the configuration asks for is not installed.
    """
    missing = [key for key in _wanted(config) if importlib.util.find_spec(PACKAGES[key]) is None]
    if missing:
        lines = [f"config.logging.{key} = True: {PACKAGES[key]} is not installed" for key in missing]
        raise UserError("\n  ".join([*lines, f"pip install {' '.join(PACKAGES[key] for key in missing)}"]))


def open_loggers(config: Config, workdir: Path, first_step: int) -> list[Logger]:
    """The loggers of `config.logging`.

    Args:
      first_step: the first that the run will log; above 0 where it resumes.

    Raises:
      UserError: one of them cannot be started.
    """
    opened: list[Logger] = []
    for key in _wanted(config):
        try:
            opened.append(_OPEN[key](config, workdir, first_step))
        except Exception as error:  # each has its own kinds: no key, no network, a name that it does not like
            for logger in opened:
                logger.close()
            raise UserError(f"config.logging.{key} = True: {type(error).__name__}: {error}") from error
    return opened


def _wanted(config: Config) -> list[str]:
    return [key for key in PACKAGES if getattr(config.logging, key)]


class _TensorBoard:
    key = "tensorboard"

    def __init__(self, config: Config, workdir: Path, first_step: int):
        del config
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(workdir / "tensorboard"), purge_step=first_step if first_step > 0 else None)

    def log(self, step: int, numbers: Mapping[str, Any]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Remote:
    """A logger that keeps what it was given: a run that resumes from an earlier step does not give it twice."""

    def __init__(self, key: str, workdir: Path, start: Callable[[str], Any]):
        """
        Args:
          start: from the run's id to what has `log(numbers, step=…)` and `finish()`.
        """
        self.key, self._path = key, workdir / STATE
        known = self._read().get(key)
        self._id, self._last = (known["id"], known["step"]) if known else (uuid.uuid4().hex[:8], -1)
        self._run = start(self._id)
        self._note()

    def log(self, step: int, numbers: Mapping[str, Any]) -> None:
        if step > self._last:
            self._run.log(dict(numbers), step=step)
            self._last = step
            self._note()

    def close(self) -> None:
        self._run.finish()

    def _read(self) -> dict[str, Any]:
        return json.loads(self._path.read_text()) if self._path.exists() else {}

    def _note(self) -> None:
        replace_file(self._path, json.dumps(self._read() | {self.key: {"id": self._id, "step": self._last}}) + "\n")


def _wandb(config: Config, workdir: Path, first_step: int) -> Logger:
    del first_step
    wandb: Any = importlib.import_module("wandb")

    def start(run_id: str) -> Any:
        return wandb.init(
            project=config.logging.project,
            name=config.logging.name or None,
            id=run_id,
            resume="allow",
            dir=str(workdir),
            config=dataclasses.asdict(config),
            **({"mode": "offline"} if config.logging.offline else {}),
        )

    return _Remote("wandb", workdir, start)


def _trackio(config: Config, workdir: Path, first_step: int) -> Logger:
    del first_step
    trackio: Any = importlib.import_module("trackio")

    def start(run_id: str) -> Any:
        # It knows a run by its name, which two runs of one recipe would share.
        name = f"{config.logging.name}-{run_id}" if config.logging.name else run_id
        return trackio.init(
            project=config.logging.project,
            name=name,
            resume="allow",
            config=dataclasses.asdict(config),
        )

    return _Remote("trackio", workdir, start)


_OPEN: dict[str, Callable[[Config, Path, int], Logger]] = {
    "tensorboard": _TensorBoard,
    "wandb": _wandb,
    "trackio": _trackio,
}

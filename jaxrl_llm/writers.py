"""What a run leaves behind: config.json, metrics, samples, events and rollouts as lines of JSON, and report.html."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from jaxrl_llm.config import Config, from_json, to_json
from jaxrl_llm.errors import TryAgain, UserError
from jaxrl_llm.loggers import STATE, Logger, check_loggers, open_loggers
from jaxrl_llm.progress import Display, NoDisplay, make_display
from jaxrl_llm.report import write_report
from jaxrl_llm.report_numbers import Score, evaluated, failed_share
from jaxrl_llm.run_files import LOCK, append_jsonl, keep_steps, numbered, read_jsonl, replace_file, storage, to_line

__all__ = ["RunWriter", "check_loggers", "machine_facts", "previous_config", "read_jsonl", "storage"]

MODEL = "model"  # where trainer.export puts it, in a run's folder
REPORT_SECONDS = 30.0  # at least, between two reports of a run that goes on
REPORT_SHARE = 0.01  # of the time, at most, goes into them


def check_workdir(config: Config, workdir: Path | None) -> None:
    """
    Raises:
      UserError: it can be no run's folder, whatever the disk allows.
    """
    if workdir is None:
        return
    wrong = "is a file; expected a folder, or nothing yet"
    try:
        str(workdir).encode()  # orbax needs names in UTF-8
        workdir.lstat()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        unknown = "a name that is not UTF-8 (of LC_ALL=C, perhaps)" if isinstance(error, ValueError) else error.strerror
        raise UserError(f"--workdir {str(workdir)[:200]!r}: {unknown}; give another folder") from error
    if not workdir.exists():
        raise UserError(f"--workdir {workdir}: links to {os.readlink(workdir)!r}, and nothing is there")
    for path in (workdir, workdir / "checkpoints", *([workdir / MODEL] if config.trainer.export else [])):
        if path.exists() and not path.is_dir():
            raise UserError(f"--workdir {workdir}: " + (wrong if path == workdir else f"{path.name} in it {wrong}"))


def previous_config(workdir: str | Path) -> Config | None:
    """The configuration of the run in `workdir`, or None if there is no run.

    Raises:
      UserError: its config.json does not hold a valid configuration, or there is none beside other files.
    """
    path = Path(workdir) / "config.json"
    if not path.exists():
        found = path.parent.iterdir() if path.parent.is_dir() else ()
        # Beside what a person cannot see, what a start leaves that found no room.
        there = sorted(x.name for x in found if x.name[0] != "." and x.name not in ("config.json.tmp", LOCK))
        if there:
            more = f" and {len(there) - 3} more" if len(there) > 3 else ""
            raise UserError(
                f"--workdir={workdir}: holds no run (no config.json) but {', '.join(there[:3])}{more}; expected "
                "a folder that is not there yet, an empty one, or a run's, which goes on"
            )
        return None
    try:
        text = path.read_text(encoding="utf-8")
        if not isinstance(plain := json.loads(text), dict):
            raise UserError(f"expected a configuration, found {text:.40}")
        if "model_type" in plain:
            raise UserError("is a model's: the folder holds a model and no run; give another --workdir")
        return from_json(text)
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def machine_facts() -> dict[str, str]:
    """What a run runs on, for people: devices, versions, cores, memory."""
    import jax

    kinds = Counter(device.device_kind for device in jax.devices())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "devices": ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        "backend": jax.default_backend(),
        "processes": str(jax.process_count()),
        "jax": jax.__version__,
        "Python": platform.python_version(),
        "CPU cores": str(cores),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        facts["memory"] = f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    return facts


class RunWriter:
    """Writes a run's folder and shows its progress.

    Each step stands once in every file, also after a resume: what came after the step that a run resumes from is
    dropped when the writer opens. Step 0 is what is known before the first step. A run that starts anew in a folder,
    since the one before it left no checkpoint, keeps that one's files in `earlier-NUMBER/`. events.jsonl alone is a
    log: when the run started and on what, what it said, how it ended.
    """

    def __init__(
        self,
        workdir: str | Path,
        config: Config,
        *,
        total_steps: int,
        resumed_step: int = -1,
        unfinished: bool = False,
        machine: Mapping[str, str] | None = None,
    ):
        """
        Args:
          workdir: made if it is not there.
          total_steps: of the run.
          resumed_step: the last step that counts of what the folder holds; -1 if nothing does.
          unfinished: whether that step's line of metrics.jsonl is still to be written.
          machine: `machine_facts()`, for the report.

        Raises:
          UserError: a logger is missing, or cannot be started.
          StorageError: the folder cannot be written.
        """
        check_loggers(config)
        self.workdir, self._config, self._total_steps = Path(workdir), config, total_steps
        self._last, self._ended, self._report_due = max(resumed_step, 0), False, 0.0
        with storage(self.workdir):
            self.workdir.mkdir(parents=True, exist_ok=True)
            earlier = _set_aside(self.workdir) if resumed_step < 0 else None
            replace_file(self.workdir / "config.json", to_json(config) + "\n")
            told = keep_steps(self.workdir / "metrics.jsonl", resumed_step - unfinished)
            told += keep_steps(self.workdir / "samples.jsonl", resumed_step)
            told += keep_steps(self.workdir / "events.jsonl", None)
            for folder in ("rollouts", "evaluations"):
                for step, path in numbered(self.workdir, f"{folder}/*.jsonl"):
                    if step > resumed_step:
                        path.unlink()
            told += _missing_steps(self.workdir / "metrics.jsonl", resumed_step - unfinished)
        self._loggers = open_loggers(config, self.workdir, resumed_step + 1)
        self._event("start", step=self._last, total_steps=total_steps, machine=machine or {})
        self._display: Display = NoDisplay()
        self._show(self._open_display)
        for text in told:
            self.note(f"notice: {text}")
        if earlier:
            self.note(
                f"{self.workdir} held a run without a checkpoint: this one starts anew; its files are in {earlier}"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl; the numbers may be arrays. What is not finite is written as null."""
        numbers = {name: np.asarray(value).item() for name, value in metrics.items()}
        append_jsonl(self.workdir / "metrics.jsonl", {"step": step, **numbers})
        self._last = step
        for logger in self._loggers[:]:
            with self._told(logger):
                logger.log(step, numbers)
        self._show(lambda display: display.step(step, numbers))
        if time.monotonic() >= self._report_due:
            self._report()

    def wants_samples(self, step: int) -> bool:
        trainer = self._config.trainer
        due = trainer.sample_interval and (step % trainer.sample_interval == 0 or step in (1, self._total_steps))
        return bool(due and trainer.samples_to_show)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Responses to look at: appended to samples.jsonl and shown.

        Args:
          rows: each with `prompt`, `response`, and perhaps `score`, `advantage`, `length`, `tokens` with numbers beside
            them (samples.py) and whatever else is known.
        """
        append_jsonl(self.workdir / "samples.jsonl", *({"step": step, **row} for row in rows))
        self._show(lambda display: display.samples(step, rows))

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Every response of a step, one a line, in rollouts/STEP.jsonl; arrays become lists."""
        self._write_rows("rollouts", step, rows)

    def _write_rows(self, folder: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        path = self.workdir / folder / f"{step}.jsonl"
        with storage(path):
            path.parent.mkdir(exist_ok=True)
            replace_file(path, "".join(to_line({"step": step, **row}) for row in rows))

    def evaluation(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Every response of an evaluation and its scores, one a line, in evaluations/STEP.jsonl."""
        self._write_rows("evaluations", step, rows)

    def note(self, text: str) -> None:
        """A sentence for the person who watches."""
        self._event("note", text=text)
        self._show(lambda display: display.note(text))

    def busy(self, text: str) -> None:
        """What has begun and may take long: shown until the next note, and not written down."""
        self._display.busy(text)

    def stuck(self, why: str) -> None:
        """The process is about to end (watchdog.py), with no time for more than this."""
        self._event("end", step=self._last, outcome="aborted", why=why)

    def close(self, error: BaseException | None = None) -> None:
        """Ends the run's files and says what came of it; a second call does nothing.

        Args:
          error: what ended the run before its time, if anything did.
        """
        if self._ended:
            return
        self._ended = True
        done = self._last >= self._total_steps and error is None
        # Who leaves the loop, or presses Ctrl-C, stops a run; anything else breaks it.
        stopped = error is None or isinstance(error, KeyboardInterrupt | GeneratorExit | TryAgain)
        why = str(error) if isinstance(error, TryAgain) else "" if stopped else f"{type(error).__name__}: {error}"
        outcome = "done" if done else "stopped" if stopped else "aborted"
        summary: list[str] = []
        try:
            if not sys.is_finalizing():  # then there is nothing left to write it with
                self._event("end", step=self._last, outcome=outcome, why=why)
                self._report()
                summary = self._summary(done)
        finally:
            self._show(lambda display: display.close(summary))
            for logger in self._loggers[:]:
                with self._told(logger):
                    logger.close()

    def _open_display(self, none: Display) -> None:
        del none
        logging, interval = self._config.logging, self._config.trainer.log_interval
        about: dict[str, Any] = {"name": logging.name, "total_steps": self._total_steps, "log_interval": interval}
        self._display = make_display(logging.progress, **about)

    def _show(self, show: Callable[[Display], None]) -> None:
        """Goes on without a display where what it is shown on is gone: a terminal, a pipe's reader, room on a disk."""
        try:
            show(self._display)
        except (OSError, ValueError) as error:  # the latter where the stream was closed
            self._display = NoDisplay()
            self._event("note", text=f"progress is no longer shown: {type(error).__name__}: {error}")

    @contextlib.contextmanager
    def _told(self, logger: Logger) -> Iterator[None]:
        """Goes on without a logger that fails: metrics.jsonl has all that it would have been given."""
        try:
            yield
        except Exception as error:
            self._loggers.remove(logger)
            self.note(f"logging.{logger.key} is given up: {type(error).__name__}: {error}")

    def _event(self, kind: str, **facts: Any) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        append_jsonl(self.workdir / "events.jsonl", {"kind": kind, "time": now, **facts})

    def _report(self) -> None:
        if not self._config.logging.report:
            return
        start = time.monotonic()
        try:
            write_report(self.workdir)
        except Exception as error:  # whatever is wrong with the page, the run goes on
            self.note(f"report.html is not written: {type(error).__name__}: {error}")
        spent = time.monotonic() - start
        self._report_due = start + max(REPORT_SECONDS, spent / REPORT_SHARE)

    def _summary(self, done: bool) -> list[str]:
        """The last lines that a person sees: what was reached, where it is, what may come next."""
        run = shlex.quote(str(self.workdir))
        metrics = self.workdir / "metrics.jsonl"
        found = read_jsonl(metrics) if metrics.exists() else []
        lines = [f"eval: {_scores(row)}" for row in evaluated(found)]
        if failed := failed_share(found):
            lines.append(f"the reward failed on {failed:.1%} of the responses in training (events.jsonl tells why)")
        if self._config.logging.report and (self.workdir / "report.html").exists():
            lines.append(f"report: {self.workdir / 'report.html'}")
        kept = self.workdir.glob("checkpoints/[0-9]*/checksums.json")
        steps = [int(path.parent.name) for path in kept if path.parent.name.isdecimal()]
        if steps:
            lines.append(f"checkpoint: {self.workdir / 'checkpoints' / str(max(steps))}")
            if not done:
                lines.append(f"to go on: the same command again, with --workdir {run}")
            elif self._config.data.eval:
                lines.append(f"next: python -m jaxrl_llm.evaluate --run {run}")
        return lines


class SilentWriter(RunWriter):
    """What every process of a run but the first has: it wants what the first one's wants, and writes nothing."""

    def __init__(self, config: Config, total_steps: int):
        self._config, self._total_steps = config, total_steps

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        pass

    def evaluation(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def busy(self, text: str) -> None:
        pass

    def stuck(self, why: str) -> None:
        pass

    def close(self, error: BaseException | None = None) -> None:
        pass


def _scores(row: Mapping[str, Any]) -> str:
    """
    >>> first, last = Score(0, 0.2, None, None), Score(60, 0.71, 0.62, 0.79)
    >>> _scores({"source": "sums", "first": first, "last": last, "problems": 100.0, "others": {"brief": 0.5}})
    'sums 0.200 before, 0.710 [0.620, 0.790] after step 60 (100 problems); brief 0.500'
    """

    def text(score: Score) -> str:
        known = score.low is not None and score.high is not None
        return f"{score.mean:.3f}" + (f" [{score.low:.3f}, {score.high:.3f}]" if known else "")

    first, last = row["first"], row["last"]
    before = "before" if first.step == 0 else f"after step {first.step}"
    found = f"{row['source']} {text(first)} {before}"
    if last.step != first.step:
        found += f", {text(last)} after step {last.step}"
    found += f" ({row['problems']:.0f} problems)" if row["problems"] else ""
    others = ", ".join(f"{name} {value:.3f}" for name, value in row["others"].items())
    found += f"; {others}" if others else ""
    failed = row.get("failed")
    return found + (f"; the reward failed on {failed:.1%} of the responses, which count as 0" if failed else "")


def _missing_steps(metrics: Path, last: int) -> list[str]:
    """What is to be told where steps up to `last` have no line."""
    there = {row["step"] for row in read_jsonl(metrics)} if metrics.exists() else set[int]()
    missing = [step for step in range(1, last + 1) if step not in there]
    if not missing:
        return []
    lines = f"{len(missing)} of {last} lines" if len(missing) > 1 else "a line"
    return [f"{metrics} lacks {lines}, the first of step {missing[0]}; the run goes on without"]


def _set_aside(workdir: Path) -> Path | None:
    """Moves what an earlier run has written of its steps into a folder of its own, which is returned."""
    names = ("metrics.jsonl", "samples.jsonl", "rollouts", "evaluations", "tensorboard")
    found = [path for name in names if (path := workdir / name).exists()]
    also = [workdir / name for name in ("config.json", "events.jsonl", "report.html", STATE)]
    if not found:
        for path in also[1:]:  # of a run that did not come to its first step
            path.unlink(missing_ok=True)
        return None
    number = 1
    while (earlier := workdir / f"earlier-{number}").exists():
        number += 1
    earlier.mkdir()
    for path in (*found, *also):
        if path.exists():
            path.rename(earlier / path.name)
    return earlier

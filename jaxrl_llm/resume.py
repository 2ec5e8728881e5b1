"""What a run keeps so that it can go on, and how it goes on: which checkpoint, what is in it, which one is the best."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.config import Config, from_json, resume_differences, to_json
from jaxrl_llm.curriculum import Curriculum
from jaxrl_llm.errors import StorageError, UserError, nearest
from jaxrl_llm.loading import Inputs, abstract_state, frozen_base, initial_state
from jaxrl_llm.peers import Peers, must_agree
from jaxrl_llm.steps.phases import Program
from jaxrl_llm.types import RunState
from jaxrl_llm.writers import MODEL, previous_config

EVALUATED = r"val-core/.+/reward/mean@\d+"


@dataclasses.dataclass(frozen=True)
class Best:
    """The saved step with the highest score so far."""

    metric: str  # as in trainer.best_metric
    step: int
    score: float


class SampledAhead(NamedTuple):
    """What was sampled for the step after a checkpoint's, see ahead.py."""

    cursor: int  # of its prompts
    indices: list[int]  # G, of its prompts in the data
    written: Mapping[str, Mapping[str, Any]]  # phase -> the evidence that it wrote, by field


class Keeper:
    """The checkpoints of a run, of one without a folder none."""

    def __init__(self, config: Config, workdir: Path | None, *, strict: bool = False) -> None:
        """
        Args:
          strict: whether a damaged checkpoint ends the run instead of the one before it being taken.

        Raises:
          UserError: the folder holds a run with another configuration.
          StorageError: no checkpoint is whole though there were some; or one is not, and `strict`.
        """
        self.config, self._workdir = config, workdir
        self.notes: list[str] = []  # to tell, for whoever does
        self._looked_for = False  # the best metric, and it was not there
        self.step: int | None = None  # that the run goes on from; None: it starts
        # The metrics of that step, whose evaluation is still to be made: a signal came, and its time was for saving.
        self.pending: dict[str, float] | None = None
        self.ahead: SampledAhead | None = None  # that the step after it begins with
        self.best: Best | None = None
        self._checkpoints, self._saved = None, set[int]()
        self._data: dict[str, Any] = {}  # by which the training data is known again
        if workdir is None:
            return
        self._checkpoints = Checkpoints(workdir / "checkpoints", keep=config.trainer.keep_checkpoints)
        changed = _check_config(config, workdir, self._checkpoints)
        found = self._checkpoints.newest_good(strict=strict)
        (self.step, problems), steps = Peers.of_run().share((found, self._checkpoints.steps()))[0]
        # Not asked again of the folder, of which one process may know a little later than another.
        self._saved = set(steps)
        self.notes += [f"notice: a checkpoint is damaged: {problem}" for problem in problems]
        if self.step is not None:
            self.notes += [f"resumed from step {self.step}", *changed]

    def restore(self, program: Program, inputs: Inputs) -> tuple[RunState, int, Curriculum | None]:
        """State, data cursor and curriculum of the step to go on from, or those that a run begins with.

        Raises:
          UserError: the curriculum has too few prompts to draw from, or the processes of the run read other data.
          StorageError: the checkpoint is of another model, optimizer or dtype, or does not fit the data.
        """
        peers, data = Peers.of_run(), {"data.train": inputs.train, "data.eval": inputs.held_out}
        if peers.count > 1:
            must_agree(peers, {f"tokens of config.{key}": found and found.fingerprint for key, found in data.items()})
        curriculum = _new_curriculum(self.config, inputs)
        self._data = inputs.train.fingerprint if inputs.train and self._checkpoints else {}
        if self._checkpoints is None or self.step is None:
            return initial_state(program, inputs), 0, curriculum
        target = abstract_state(program)
        if held := any(name.startswith("ahead.") for name in self._checkpoints.leaves(self.step)):
            target = target.replace(ahead=_abstract_ahead(program))
        state, meta = self._checkpoints.restore(target, self.step)
        cursor = int(meta["cursor"])
        if curriculum is not None:
            try:
                curriculum = curriculum.with_json(meta["curriculum"])
            except (KeyError, ValueError) as error:
                where = self._checkpoints.folder / str(self.step)
                raise StorageError(f"{where}: does not fit the data: {error}") from error
        if (before := meta.get("data", self._data)) != self._data:
            then, now = before["prompts"], self._data["prompts"]
            how = f"{then} prompts then, {now} now" if then != now else "as many prompts, of other tokens"
            self.notes.append(
                f"notice: the training data (or the tokenizer) is not what it was at step {self.step}: {how}; the run "
                "goes on with it, but not as it would have"
            )
            if held:  # its prompts may not be there any more
                held, cursor = False, int(meta["ahead"]["cursor"])
        if held and state.ahead is not None:
            self.ahead = SampledAhead(**meta["ahead"], written=state.ahead)
        if pending := meta.get("pending"):
            self.pending = {name: math.nan if value is None else value for name, value in pending.items()}
        if (best := meta.get("best")) and best["metric"] == self.config.trainer.best_metric:
            self.best = Best(**best)
        return state.replace(base=frozen_base(program, inputs), ahead=None), cursor, curriculum

    def save(
        self,
        step: int,
        state: RunState,
        cursor: int,
        curriculum: Curriculum | None,
        metrics: Mapping[str, float],
        *,
        pending: Mapping[str, float] | None = None,
        ahead: SampledAhead | None = None,
        hold: bool = False,
    ) -> None:
        """Begins to save a step, if it is not saved yet (`Checkpoints.save`, which see for `hold`).

        Args:
          metrics: of the step, by which the best one is found.
          pending: these, where the step is still to be evaluated.
          ahead: what is sampled for the next step.
        """
        if self._checkpoints is None or step in self._saved:
            return
        self._saved.add(step)
        self.consider(step, metrics)
        meta: dict[str, Any] = {"cursor": cursor, "config": to_json(self.config), "data": self._data}
        if curriculum is not None:
            meta["curriculum"] = curriculum.to_json()
        if pending is not None:
            meta["pending"] = {name: value if math.isfinite(value) else None for name, value in pending.items()}
        if self.best:
            meta["best"] = dataclasses.asdict(self.best)
        state = state.replace(base=None)  # what the model's folder has need not be kept again
        if ahead is not None:
            state = state.replace(ahead=ahead.written)
            meta["ahead"] = {"cursor": ahead.cursor, "indices": ahead.indices}
        spare = (self.best.step,) if self.best and self.config.trainer.keep_best else ()
        self._checkpoints.save(step, state, meta, spare=spare, hold=hold)

    def consider(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes a saved step for the best one if its score is the highest."""
        name = self.config.trainer.best_metric
        score = best_score(metrics, name)
        if score is None and name and name not in metrics and _evaluated(metrics) and not self._looked_for:
            self._looked_for = True
            self.notes.append(f"notice: trainer.best_metric = {name!r}: no such metric; {nearest(name, metrics)}")
        if score is not None and (self.best is None or score > self.best.score):
            self.best = Best(name, step, score)

    def is_exported(self, step: int) -> bool:
        """Whether the model of this step, the last one, is written: not if the run was killed before that."""
        if self._workdir is None or self._checkpoints is None:
            return True
        # Not by the files' times: clocks are set back, and copies have new ones.
        written = (self._workdir / MODEL / "config.json").is_file() and self._checkpoints.exported() == step
        return Peers.of_run().share(written)[0]

    def exported(self, step: int) -> None:
        """The model of this step is written."""
        if self._checkpoints and Peers.of_run().first:
            self._checkpoints.mark_exported(step)

    def release(self) -> None:
        if self._checkpoints:
            self._checkpoints.release()

    def poll(self) -> None:
        if self._checkpoints:
            self._checkpoints.poll()

    def wait(self) -> None:
        if self._checkpoints:
            self._checkpoints.wait()

    def close(self) -> None:
        if self._checkpoints:
            self._checkpoints.close()


def best_score(metrics: Mapping[str, float], name: str) -> float | None:
    """The metric of this name, for "" the mean over what was evaluated; None where there is no such number.

    >>> best_score({"val-core/a/reward/mean@1": 0.5, "val-core/b/reward/mean@1": 1.0, "step": 3}, "")
    0.75
    >>> best_score({"critic/score/mean": 0.5}, "")
    """
    evaluated = _evaluated(metrics)
    mean = sum(evaluated) / len(evaluated) if evaluated else None
    found = metrics.get(name) if name else mean
    return found if found is not None and math.isfinite(found) else None


def _evaluated(metrics: Mapping[str, float]) -> list[float]:
    return [value for name, value in metrics.items() if re.fullmatch(EVALUATED, name)]


def _check_config(config: Config, workdir: Path, checkpoints: Checkpoints) -> list[str]:
    """How the configuration differs, as it may, from that of the run in the folder."""
    told = []
    try:
        before = previous_config(workdir)
    except UserError as error:  # a checkpoint has it too
        if (before := _saved_config(checkpoints)) is None:
            raise
        told = [f"notice: the configuration is that of the newest checkpoint: {error}"]
    if before is None:
        return []
    changed, refused = resume_differences(before, config)
    if refused:
        lines = "\n  ".join(refused)
        raise UserError(f"{workdir} holds a run with another configuration; use another --workdir:\n  {lines}")
    return [*told, *changed]


def _saved_config(checkpoints: Checkpoints) -> Config | None:
    """That of the newest checkpoint that has one."""
    for step in reversed(checkpoints.steps()):
        with contextlib.suppress(StorageError, KeyError, UserError):
            return from_json(checkpoints.read_meta(step)["config"])
    return None


def _abstract_ahead(program: Program) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """The shapes, dtypes and shardings of what a checkpoint holds of a `SampledAhead`."""
    config, rows = program.config, program.layout.rows

    def written(n: int) -> dict[str, jax.ShapeDtypeStruct]:
        row = (config.data.train_batch_size * n,)
        frame = (*row, config.rollout.response_length)
        kinds: dict[str, tuple[tuple[int, ...], Any]] = {
            "uid": (row, np.int32),
            "responses": (frame, np.int32),
            "response_mask": (frame, np.bool_),
            "response_length": (row, np.int32),
            "rollout_log_probs": (frame, np.float32),
            "finish_reason": (row, np.int32),
        }
        return {name: jax.ShapeDtypeStruct(*kind, sharding=rows) for name, kind in kinds.items()}

    return {"gen": written(config.rollout.n)} | ({"gen_max": written(1)} if program.gen_max else {})


def _new_curriculum(config: Config, inputs: Inputs) -> Curriculum | None:
    settings, size, drawn = config.data.curriculum, len(inputs.train or ()), config.data.train_batch_size
    if settings.sampler == "uniform":
        return None
    if size < drawn:
        raise UserError(
            f"config.data.curriculum.sampler = {settings.sampler!r}: draws different prompts, and there are {size} for "
            f"config.data.train_batch_size = {drawn}"
        )
    how = {"sampler": settings.sampler, "smoothing": settings.smoothing, "floor": settings.floor}
    return Curriculum.new(size, **how, seed=config.seed)

"""Training: `fit(config)` yields (metrics, batch) once a step. The step below reads like the table of phases.

Everything impure is here and in what comes before the first step (run_start.py): data, host rewards, clocks, logs,
checkpoints. The phases themselves are pure (steps/) and compiled by then (compiled.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from jaxrl_llm.accounting import accounting_metrics
from jaxrl_llm.compiled import CompiledTraining
from jaxrl_llm.config import Config
from jaxrl_llm.data import PromptBatch
from jaxrl_llm.errors import RunAborted, TryAgain
from jaxrl_llm.evaluation import GivenUp
from jaxrl_llm.guard import Guard
from jaxrl_llm.health import why_stop
from jaxrl_llm.lengths import Lengths
from jaxrl_llm.loading import ordinary_policy
from jaxrl_llm.memory import memory_metrics
from jaxrl_llm.metrics import extras_metrics, timing_metrics
from jaxrl_llm.models.hf_export import export_policy
from jaxrl_llm.profiling import Steps
from jaxrl_llm.rewards import Scores
from jaxrl_llm.run_start import RunStart
from jaxrl_llm.samples import rollout_rows, sample_rows
from jaxrl_llm.sharding import fetch
from jaxrl_llm.timers import host_metrics
from jaxrl_llm.types import Batch
from jaxrl_llm.writers import MODEL, storage

Metrics = dict[str, float]


def fit(
    config: Config,
    workdir: str | Path | None = None,
    *,
    strict_resume: bool = False,
    guard: Guard | None = None,
    profile: Steps | None = None,
) -> Run:
    """A run of `config`: iterate over it for (metrics, batch) of each step.

    Args:
      workdir: where config.json, metrics.jsonl, samples and checkpoints go; a folder that holds a run resumes it. None
        keeps nothing but what is yielded.
      strict_resume: whether a damaged checkpoint is an error, instead of the newest good one being taken.
      guard: of a command: signals that ask the run to stop, and a watchdog over its phases.
      profile: steps of which a trace is written to profile/ in `workdir` (of the first process).

    Raises:
      UserError: something in the config, the data, a model or the folder is wrong; before the first step.
    """
    return Run(config, workdir, strict_resume=strict_resume, guard=guard, profile=profile)


class Stepped(NamedTuple):
    """What a step leaves to be looked at."""

    metrics: Metrics
    batch: Batch
    given: PromptBatch
    texts: list[str]  # B responses, as people see them
    scored: Scores | None  # None where nothing was scored
    lengths: Lengths
    generated: tuple[Lengths, ...] = ()  # of each batch that was sampled in it


class Run(RunStart):
    """One training run: an iterator of (metrics, batch), one a step, that holds the live state.

    Closing it, or leaving the loop early, leaves the state after the last step, which `state()` copies.
    """

    def __init__(self, config: Config, workdir: str | Path | None = None, **how: Any) -> None:
        """As `fit`."""
        super().__init__(config, workdir, **how)
        self._steps = self._run()

    # The step

    def _step(self) -> Stepped:
        phases, program, state, timer, config = self._phases, self._program, self._state, self._timers, self.config
        number = np.int32(self.step)
        with timer("update_weights") as wait:
            view = wait(phases.update_weights(program.policy(state)))
        # The phases data, gen, gen_max and reward, more than once where prompts without spread are replaced; for the
        # next step and this one where responses are sampled a step ahead.
        collected = self._collect(view, self.step, self._cursor, self._curriculum)
        batch, given, scored = collected.batch, collected.given, collected.scored
        del view
        if config.model.use_remove_padding:
            phases = phases.fit(fetch(batch.response_length))
        if phases.old_log_prob:
            with timer("old_log_prob") as wait:
                batch = wait(phases.old_log_prob(program.policy(state), batch))
        if phases.ref:
            with timer("ref") as wait:
                batch = wait(phases.ref(program.reference(state), batch))
        if phases.values:
            with timer("values") as wait:
                batch = wait(phases.values(program.critic_params(state), batch))
        with timer("adv") as wait:
            batch, kl_coef, metrics = wait(phases.adv(batch, state.kl_coef))
        updated = {}
        if phases.update_critic:
            with timer("update_critic") as wait:
                updated["critic"] = wait(self._train("critic", phases.update_critic, batch, number))
        if self.step >= config.critic.warmup_steps:
            with timer("update_actor") as wait:
                updated["actor"] = wait(self._train("actor", phases.update_actor, batch, number))
        if phases.update_reference and _due(self.step + 1, config.reference.sync_steps):
            with timer("update_reference") as wait:
                moved = phases.update_reference(state.reference, self._state.actor.params, np.int32(self.step + 1))
                self._state = self._state.replace(reference=wait(moved))
        self.step, self._cursor, self._curriculum = self.step + 1, given.cursor, collected.curriculum
        done = self._layout.put_whole(np.int32(self.step))
        self._state = self._state.replace(kl_coef=kl_coef, step=done)
        extras = [extras for extras, valid in zip(scored.extras, scored.valid, strict=True) if valid]
        numbers = host_metrics(metrics, updated) | extras_metrics(extras) | collected.metrics
        shown, generated = collected.sampled.shown, collected.generated
        return Stepped(numbers, batch, given, shown, scored, collected.lengths, generated)

    def _train(self, role: str, training: CompiledTraining, batch: Batch, step: np.int32) -> list[Any]:
        """The phase's updates one after the other; their metrics.

        Each takes over the buffers of the state before it, so the new state is put down at once: an interrupted phase
        leaves a whole state behind.
        """
        metrics, frozen = [], getattr(self._program, role).base(self._state)
        for index in range(training.count):
            trained, found = training.update(getattr(self._state, role), batch, step, np.int32(index), frozen)
            self._state = self._state.replace(**{role: trained})
            metrics.append(found)
        jax.block_until_ready(self._state)
        return metrics

    # The run

    def _run(self) -> Iterator[tuple[Metrics, Batch]]:
        config, keeper = self.config, self._keeper
        assert keeper is not None
        with self._closed_by_errors():
            if self.step == 0 and config.eval.before and self._evaluator:
                self._write(0, self._evaluate() or {})
            if keeper.pending is not None:
                self._write(self.step, self._finished(keeper.pending))
            if self.step >= self.total_steps and config.trainer.export and not keeper.is_exported(self.step):
                self._export()
            self._guard.signals.stepping, unfinished, asked = True, None, ""
            while self.step < self.total_steps:
                keeper.poll()
                if asked := asked or self._asked_to_stop():
                    self._stop(asked, unfinished)
                self._timers.reset(self.step + 1)
                if self._profile:
                    self._profile.before(self.step + 1)
                with self._timers("step"):
                    stepped = self._step()
                    metrics, last = stepped.metrics, self.step == self.total_steps
                    broken = why_stop(config, metrics, stepped.scored, self._state)
                    # Who stops a run gives it little time: it is for saving.
                    asked = self._asked_to_stop()
                    hurried = bool(asked) and not last
                    evaluate = not broken and (_due(self.step, config.eval.interval) or (last and config.eval.after))
                    if evaluate and not hurried:
                        found = self._evaluate(None if last else self._asked_to_stop)
                        hurried, asked = found is None, self._asked_to_stop()
                        metrics |= found or {}
                    save = config.trainer.save_interval
                    if not (broken or hurried) and (_due(self.step, save) or (last and save)):
                        with self._timers("save_checkpoint"):
                            self._save(metrics, hold=True)
                if self._profile:
                    self._profile.after(self.step)
                metrics |= timing_metrics(
                    self._timers.seconds,
                    total_tokens=int(metrics["perf/total_num_tokens"]),
                    response_tokens=self._response_tokens(stepped),
                    n_devices=self._layout.mesh.size,
                )
                metrics |= self._accounting(stepped, metrics["perf/time_per_step"])
                unfinished = metrics if evaluate and hurried else None
                self._show(stepped)
                self._write(self.step, metrics)
                keeper.release()  # a checkpoint whose step is not in the run's files would leave a gap there
                if last:
                    with self._timers("save_checkpoint"):
                        keeper.wait()
                if last and config.trainer.export and not broken:
                    self._export()
                if broken:
                    raise RunAborted(f"step {self.step}: {broken}")
                yield metrics, stepped.batch
        self.close()

    def _asked_to_stop(self) -> str:
        """The signal that any of the run's processes has received, "" if none has; all of them must ask."""
        return next(filter(None, self._peers.share(self._guard.signals.received)), "")

    def _stop(self, signal: str, unfinished: Metrics | None) -> None:
        """Ends the run since a signal asked for it.

        Args:
          unfinished: the metrics of the last step, if it was still to be evaluated.
        """
        assert self._keeper is not None
        kept = "no checkpoint is kept (trainer.save_interval = 0)"
        if self.config.trainer.save_interval and self._workdir:
            with self._timers("save_checkpoint"):
                self._save({}, unfinished)
                self._keeper.wait()
            kept = "it is saved; the same command goes on"
        raise TryAgain(f"{signal}: after step {self.step} of {self.total_steps}; {kept}")

    def _finished(self, metrics: Metrics) -> Metrics:
        """The metrics of the step before a run was stopped, with those of its evaluation."""
        assert self._keeper is not None
        evaluated = self._evaluate() or {}
        self._keeper.consider(self.step, evaluated)
        return metrics | evaluated

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Metrics, Batch]:
        return next(self._steps)

    # After a step

    def _save(self, metrics: Metrics, unfinished: Metrics | None = None, *, hold: bool = False) -> None:
        assert self._keeper is not None
        kept = self._state, self._cursor, self._curriculum
        ahead = self._ahead.kept() if self._ahead else None
        self._keeper.save(self.step, *kept, metrics, pending=unfinished, ahead=ahead, hold=hold)
        self._tell_of_checkpoints()

    def _response_tokens(self, stepped: Stepped) -> int:
        """Of the responses that the phase gen has made: where it samples a step ahead, not of those learned from."""
        if self._ahead is None:
            return int(stepped.metrics["perf/response_tokens"])
        return sum(int(lengths.response.sum()) for lengths in stepped.generated)

    def _accounting(self, stepped: Stepped, seconds: float) -> Metrics:
        """What the step computed, and what the devices and the host had to hold for it."""
        found = accounting_metrics(
            self._accounts.count(stepped.lengths, stepped.generated),
            self._timers.seconds,
            seconds=seconds,
            peak=self._peak,
            n_devices=self._layout.mesh.size,
        )
        return found | memory_metrics()

    def _evaluate(self, give_up: Callable[[], object] | None = None) -> Metrics | None:
        """None: it was given up, as `give_up` wanted."""
        if self._evaluator is None:
            return {}
        with self._timers("testing"):
            view = self._update_weights(self._program.policy(self._state))
            try:
                metrics, rows = self._evaluator(view, self.step, give_up)
            except GivenUp:
                return None
        if self._writer and self.config.eval.responses:
            self._writer.evaluation(self.step, rows)
        return metrics

    def _show(self, stepped: Stepped) -> None:
        _, batch, given, texts, scored, *_ = stepped
        if self._writer is None or scored is None:
            return
        # Where every response failed, the error that ends the run tells why.
        if scored.failures and not self._told_of_failures and scored.num_failed < len(texts):
            self._told_of_failures = True
            failed = f"the reward failed on {scored.num_failed} of {len(texts)} responses"
            first = f"the first, of {len(scored.failures)}: {scored.failures[0]}"
            self._note(f"step {self.step}: {failed} (later ones are only counted, reward/failed_ratio); {first}")
        logging = self.config.trainer
        samples = self._writer.wants_samples(self.step)
        if samples or logging.rollout_dump:
            rows = rollout_rows(batch, given, texts, scored)
            if logging.rollout_dump:
                self._writer.rollouts(self.step, rows)
            if samples:
                self._writer.samples(self.step, sample_rows(rows, logging.samples_to_show, self._inputs.tokenizer))

    def _export(self) -> None:
        if self._workdir is None:
            return
        folder = self._workdir / MODEL
        policy = ordinary_policy(self._program, self._inputs, self._state)
        policy = fetch(policy) if self._peers.count > 1 else policy
        if self._peers.first:
            with storage(folder):
                if folder.exists():  # of this run, when it was shorter
                    shutil.rmtree(folder)
                export_policy(folder, policy, self._inputs.folder)
                if self._keeper:
                    self._keeper.exported(self.step)
        self._note(f"model: {folder}")

    def _write(self, step: int, metrics: Metrics) -> None:
        if self._writer and metrics:
            with self._guard.watchdog.phase("write"):
                self._writer.step(step, metrics)


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0

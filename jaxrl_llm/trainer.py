"""Training: `fit(config)` yields (metrics, batch) once a step. The step below reads like the table of phases.

Everything impure is here: data, host rewards, clocks, logs, checkpoints. The phases themselves are pure (steps/) and
compiled before the first step (compiled.py).
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.accounting import Accounts, accounting_metrics
from jaxrl_llm.collect import Collector, open_rewards, try_out
from jaxrl_llm.compile_log import CompileLog, Report
from jaxrl_llm.compiled import Compiled, CompiledTraining, compile_step, step_programs
from jaxrl_llm.config import Config
from jaxrl_llm.data import PromptBatch
from jaxrl_llm.errors import OutOfMemory, RunAborted, StorageError, TryAgain, is_out_of_memory
from jaxrl_llm.evaluation import Evaluators, evaluation_programs, make_evaluators
from jaxrl_llm.guard import Guard
from jaxrl_llm.health import why_stop
from jaxrl_llm.input_notes import input_notes
from jaxrl_llm.lengths import Lengths
from jaxrl_llm.loading import Inputs, build_program, load_inputs, make_layout, ordinary_policy
from jaxrl_llm.memory import explain, memory_metrics, tell_of_killed
from jaxrl_llm.metrics import extras_metrics, timing_metrics
from jaxrl_llm.models.hf_export import export_policy
from jaxrl_llm.order import epoch_steps
from jaxrl_llm.peaks import peak_flops
from jaxrl_llm.peers import Peers
from jaxrl_llm.profiling import Profile, Steps
from jaxrl_llm.resume import Keeper
from jaxrl_llm.reward_scorer import RewardScorer, make_scorer
from jaxrl_llm.rewards import Scores
from jaxrl_llm.run_mark import RunMark, hold
from jaxrl_llm.samplers import make_sampler
from jaxrl_llm.samples import rollout_rows, sample_rows
from jaxrl_llm.sharding import abstract_like, fetch
from jaxrl_llm.steps.phases import Program, cascade
from jaxrl_llm.timers import Timers, host_metrics
from jaxrl_llm.types import Batch, RunState
from jaxrl_llm.writers import MODEL, RunWriter, SilentWriter, check_loggers, check_workdir, machine_facts, storage

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
    generated: tuple[Lengths, ...] = ()  # of each batch that was sampled for it


class Run:
    """One training run: an iterator of (metrics, batch), one a step, that holds the live state.

    Closing it, or leaving the loop early, leaves the state after the last step, which `state()` copies.
    """

    def __init__(
        self,
        config: Config,
        workdir: str | Path | None = None,
        *,
        strict_resume: bool = False,
        guard: Guard | None = None,
        profile: Steps | None = None,
    ) -> None:
        """As `fit`."""
        check_loggers(config)
        self.config, self._guard = config, guard or Guard()
        self._timers = Timers(self._guard.watchdog)
        self._workdir = None if workdir is None else Path(workdir)
        check_workdir(config, self._workdir)
        self._writer: RunWriter | None = None
        self._profiled, self._profile = profile, None
        self._mark: RunMark | None = None
        self._keeper, self._evaluator, self._peers = None, None, Peers.of_run()
        with self._timers("start"):
            self._inputs = load_inputs(config, check=self._check_record)
            with self._closed_by_errors():
                self._start(workdir, strict_resume)
        self._steps = self._run()

    def _start(self, workdir: str | Path | None, strict_resume: bool) -> None:
        """All that comes before the first step. The rewards' workers start up while models are read."""
        config = self.config
        self._inputs = self._open_rewards()
        assert self._inputs.train is not None
        self._data = self._inputs.train
        epochs = epoch_steps(len(self._data), config.data.train_batch_size, config.trainer.epochs)
        self.total_steps = epochs if config.trainer.epochs else config.trainer.steps
        self._layout = make_layout(config)
        self._scorer, self._inputs = self._make_scorer()
        self._program = self._make_program()
        self._try_out()
        self._mark = hold(self._workdir, self._peers)
        self._keeper = keeper = Keeper(config, self._workdir, strict=strict_resume)
        self._state, self._cursor, self._curriculum = keeper.restore(self._program, self._inputs)
        try_out(self._inputs)
        if self._scorer:
            self._scorer.load()
        self.step = int(self._state.step)
        # Opened last: a start that fails leaves the folder as it was.
        if workdir:
            self._peers.share(None)  # nobody writes before everybody has read what the folder holds
            given: dict[str, Any] = {
                "total_steps": self.total_steps,
                "resumed_step": -1 if keeper.step is None else keeper.step,
                "unfinished": keeper.pending is not None,
                "machine": machine_facts(),
            }
            silent = SilentWriter(config, self.total_steps)
            self._writer = RunWriter(workdir, config, **given) if self._peers.first else silent
            self._guard.watchdog.tell = self._stuck
            self._mark = hold(self._workdir, self._peers, self._mark)
            if mark := self._mark:
                self._timers.entered = lambda phase: mark.at(self.step, phase)
                if mark.killed:
                    self._note(f"notice: {tell_of_killed(config, mark.killed)}")
            if self._profiled and self._peers.first and self.step < self.total_steps:
                where = {"step": self.step, "total": self.total_steps, "note": self._note}
                self._profile = Profile(self._profiled, Path(workdir), **where)
        self._told_of_failures = False
        self._note_inputs()
        self._tell_of_checkpoints()
        if self.step < self.total_steps:
            with (
                self._timers("compile"),
                CompileLog(self._busy, self._note, expected=self._programs()) as report,
            ):
                if self._scorer:
                    self._scorer.compile(report)
                self._compile(report)
            self._accounts = self._make_accounts()
            self._peak = peak_flops(config.trainer.device_tflops, config.model.dtype)
        else:
            self._note(f"nothing is left to do: step {self.step} of {self.total_steps} is done (trainer.steps)")

    # The step

    def _step(self) -> Stepped:
        phases, program, state, timer, config = self._phases, self._program, self._state, self._timers, self.config
        number = np.int32(self.step)
        with timer("update_weights") as wait:
            view = wait(phases.update_weights(program.policy(state)))
        # The phases data, gen, gen_max and reward, more than once where prompts without spread are replaced.
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
                self._write(0, self._evaluate())
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
                        metrics |= self._evaluate()
                    save = config.trainer.save_interval
                    if not (broken or hurried) and (_due(self.step, save) or (last and save)):
                        with self._timers("save_checkpoint"):
                            self._save(metrics, hold=True)
                if self._profile:
                    self._profile.after(self.step)
                metrics |= timing_metrics(
                    self._timers.seconds,
                    total_tokens=int(metrics["perf/total_num_tokens"]),
                    response_tokens=int(metrics["perf/response_tokens"]),
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
        evaluated = self._evaluate()
        self._keeper.consider(self.step, evaluated)
        return metrics | evaluated

    @contextlib.contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        """Whatever ends the run closes it; where memory ran out, the error says what needed it."""
        try:
            yield
        except BaseException as error:
            ended = error
            if is_out_of_memory(error):
                ended = OutOfMemory(explain(self.config, self._timers.phase, error))
            self.close(ended)
            if ended is error:
                raise
            raise ended from error

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Metrics, Batch]:
        return next(self._steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Ends the rewards' workers, waits for a checkpoint that is being written, and closes the run's files, which
        say how it ended (by `error`, if there was one); the state stays.

        Raises:
          StorageError: the checkpoint could not be written, and there was no other error.
        """
        self._inputs.rewards.close()
        if self._profile:
            self._profile.close()
        failed = None
        with self._guard.watchdog.phase("close"):
            try:
                if self._keeper:
                    self._keeper.close()
            except (StorageError, OutOfMemory) as failure:
                failed = failure
                if error is not None:
                    self._note(str(failure))
            if self._writer:
                writer, self._writer = self._writer, None
                writer.close(error or failed)
            if self._mark:
                self._mark.close()
        if failed and error is None:
            raise failed

    def state(self) -> RunState:
        """A copy of the state after the last whole step (the live one's buffers are donated to the next)."""
        return jax.tree.map(jnp.copy, self._state)

    # Before the first step

    def _open_rewards(self) -> Inputs:
        return open_rewards(self.config, self._inputs)

    def _check_record(self, role: str, record: Mapping[str, Any]) -> None:
        """Raises a UserError if a record, of "train" or of "eval", lacks what the run needs beside the prompt."""

    def _make_scorer(self) -> tuple[RewardScorer | None, Inputs]:
        return make_scorer(self.config, self._inputs, self._layout)

    def _make_program(self) -> Program:
        return build_program(self.config, self._inputs, self._layout, self.total_steps)

    def _try_out(self) -> None:
        """Finds out what is wrong with the records, beside what `load_inputs` does, before anything is written."""

    def _save(self, metrics: Metrics, unfinished: Metrics | None = None, *, hold: bool = False) -> None:
        assert self._keeper is not None
        kept = self._state, self._cursor, self._curriculum
        self._keeper.save(self.step, *kept, metrics, pending=unfinished, hold=hold)
        self._tell_of_checkpoints()

    def _tell_of_checkpoints(self) -> None:
        assert self._keeper is not None
        while self._keeper.notes:
            self._note(self._keeper.notes.pop(0))

    def _programs(self) -> int:
        """How many programs will be compiled."""
        evaluation = evaluation_programs(self.config) if self._inputs.held_out else 0
        return step_programs(self._program) + evaluation + (self._scorer is not None)

    def _compile(self, report: Report) -> None:
        self._note("compiling the phases (once, before the first step)")
        program, inputs, layout = self._program, self._inputs, self._layout
        prompts = layout.put_rows(self._data.batch(self._cursor, self.config.data.train_batch_size).prompts)
        rewards = {"weights": tuple(inputs.rewards.weights.tolist()), "jax_rewards": inputs.rewards.jax_functions}
        self._phases = compile_step(program, self._state, abstract_like(prompts), **rewards, report=report)
        sampler, config = partial(make_sampler, self.config, inputs, layout, program.stops), self.config
        self._collect = Collector(
            config,
            self._data,
            inputs.rewards,
            self._phases,
            sampler=sampler(self._phases.gen),
            greedy_sampler=sampler(self._phases.gen_max) if self._phases.gen_max else None,
            layout=layout,
            vocab_size=program.actor_model.vocab_size,
            timers=self._timers,
        )
        self._evaluator = self._compile_evaluator(self._phases.update_weights, report)

    def _compile_evaluator(self, update_weights: Compiled, report: Report) -> Evaluators | None:
        self._update_weights = update_weights
        if self._inputs.held_out is None:
            return None
        return make_evaluators(self._program, self._inputs, update_weights.out, report=report)

    # After a step

    def _make_accounts(self) -> Accounts:
        return Accounts.of(self._program.config, self._inputs.folder, cascade(self._program.config, self._layout))

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

    def _evaluate(self) -> Metrics:
        if self._evaluator is None:
            return {}
        with self._timers("testing"):
            metrics, rows = self._evaluator(self._update_weights(self._program.policy(self._state)), self.step)
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
        self._note(f"model: {folder}")

    def _write(self, step: int, metrics: Metrics) -> None:
        if self._writer and metrics:
            with self._guard.watchdog.phase("write"):
                self._writer.step(step, metrics)

    def _busy(self, text: str) -> None:
        self._guard.watchdog.alive()
        if self._writer:
            self._writer.busy(text)

    def _stuck(self, why: str) -> None:
        """The watchdog is about to end the process."""
        if self._writer:
            self._writer.stuck(why)
        if self._mark:
            self._mark.close()

    def _note(self, text: str) -> None:
        self._guard.watchdog.alive()  # to compile every program may take long, to compile one may not
        if self._writer:
            self._writer.note(text)

    def _note_inputs(self) -> None:
        warned, told = input_notes(self.config, self._inputs, self._program, self._state)
        for notice in warned:
            if self._writer is None:  # nobody reads notes then, in a notebook for instance
                warnings.warn(notice, stacklevel=4)
            self._note(f"notice: {notice}")
        for text in told:
            self._note(text)


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0

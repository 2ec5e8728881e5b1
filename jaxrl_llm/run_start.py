"""What comes before a run's first step, and its end: what is opened here is closed here.

The inputs are read, the models built, the state taken from a checkpoint, every program compiled, the folder's files
opened. trainer.py has the steps in between; what a run of another kind does otherwise it says in the hooks below.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp

from jaxrl_llm.accounting import Accounts
from jaxrl_llm.ahead import AheadCollector
from jaxrl_llm.collect import Collector, open_rewards, try_out
from jaxrl_llm.compile_log import CompileLog, Report
from jaxrl_llm.compiled import compile_step, step_programs
from jaxrl_llm.config import Config
from jaxrl_llm.errors import OutOfMemory, StorageError, is_out_of_memory
from jaxrl_llm.evaluation import evaluation_programs, make_evaluators
from jaxrl_llm.guard import Guard
from jaxrl_llm.input_notes import input_notes
from jaxrl_llm.loading import Inputs, build_program, load_inputs, make_layout
from jaxrl_llm.memory import explain, tell_of_killed
from jaxrl_llm.order import epoch_steps
from jaxrl_llm.peaks import peak_flops
from jaxrl_llm.peers import Peers
from jaxrl_llm.profiling import Profile, Steps
from jaxrl_llm.resume import Keeper
from jaxrl_llm.reward_scorer import RewardScorer, make_scorer
from jaxrl_llm.run_mark import RunMark, hold
from jaxrl_llm.samplers import make_sampler
from jaxrl_llm.sharding import abstract_like
from jaxrl_llm.steps.phases import Program, cascade
from jaxrl_llm.timers import Timers
from jaxrl_llm.types import Params, RunState
from jaxrl_llm.writers import RunWriter, SilentWriter, check_loggers, check_workdir, machine_facts

# (view, step, give_up) -> metrics, rows; GivenUp where `give_up`, asked before each batch, says so
Evaluate = Callable[[Params, int, Callable[[], object] | None], tuple[dict[str, float], list[dict[str, Any]]]]


class RunStart:
    """A run that is ready for its first step. Closing it leaves the state as it is, which `state()` copies."""

    def __init__(
        self,
        config: Config,
        workdir: str | Path | None = None,
        *,
        strict_resume: bool = False,
        guard: Guard | None = None,
        profile: Steps | None = None,
    ) -> None:
        """As `trainer.fit`."""
        check_loggers(config)
        self.config, self._guard = config, guard or Guard()
        self._timers = Timers(self._guard.watchdog)
        self._workdir = None if workdir is None else Path(workdir)
        check_workdir(config, self._workdir)
        self._writer: RunWriter | None = None
        self._profiled, self._profile = profile, None
        self._mark: RunMark | None = None
        self._keeper, self._evaluator, self._peers = None, None, Peers.of_run()
        self._ahead: AheadCollector | None = None
        with self._timers("start"):
            self._inputs = load_inputs(config, check=self._check_record)
            with self._closed_by_errors():
                self._start(workdir, strict_resume)

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

    # The end

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

    # Hooks, of which a run of another kind has its own

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
        collector = Collector(
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
        self._collect: Collector | AheadCollector = collector
        if config.trainer.one_step_off_policy:
            # A run that keeps checkpoints may be made longer, and is then to go on as the longer one would have.
            longer = self._workdir is not None and config.trainer.save_interval > 0
            ahead = AheadCollector(collector, self._data, until=None if longer else self.total_steps)
            if self._keeper and self._keeper.ahead:
                ahead.resume(self._keeper.ahead)
            self._collect = self._ahead = ahead
        self._update_weights = self._phases.update_weights
        self._evaluator = self._make_evaluator(report)

    def _make_evaluator(self, report: Report) -> Evaluate | None:
        """What evaluates on what is held out; None where nothing is. `_update_weights`, which makes its views, is
        compiled by then."""
        if self._inputs.held_out is None:
            return None
        return make_evaluators(self._program, self._inputs, self._update_weights.out, report=report)

    def _make_accounts(self) -> Accounts:
        return Accounts.of(self._program.config, self._inputs.folder, cascade(self._program.config, self._layout))

    # What is told

    def _tell_of_checkpoints(self) -> None:
        assert self._keeper is not None
        while self._keeper.notes:
            self._note(self._keeper.notes.pop(0))

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
                warnings.warn(notice, stacklevel=5)
            self._note(f"notice: {notice}")
        for text in told:
            self._note(text)

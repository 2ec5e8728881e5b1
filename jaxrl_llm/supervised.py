"""A run whose batches are given, not sampled and scored: what fine-tuning and a reward model's training share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxrl_llm.command_line import join_peers, keep_programs, make_parser, parse_args
from jaxrl_llm.compile_log import Report
from jaxrl_llm.compiled import Compiled, CompiledTraining, compile_training
from jaxrl_llm.data import PromptBatch
from jaxrl_llm.errors import say
from jaxrl_llm.evaluation import evaluation_programs
from jaxrl_llm.guard import guarded_exit_code, run_guarded
from jaxrl_llm.lengths import Lengths
from jaxrl_llm.loading import Inputs
from jaxrl_llm.sharding import abstract_like
from jaxrl_llm.signals import StopSignals
from jaxrl_llm.steps.step import ACTOR
from jaxrl_llm.timers import host_metrics
from jaxrl_llm.trainer import Run, Stepped
from jaxrl_llm.types import FINISH_LENGTH, Batch


class SupervisedRun(Run):
    """A run like that of `fit`; a subclass says how records become a finished batch, and what is trained on it."""

    def _batch(self, given: PromptBatch) -> Batch:
        """The finished batch of these prompts and what their records hold, on the host."""
        raise NotImplementedError

    def _open_rewards(self) -> Inputs:  # which only score what is held out
        return self._inputs if self._inputs.held_out is None else super()._open_rewards()

    def _programs(self) -> int:
        return 2 + (evaluation_programs(self.config) if self._inputs.held_out else 0)

    def _try_out(self) -> None:
        self._batch(self._data.batch(0, self.config.data.train_batch_size))

    def _compile(self, report: Report) -> None:
        self._note("compiling the update (once, before the first step)")
        program, state = self._program, abstract_like(self._state)
        given = self._data.batch(self._cursor, self.config.data.train_batch_size)
        self._training: CompiledTraining = compile_training(
            "update",
            program.actor,
            state.actor,
            abstract_like(self._layout.put_rows(self._batch(given))),
            self._layout,
            frozen=program.actor.base(state),
            seed=self.config.seed,
            consumer=ACTOR,
            report=report,
        )
        policy = program.policy(state)
        self._update_weights = Compiled("update_weights", program.update_weights, policy, report=report)
        self._evaluator = self._make_evaluator(report)

    def _step(self) -> Stepped:
        timer, number = self._timers, np.int32(self.step)
        with timer("data") as wait:
            given = self._data.batch(self._cursor, self.config.data.train_batch_size)
            host = self._batch(given)
            batch = wait(self._layout.put_rows(host))
        with timer("update_actor"):
            updated = self._train("actor", self._training.fit(np.asarray(host.response_length)), batch, number)
        self.step, self._cursor = self.step + 1, given.cursor
        done = self._layout.put_whole(np.int32(self.step))
        self._state = self._state.replace(step=done)
        prompt_tokens, response_tokens = int(np.sum(host.prompt_mask)), int(np.sum(host.response_mask))
        metrics = host_metrics({}, {"actor": updated}, prefix={"actor": "train"}) | {
            "train/truncated_ratio": float((np.asarray(host.finish_reason) == FINISH_LENGTH).mean()),
            "response_length/mean": response_tokens / host.num_rows,
            "perf/response_tokens": float(response_tokens),
            "perf/total_num_tokens": float(prompt_tokens + response_tokens),
        }
        return Stepped(metrics, batch, given, [], None, Lengths.of(host))


def command(name: str, about: str, start: Callable[..., Run], argv: Sequence[str] | None) -> int:
    """Runs `python -m jaxrl_llm.NAME` to its end; the exit code, see `errors.exit_code`."""

    def body(signals: StopSignals) -> None:
        config, args = parse_args(make_parser(name, about), sys.argv[1:] if argv is None else argv)
        speaks = join_peers(config, args)
        keep_programs(config.trainer.compilation_cache, writes=speaks)
        run_guarded(start, config, args, signals)
        if speaks:
            say(f"done: {Path(args.workdir)}; next: python -m jaxrl_llm.export {args.workdir} FOLDER")

    return guarded_exit_code(body)

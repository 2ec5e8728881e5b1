"""Measures the actor's update: the phase `update_actor` as the trainer compiles it, one mini-batch of all prompts.

    python -m benchmarks.update --json
    python -m benchmarks.update --prompts 8 --n 8 --prompt-length 128 --response-length 256 --lengths lognormal:64
    python -m benchmarks.update --preset smollm2-135m --prompt-length 256 --response-length 256 --micro-batch 4

Forward pass, GRPO's loss, backward pass, clipping and AdamW, over random prompts and responses whose lengths differ
by row. `tokens` are those of prompts and responses, a prompt counted for each of its responses. Other keys of a line:
benchmarks/rollout.py. FLOPs are three times the forward pass's; what is computed again (--remat) counts for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks.measure import lengths
from benchmarks.measure.cases import Case, open_job, scored_batch
from benchmarks.measure.clock import beside_peak
from benchmarks.measure.options import Line, run
from benchmarks.measure.work import clocked, found, model_flops, silent
from jaxrl_llm.compiled import compile_training
from jaxrl_llm.huge_pages import in_huge_pages
from jaxrl_llm.loading import state_shardings
from jaxrl_llm.sharding import abstract_like
from jaxrl_llm.steps.step import ACTOR


def main(argv: Sequence[str] | None = None) -> None:
    run(__doc__, measure, argv)


def measure(case: Case, folder: Path) -> Line:
    """One case's line but for its options."""
    drawn = lengths.draw(case.lengths, case.prompts * case.n, case.response_length, case.seed)
    job = open_job(case, folder)
    program, batch = job.program, scored_batch(job, drawn)
    state = jax.jit(program.init, out_shardings=state_shardings(program))(job.params).actor
    given = (program.actor, abstract_like(state), abstract_like(batch), program.layout)
    keys = {"seed": job.config.seed, "consumer": ACTOR, "report": silent}
    training, compile_s = clocked(lambda: compile_training("update_actor", *given, **keys))
    steps = iter(range(case.repeats + 1))

    def update() -> None:
        nonlocal state
        step = np.int32(next(steps))
        for index in range(training.count):
            state, _ = training.update(state, batch, step, np.int32(index), None)
        jax.block_until_ready(state)

    training = training.fit(drawn)
    timed = beside_peak(update, case.repeats, case.dtype)
    assert int(state.updates) == training.count * (case.repeats + 1), "updates were skipped"
    flops = model_flops(case, job.costs, drawn)
    tokens = case.prompts * case.n * case.prompt_length + int(drawn.sum())
    return found(case, *timed, compile_s, training.update, tokens, 3 * flops)


if __name__ == "__main__":
    in_huge_pages()
    main()

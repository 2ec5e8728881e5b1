"""Measures sampling: the phase `gen` as the trainer compiles it, on the view that `update_weights` gives it.

    python -m benchmarks.rollout --json
    python -m benchmarks.rollout --prompts 16 32 --top-p 0.95 --layers scan unrolled
    python -m benchmarks.rollout --prompts 64 --response-length 256 --lengths lognormal:64

`tokens` are those sampled. Lengths are limits (`Prompts.max_new_tokens`), one a prompt; end tokens end nothing. A line
says beside seconds and tokens/s what compiling took, memory in MB (temporaries, arguments and results of the program;
`rss_mb` of the process so far), FLOPs at the least (benchmarks/measure/work.py), and what share that is of the peak of
a plain matrix product, measured in the same process.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks.measure import lengths
from benchmarks.measure.cases import Case, open_job, random_prompts
from benchmarks.measure.clock import repeated
from benchmarks.measure.options import Line, run, whole
from benchmarks.measure.work import clocked, found, model_flops, silent
from jaxrl_llm.compiled import Compiled, compile_sampler
from jaxrl_llm.steps.phases import train_sampling


def main(argv: Sequence[str] | None = None) -> None:
    run(__doc__, measure, argv, add_sampling)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling, as config.rollout has it")
    for name, default in (("temperature", 1.0), ("top-p", 1.0), ("min-p", 0.0)):
        group.add_argument(f"--{name}", type=float, nargs="+", default=[default], help=f"({default})")
    group.add_argument("--top-k", type=whole, nargs="+", default=[0], help="0: all (0)")


def measure(case: Case, folder: Path) -> Line:
    """One case's line but for its options."""
    sampling = {f"rollout__{name}": getattr(case, name) for name in ("temperature", "top_p", "min_p", "top_k")}
    job = open_job(case, folder, **sampling)
    limits = lengths.draw(case.lengths, case.prompts, case.response_length, case.seed)
    program, prompts = job.program, random_prompts(job, limits)
    view = Compiled("update_weights", program.update_weights, job.params, report=silent)(job.params)
    sampler, compile_s = clocked(
        lambda: compile_sampler(
            program, view, prompts, n=case.n, sampling=train_sampling(job.config), report=silent, name="gen"
        )
    )
    steps = iter(range(case.repeats + 1))

    def sample() -> None:
        batch = jax.block_until_ready(sampler(view, prompts, program.stops, np.int32(next(steps))))
        sampled.append(int(batch.response_length.sum()))

    sampled: list[int] = []
    seconds = repeated(sample, case.repeats)
    per_row = np.repeat(limits, case.n)
    assert set(sampled) == {int(per_row.sum())}, sampled
    return found(job, seconds, compile_s, sampler, sampled[0], model_flops(job, per_row))


if __name__ == "__main__":
    main()

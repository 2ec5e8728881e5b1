"""Measures sampling: the phase `gen` as the trainer compiles it, on the view that `update_weights` gives it.

    python -m benchmarks.rollout --json
    python -m benchmarks.rollout --prompts 16 32 --top-p 0.95 --layers scan unrolled
    python -m benchmarks.rollout --prompts 64 --response-length 256 --lengths lognormal:64

`tokens` are those sampled. Lengths are limits (`Prompts.max_new_tokens`), one a prompt, and end tokens end nothing;
--lengths geometric:MEAN, for random weights, lets every row end by itself, at one of many stop tokens. A line says
beside seconds and tokens/s what compiling took, memory in MB (temporaries, arguments and results of the program;
`rss_mb` of the process so far), FLOPs at the least (benchmarks/measure/work.py), and what share that is of the peak of
a plain matrix product, measured in the same process.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from benchmarks.measure import lengths
from benchmarks.measure.cases import Case, open_job, random_prompts
from benchmarks.measure.clock import beside_peak
from benchmarks.measure.options import Line, add_sampling, run, sampling_of
from benchmarks.measure.work import clocked, found, model_flops, silent
from jaxrl_llm.compiled import Compiled, compile_sampler
from jaxrl_llm.huge_pages import in_huge_pages
from jaxrl_llm.steps.phases import train_sampling
from jaxrl_llm.types import Batch


def main(argv: Sequence[str] | None = None) -> None:
    run(__doc__, measure, argv, add_sampling)


def measure(case: Case, folder: Path) -> Line:
    """One case's line but for its options."""
    limits = None
    if not lengths.stops(case.lengths):
        limits = lengths.draw(case.lengths, case.prompts, case.response_length, case.seed)
    job = open_job(case, folder, **sampling_of(case))
    program, prompts = job.program, random_prompts(job, limits)
    view = Compiled("update_weights", program.update_weights, job.params, report=silent)(job.params)
    sampler, compile_s = clocked(
        lambda: compile_sampler(
            program, view, prompts, n=case.n, sampling=train_sampling(job.config), report=silent, name="gen"
        )
    )
    steps = iter(range(case.repeats + 1))

    def sample() -> None:
        sampled.append(jax.block_until_ready(sampler(view, prompts, program.stops, np.int32(next(steps)))))

    sampled: list[Batch] = []
    timed = beside_peak(sample, case.repeats, case.dtype)
    drawn = [np.asarray(batch.response_length) for batch in sampled[1:]]
    assert limits is None or all((d == np.repeat(limits, case.n)).all() for d in drawn), "a response ended elsewhere"
    tokens = round(np.mean([d.sum() for d in drawn]))
    flops = statistics.fmean(model_flops(case, job.costs, d) for d in drawn)
    return found(case, *timed, compile_s, sampler, tokens, flops) | {"longest": int(np.max(drawn))}


if __name__ == "__main__":
    in_huge_pages()
    main()

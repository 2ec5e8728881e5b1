"""Measures whole steps: `fit`, as the trainer runs it, without evaluation, checkpoints or a folder to write to.

    python -m benchmarks.step --prompts 8 --n 8 --json
    python -m benchmarks.step --model models/smollm2-135m --prompts 8 --n 8 --prompt-length 40 --response-length 32 \
        --micro-batch 16 --temperature 1.0

GRPO with a reward that costs nothing, over prompts of digits. `seconds` are of the step; `iter_s` of generation and
update alone, with the sampler's view of the weights and the advantages, but without data and rewards; `phases` the
medians of the timers. End tokens end nothing, unless --lengths is geometric:MEAN, for random weights: then every row
ends by itself, at one of many stop tokens. `tokens` are those of prompts and responses, a prompt counted for each of
its responses; memory is that of the largest program. Other keys of a line: benchmarks/rollout.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.measure import lengths
from benchmarks.measure.cases import Case, config_of, costs_of
from benchmarks.measure.clock import matmul_peak
from benchmarks.measure.options import Line, add_sampling, run, sampling_of
from benchmarks.measure.work import clocked, found, model_flops
from jaxrl_llm import fit
from jaxrl_llm.compiled import programs_in_use
from jaxrl_llm.huge_pages import in_huge_pages
from jaxrl_llm.memory import size

TIMER = "timing_s/"
ITERATION = ("update_weights", "gen", "old_log_prob", "ref", "adv", "update_actor")


def main(argv: Sequence[str] | None = None) -> None:
    run(__doc__, measure, argv, add_sampling)


def measure(case: Case, folder: Path) -> Line:
    """One case's line but for its options."""
    if case.lengths != "full" and not lengths.stops(case.lengths):
        raise lengths.LengthError(f"{case.lengths}: a step samples up to its limit; expected full or geometric:MEAN")
    settings = {"reward__num_workers": 0, "trainer__steps": case.repeats + 1, "logging__progress": "none"}
    config = config_of(case, folder, **settings, **sampling_of(case))
    training, compile_s = clocked(lambda: fit(config))
    steps = []
    with training:
        for metrics, batch in training:
            if not batch.prompt_mask.all():
                raise lengths.LengthError(f"{folder}: its tokenizer makes fewer tokens of {case.prompt_length} digits")
            steps.append((metrics, np.asarray(batch.response_length)))
    del steps[0]  # in which everything is touched for the first time
    timers = {name.removeprefix(TIMER) for name in steps[0][0] if name.startswith(TIMER)}
    by_phase = {name: [metrics[TIMER + name] for metrics, _ in steps] for name in sorted(timers)}
    iterations = [sum(by_phase[name][i] for name in ITERATION if name in by_phase) for i in range(case.repeats)]
    tokens = round(np.mean([case.prompts * case.n * case.prompt_length + drawn.sum() for _, drawn in steps]))
    costs = costs_of(config, folder)
    flops = statistics.fmean(model_flops(case, costs, drawn) for _, drawn in steps)
    passes = 4 + sum(name in by_phase for name in ("old_log_prob", "ref"))
    peaks = [matmul_peak(case.dtype)] * case.repeats
    largest = max(programs_in_use(), key=size)
    return found(case, by_phase["step"], peaks, compile_s, largest, tokens, passes * flops) | {
        "iter_s": round(statistics.median(iterations), 5),
        "phases": {name: round(statistics.median(values), 5) for name, values in by_phase.items()},
    }


if __name__ == "__main__":
    in_huge_pages()
    main()

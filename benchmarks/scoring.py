"""Measures log-probs of given responses: the phase `ref` as the trainer compiles it, or the head alone.

    python -m benchmarks.scoring --json
    python -m benchmarks.scoring --preset smollm2-135m --prompts 64 8 --n 1 8 --prompt-length 40 --response-length 32
    python -m benchmarks.scoring --part head --preset smollm2-135m --prompts 8 --response-length 1024

`--part` forward: log-probs; entropy: entropies as well, which is the phase `old_log_prob`; head: log-probs of all
response tokens from hidden states, with the gradients in the hidden states and in the head. Lengths differ by row.
`tokens` are those of prompts and responses, a prompt counted for each of its responses (of the head: the responses').
Other keys of a line: benchmarks/rollout.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import lengths
from benchmarks.measure.cases import Case, open_job, random_batch, random_tokens
from benchmarks.measure.clock import beside_peak
from benchmarks.measure.options import Line, run
from benchmarks.measure.work import clocked, found, model_flops, silent
from jaxrl_llm.algorithms.log_probs import from_hidden
from jaxrl_llm.compiled import Compiled
from jaxrl_llm.costs import Mesh, head_flops
from jaxrl_llm.huge_pages import in_huge_pages
from jaxrl_llm.steps.packing import needed_width
from jaxrl_llm.types import Array, Params

# Each makes a config that has the phase.
PHASES: dict[str, tuple[str, dict[str, Any]]] = {
    "forward": ("ref", {"actor__use_kl_loss": True}),
    "entropy": ("old_log_prob", {"actor__epochs": 2}),
}


def main(argv: Sequence[str] | None = None) -> None:
    run(__doc__, measure, argv, add_part)


def add_part(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=(*PHASES, "head"), nargs="+", default=["forward"], help="(forward)")


def measure(case: Case, folder: Path) -> Line:
    """One case's line but for its options."""
    return _head(case, folder) if case.part == "head" else _phase(case, folder)


def _phase(case: Case, folder: Path) -> Line:
    name, settings = PHASES[case.part]
    drawn = lengths.draw(case.lengths, case.prompts * case.n, case.response_length, case.seed)
    job = open_job(case, folder, **settings)
    batch, score, rows = random_batch(job, drawn), getattr(job.program, name), job.program.layout.rows
    needed, packed = needed_width(drawn, job.program.group), job.program.packed.get(name, {})
    score = next((fn for slots, fn in packed.items() if needed <= slots), score)
    phase, compile_s = clocked(lambda: Compiled(name, score, job.params, batch, report=silent, out_shardings=rows))
    timed = beside_peak(lambda: jax.block_until_ready(phase(job.params, batch)), case.repeats, case.dtype)
    tokens = case.prompts * case.n * case.prompt_length + int(drawn.sum())
    return found(case, *timed, compile_s, phase, tokens, model_flops(case, job.costs, drawn))


def _head(case: Case, folder: Path) -> Line:
    job = open_job(case, folder)
    rows, width = case.prompts * case.n, case.response_length
    labels = random_tokens(job, rows, width)
    size = job.params["embed"].shape[1]
    hidden = jax.random.normal(jax.random.key(case.seed), (rows, width, size), case.dtype)
    head = {name: leaf for name, leaf in job.params.items() if name in ("embed", "lm_head")}

    def loss(head: Params, hidden: Array, labels: Array) -> Array:
        logits = job.program.actor_model.heads["logits"]
        chunk = max(1, case.logprob_chunk // rows)
        stats = from_hidden(lambda h: logits(head, h), hidden, labels, chunk=chunk, with_entropy=False)
        return jnp.mean(stats.log_probs)

    both, given = jax.value_and_grad(loss, (0, 1)), (head, hidden, labels)
    phase, compile_s = clocked(lambda: Compiled("head", both, *given, report=silent))
    timed = beside_peak(lambda: jax.block_until_ready(phase(*given)), case.repeats, case.dtype)
    flops = head_flops(job.costs, Mesh(), rows * width)
    return found(case, *timed, compile_s, phase, int(np.size(labels)), 3 * flops)


if __name__ == "__main__":
    in_huge_pages()
    main()

"""What a case came to: work in FLOPs, seconds, memory, and how far it is from what the machine can do."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.measure.cases import Case, Costs
from benchmarks.measure.clock import cores, rss_mb, timing
from jaxrl_llm.compile_log import Compilation
from jaxrl_llm.compiled import Compiled
from jaxrl_llm.costs import Mesh, forward_flops, head_flops

Line = dict[str, Any]


def model_flops(case: Case, costs: Costs, response_lengths: np.ndarray) -> float:
    """Matrix products of one forward pass over the responses [B], at the least: each prompt once for its responses, no
    padding, no pair of tokens of which one cannot see the other, and the head at response tokens alone. Sampling needs
    the same, an update three times as much."""
    width, groups = case.prompt_length, case.prompts
    own = response_lengths.astype(np.int64) - 1  # the last token is nobody's input
    tokens = groups * width + own.sum()
    pairs = groups * width * (width + 1) / 2 + (own * width + own * (own + 1) / 2).sum()
    mesh = Mesh()
    return forward_flops(costs, mesh, tokens, pairs) + head_flops(costs, mesh, int(response_lengths.sum()))


def silent(told: Compilation) -> None:
    """Where the trainer would be told what is being compiled."""


def clocked(make: Callable[[], Any]) -> tuple[Any, float]:
    """What `make` returns, and the seconds that it took."""
    start = time.perf_counter()
    made = make()
    return made, time.perf_counter() - start


def found(
    case: Case,
    seconds: Sequence[float],
    peaks: Sequence[float],
    compile_s: float,
    program: Compiled,
    tokens: int,
    flops: float,
) -> Line:
    """The line of a case: speed, memory, and how far it is from what the machine can do.

    Args:
      seconds: of each call.
      peaks: FLOP/s of a matrix product while it ran.
      program: that was timed.
      tokens: that a call works on.
      flops: of a call.
    """
    memory = program.executable.memory_analysis()
    line = timing(seconds, tokens) | {"compile_s": round(compile_s, 2)}
    if memory is not None:
        line |= {
            "temp_mb": round(memory.temp_size_in_bytes / 1e6, 1),
            "argument_mb": round(memory.argument_size_in_bytes / 1e6, 1),
            "output_mb": round((memory.output_size_in_bytes - memory.alias_size_in_bytes) / 1e6, 1),
        }
    speed, peak = flops / statistics.median(seconds), statistics.median(peaks)
    of_peak = statistics.median(flops / s / p for s, p in zip(seconds, peaks, strict=True))
    line |= {"rss_mb": rss_mb(), "gflop": round(flops / 1e9, 3), "gflop_per_s": round(speed / 1e9, 1)}
    line |= {"peak_gflop_per_s": round(peak / 1e9, 1), "of_peak": round(of_peak, 3)}
    return line | {"cores": cores(), "jax": jax.__version__, "python": sys.version.split()[0]}

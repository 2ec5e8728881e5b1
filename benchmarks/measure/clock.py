"""Seconds, memory, and what the machine can do. Needs jax only where it says so."""

from __future__ import annotations

import itertools
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

PEAK_SIZE, PEAK_REPEATS = 2048, 10


def repeated(fn: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls, after one that is not counted. `fn` returns when all is computed."""
    fn()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - start)
    return seconds


def matmul_peak(dtype: str = "float32") -> float:
    """FLOP/s of jax's product of two square matrices of 2048 rows, summed in at least float32, the best of ten."""
    import jax
    import jax.numpy as jnp

    a, b = (jax.random.normal(key, (PEAK_SIZE, PEAK_SIZE), dtype) for key in jax.random.split(jax.random.key(0)))
    product = jax.jit(partial(jnp.matmul, preferred_element_type=jnp.promote_types(dtype, jnp.float32)))
    return 2 * PEAK_SIZE**3 / min(repeated(lambda: product(a, b).block_until_ready(), PEAK_REPEATS))


def beside_peak(fn: Callable[[], Any], repeats: int, dtype: str) -> tuple[list[float], list[float]]:
    """`repeated`, and `matmul_peak` while each call was timed: the mean of before and after it, since the speed of a
    machine that is shared changes by half within a minute."""
    fn()
    seconds, peaks = [], [matmul_peak(dtype)]
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - start)
        peaks.append(matmul_peak(dtype))
    return seconds, [(before + after) / 2 for before, after in itertools.pairwise(peaks)]


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rss_mb() -> float:
    """The most memory that this process has had so far, in MB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)


def timing(seconds: Sequence[float], tokens: int) -> dict[str, Any]:
    """The keys of a case's line that every program has."""
    median = statistics.median(seconds)
    return {
        "seconds": round(median, 5),
        "all_seconds": [round(s, 5) for s in seconds],
        "tokens": tokens,
        "tokens_per_s": round(tokens / median, 1),
    }

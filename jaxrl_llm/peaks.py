"""How fast a device could be: by its maker's data sheet, or as fast as it multiplies matrices here."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxrl_llm.chips import chip_of
from jaxrl_llm.run_files import replace_file

FILE = "peaks.json"  # beside the compiled programs
SECONDS = 0.15  # after which no larger product is tried
SIZES = (256, 512, 1024, 2048, 4096)


def peak_flops(setting: float, dtype: str) -> float | None:
    """FLOP/s that one device could do at most.

    Args:
      setting: of `trainer.device_tflops`: TFLOP/s; -1: the data sheet's (dense, bfloat16), or where the device is not
        known to chips.py, a CPU above all, what a product of matrices of `dtype` is measured to reach; 0: not asked.
      dtype: of the computation.

    Returns:
      None where it is not asked for.
    """
    if setting >= 0:
        return 1e12 * setting or None
    if chip := chip_of(jax.devices()[0].device_kind):
        return 1e12 * chip.tflops
    return _remembered(dtype)


@functools.cache
def _remembered(dtype: str) -> float:
    """What was measured on such a device before, if the compilation cache has a folder; else it is measured now."""
    folder, key, known = jax.config.values["jax_compilation_cache_dir"], f"{_device()} {dtype} wide", {}
    path = Path(folder) / FILE if folder and jax.config.values["jax_enable_compilation_cache"] else None
    if path:
        with contextlib.suppress(OSError, ValueError, TypeError):
            known = {name: float(figure) for name, figure in dict(json.loads(path.read_text())).items()}
    if key in known:
        return known[key]
    found = measured_flops(dtype)
    if path and path.parent.is_dir():
        with contextlib.suppress(OSError):
            replace_file(path, json.dumps({**known, key: found}) + "\n")
    return found


def measured_flops(dtype: str, seconds: float = SECONDS) -> float:
    """FLOP/s of one device in the fastest of a few products of square matrices of growing size, summed and returned in
    at least float32 as models/products.py has them. Devices that share the cores of a CPU share what these can do."""
    wide = jnp.promote_types(dtype, jnp.float32)
    multiply, best, start = jax.jit(partial(jnp.matmul, preferred_element_type=wide)), 0.0, time.perf_counter()
    for size in SIZES:
        x = jnp.ones((size, size), dtype)
        jax.block_until_ready(multiply(x, x))  # compiles
        for _ in range(3):
            began = time.perf_counter()
            jax.block_until_ready(multiply(x, x))
            best = max(best, 2 * size**3 / (time.perf_counter() - began))
        if time.perf_counter() - start > seconds:
            break
    shared = jax.local_device_count() if jax.default_backend() == "cpu" else 1
    return best / shared


def _device() -> str:
    """What the measured figure belongs to."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{device.platform} {device.device_kind} jax {jax.__version__}"
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()):
            name = found[1]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores, {jax.local_device_count()} devices, jax {jax.__version__}"

import os
from importlib.metadata import version

# Most of the tests' time goes into compiling tiny programs. Programs are traced, cut and optimized as ever; only their
# translation into machine code is the one that takes least time (a tenth, with both flags). With
# XLA_FLAGS=--xla_backend_optimization_level=3 it is the one of every day.
QUICK = ["--xla_backend_optimization_level=0"]
if version("jax") < "0.11":  # later ones do not know the flag, and end at one that they do not know
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *QUICK])

import jax  # noqa: E402 (reads the flags when it starts)
from hypothesis import settings  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# The same examples every time: a check that fails, fails for everybody. No deadline: the first example compiles.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

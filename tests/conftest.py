import os

# Most of the tests' time goes into compiling tiny programs. Programs are traced, cut and optimized as ever; only their
# translation into machine code is the one that takes least time. With XLA_FLAGS=--xla_backend_optimization_level=3 it
# is the one of every day.
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()

import jax  # noqa: E402 (reads the flags when it starts)
from hypothesis import settings  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# The same examples every time: a check that fails, fails for everybody. No deadline: the first example compiles.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

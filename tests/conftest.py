import os

from tests import quick

# Most of the tests' time goes into compiling. XLA_FLAGS=--xla_backend_optimization_level=3 compiles as on other days.
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *quick.FLAGS])

import jax
from hypothesis import settings

jax.config.update("jax_numpy_rank_promotion", "raise")
# The same examples every time: a check that fails, fails for everybody. No deadline: the first example compiles.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

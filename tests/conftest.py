import jax
from hypothesis import settings

jax.config.update("jax_numpy_rank_promotion", "raise")
# The same examples every time: a check that fails, fails for everybody. No deadline: the first example compiles.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

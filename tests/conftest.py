import os

import pytest

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--by_hand", action="store_true", help="run the tests that take minutes as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--by_hand"):
        left_out = [item for item in items if item.get_closest_marker("by_hand")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)

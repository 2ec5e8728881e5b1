import os
import signal
from collections.abc import Iterator
from typing import Any

from tests import quick

# Most of the tests' time goes into compiling. XLA_FLAGS=--xla_backend_optimization_level=3 compiles as on other days.
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *quick.FLAGS])

# Nobody's own cache of compiled programs is read or written; tests have theirs (tiny_folder.compile_once).
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

# The small commands that tests start need not begin twice.
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")

import jax
import pytest
from hypothesis import settings

jax.config.update("jax_numpy_rank_promotion", "raise")
# A shell has what it starts in the background ignore SIGINT; tests interrupt themselves and what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples every time: a check that fails, fails for everybody. No deadline: the first example compiles.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


@pytest.fixture(scope="module")
def compile_once() -> Iterator[None]:
    """For modules that run the tiny folder's recipes: a program is compiled once in a session."""
    from tests import tiny_folder

    with tiny_folder.compile_once():
        yield


@pytest.fixture
def grpo() -> Any:
    from tests import tiny_runs

    return tiny_runs.grpo()


@pytest.fixture
def ppo() -> Any:
    from tests import tiny_runs

    return tiny_runs.ppo()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests that take a minute or more as well")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--long"):
        os.environ["JAXRL_LLM_LONG_TESTS"] = "1"  # for the processes that tests start


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes a minute or more: --long"))

"""Compiled programs that are kept: read back bit for bit, bounded, and never in the way of a run."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from jaxrl_llm import compilation_cache, train
from jaxrl_llm.compilation_cache import NEVER, default_folder, open_cache, prune
from jaxrl_llm.compile_log import Compilation
from jaxrl_llm.compiled import Compiled
from jaxrl_llm.metrics import CLOCKS
from jaxrl_llm.trainer import fit
from tests import tiny_folder
from tests.faulty import digest

NAMES = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    """Jax as a command finds it, and as it was when the test is over."""
    before, show = {name: jax.config.values[name] for name in NAMES}, warnings.showwarning
    jax.config.update("jax_enable_compilation_cache", True)
    jax_cache.reset_cache()
    yield
    warnings.showwarning = show
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


@pytest.fixture
def told() -> list[str]:
    return []


def compiled(x: jax.Array) -> tuple[jax.Array, Compilation]:
    """A program of its own every time, for the memory; the same one for the disk."""
    found: list[Compilation] = []
    return Compiled("tripled", lambda x: 3 * x, x, report=found.append)(x), found[-1]


def test_the_folder_is_where_the_platform_keeps_such_things(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "jaxrl_llm" / "programs"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the convention says to ignore
    assert default_folder() == Path.home() / ".cache" / "jaxrl_llm" / "programs"
    monkeypatch.setattr("sys.platform", "darwin")
    assert default_folder() == Path.home() / "Library" / "Caches" / "jaxrl_llm" / "programs"


def test_what_jax_was_told_is_left_alone(tmp_path: Path, told: list[str]) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
    assert open_cache("auto", told.append) == tmp_path / "own"
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 7.0
    assert open_cache("", told.append) is None and not jax.config.values["jax_enable_compilation_cache"]
    assert open_cache(str(tmp_path / "mine"), told.append) is None  # since somebody turned it off
    assert not told and not (tmp_path / "mine").exists()


def test_a_program_is_read_back(tmp_path: Path, told: list[str]) -> None:
    assert open_cache(str(tmp_path / "programs"), told.append) == tmp_path / "programs"
    first, cold = compiled(jnp.arange(5.0))
    again, warm = compiled(jnp.arange(5.0))
    assert not cold.cached and warm.cached and (first == again).all()
    assert (tmp_path / "programs").stat().st_mode & 0o077 == 0  # it holds code
    assert not told


def test_half_an_entry_is_told_once_and_written_anew(tmp_path: Path, told: list[str]) -> None:
    open_cache(str(tmp_path), told.append)
    expected, _ = compiled(jnp.arange(5.0))
    for path in tmp_path.glob("*-cache"):
        path.write_bytes(path.read_bytes()[:40])
    found, broken = compiled(jnp.arange(5.0))
    assert not broken.cached and (found == expected).all()
    assert len(told) == 1 and "reading" in told[0] and "trainer.compilation_cache" in told[0]
    compiled(jnp.arange(5.0))  # writes what is no longer there
    assert compiled(jnp.arange(5.0))[1].cached and len(told) == 1


def test_a_write_that_fails_is_the_last_one(tmp_path: Path, told: list[str]) -> None:
    open_cache(str(tmp_path / "programs"), told.append)
    compiled(jnp.arange(2.0))  # which opens jax's cache
    shutil.rmtree(tmp_path / "programs")
    for size in (3.0, 4.0, 5.0):
        assert (compiled(jnp.arange(size))[0] == 3 * jnp.arange(size)).all()
    assert len(told) == 1 and "writing" in told[0]


def test_where_nothing_can_be_written_a_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert open_cache(str(tmp_path / "file" / "programs"), told.append) is None
    assert len(told) == 1 and str(tmp_path / "file") in told[0]
    # A full disk: what is there is still read.
    full = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(compilation_cache.shutil, "disk_usage", lambda path: full)
    assert open_cache(str(tmp_path / "full"), told.append) == tmp_path / "full"
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == NEVER
    compiled(jnp.arange(5.0))
    assert not list((tmp_path / "full").iterdir()) and len(told) == 2 and "1 MiB left" in told[1]


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    for age, name in enumerate(("newest", "middle", "oldest")):
        path = tmp_path / f"{name}-cache"
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "peaks.json").write_bytes(bytes(1000))  # not a program
    os.utime(tmp_path / "oldest-cache", (2e9, 0))  # but it was read just now
    prune(tmp_path, 250)
    assert {path.name for path in tmp_path.iterdir()} == {"newest-cache", "oldest-cache", "peaks.json"}
    prune(tmp_path, 200)
    assert len(list(tmp_path.glob("*-cache"))) == 2


@pytest.mark.long
def test_a_run_from_the_cache_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    open_cache(str(tmp_path / "programs"), print)
    config = tiny_folder.config(trainer__steps=2, data__eval=(), eval__interval=0, trainer__save_interval=0)
    found: list[Any] = []
    for name in ("cold", "warm"):
        with fit(config, tmp_path / name) as run:
            lines = [{k: v for k, v in metrics.items() if not k.startswith(CLOCKS)} for metrics, _ in run]
            found.append((lines, digest(run.state())))
        events = (tmp_path / name / "events.jsonl").read_text()
        assert ("from the cache" in events) == (name == "warm")
    assert found[0] == found[1]


def test_a_command_in_the_tests_touches_nobody_s_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As tests/conftest.py has set jax up."""
    jax.config.update("jax_enable_compilation_cache", os.environ["JAX_ENABLE_COMPILATION_CACHE"] != "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert train.main(["--config=configs/quickstart.py", "--config.model.path=nowhere"]) == 2
    assert not list(tmp_path.iterdir()) and "nowhere" in capsys.readouterr().err

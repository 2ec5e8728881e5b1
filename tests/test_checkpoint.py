"""Checkpoints: bit for bit or not at all."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import checkpoint
from jaxrl_llm.checkpoint import CHECKSUMS, Checkpoints
from jaxrl_llm.errors import StorageError
from jaxrl_llm.sharding import abstract_like
from jaxrl_llm.types import RunState, TrainState


def make_trained(seed: int, width: int = 3, dtype: Any = jnp.float32) -> TrainState:
    keys = jax.random.split(jax.random.key(seed), 2)
    params = {
        "embed": jax.random.normal(keys[0], (4, width), dtype),
        "layers": {"w": jax.random.normal(keys[1], (2, width), jnp.float32).at[0, 0].set(jnp.nan).at[1, 0].set(-0.0)},
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1.0, 0.0, 10)))
    opt_state = tx.init(params)
    _, opt_state = tx.update(jax.tree.map(jnp.ones_like, params), opt_state, params)
    return TrainState(params=params, opt_state=opt_state, updates=jnp.int32(3), skipped=jnp.int32(0))


def make_state(seed: int = 0, *, critic: bool = True, **kwargs: Any) -> RunState:
    return RunState(
        actor=make_trained(seed, **kwargs),
        critic=make_trained(seed + 1) if critic else None,
        reference=make_trained(seed + 2, dtype=jnp.bfloat16).params,
        kl_coef=jnp.float32(0.1),
        step=jnp.int32(7),
    )


def bits(tree: Any) -> list[tuple[str, bytes]]:
    return [(str(x.dtype), np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


@pytest.fixture
def store(tmp_path: Path):
    store = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield store
    store.close()


def saved(folder: Path, *steps: int, **kwargs: Any) -> Checkpoints:
    """Checkpoints of these steps, complete."""
    store = Checkpoints(folder, keep=len(steps))
    for step in steps:
        store.save(step, make_state(step), {}, **kwargs)
    store.close()
    return Checkpoints(folder, keep=len(steps))


@pytest.mark.parametrize("critic", [True, False])
def test_round_trip_is_bit_for_bit(store: Checkpoints, critic: bool):
    state = make_state(critic=critic)
    store.save(7, state, {"cursor": 56, "names": ["a", "é"], "best": None})
    store.wait()
    again = Checkpoints(store.folder)
    restored, meta = again.restore(abstract_like(state))
    assert meta == {"cursor": 56, "names": ["a", "é"], "best": None} == again.read_meta(7)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    assert all(a.sharding == b.sharding for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True))


def test_only_the_newest_stay(store: Checkpoints):
    assert store.latest_step() is None
    with pytest.raises(StorageError, match="no complete checkpoint"):
        store.restore(abstract_like(make_state()))
    for step in (2, 10, 9, 11):
        store.save(step, make_state(step), {})
    store.wait()
    assert store.steps() == [10, 11]
    assert store.latest_step() == 11
    assert bits(store.restore(abstract_like(make_state()), 10)[0]) == bits(make_state(10))
    assert sorted(path.name for path in store.folder.iterdir()) == ["10", "11", "newest"]


def test_part_of_a_state(store: Checkpoints):
    state = make_state()
    store.save(1, state, {})
    store.wait()
    nothing = TrainState(params=None, opt_state=None, updates=None, skipped=None)  # pyright: ignore[reportArgumentType]
    actor = dataclasses.replace(nothing, params=abstract_like(state.actor.params))
    wanted = RunState(actor=actor, critic=None, reference=None, kl_coef=None, step=None)  # pyright: ignore[reportArgumentType]
    assert bits(store.restore(wanted, 1, partial=True)[0]) == bits(state.actor.params)
    with pytest.raises(StorageError, match="found float32"):
        store.restore(wanted, 1)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (make_state(width=5), r"actor\.params\.embed: expected float32\[4, 5\], found float32\[4, 3\]"),
        (make_state(dtype=jnp.bfloat16), r"actor\.params\.embed: expected bfloat16\[4, 3\], found float32\[4, 3\]"),
        (make_state(critic=False), r"critic\.params\.embed: expected nothing, found float32\[4, 3\]"),
        (
            dataclasses.replace(make_state(), kl_coef={"a": jnp.float32(0)}),
            r"kl_coef\.a: expected float32\[\], found nothing",
        ),
    ],
)
def test_another_model_is_refused(store: Checkpoints, target: RunState, expected: str):
    store.save(1, make_state(), {})
    store.wait()
    with pytest.raises(StorageError, match=expected):
        store.restore(abstract_like(target), 1)


def test_every_flipped_byte_is_found(store: Checkpoints):
    state = make_state()
    store.save(1, state, {})
    store.wait()
    files = sorted(path for path in (store.folder / "1").rglob("*") if path.is_file() and path.stat().st_size)
    assert len(files) > 5
    for path in files:
        whole = path.read_bytes()
        for position in {0, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
            with pytest.raises(StorageError, match="checkpoints"):
                store.restore(abstract_like(state), 1)
        path.write_bytes(whole[:-1])
        with pytest.raises(StorageError):
            store.verify(1)
        path.unlink()
        with pytest.raises(StorageError):
            store.verify(1)
        path.write_bytes(whole)
    assert bits(store.restore(abstract_like(state), 1)[0]) == bits(state)


def test_an_interrupted_save_does_not_count(store: Checkpoints):
    store.save(1, make_state(1), {})
    store.save(2, make_state(2), {})
    store.close()
    (store.folder / "2" / CHECKSUMS).unlink()
    shutil.rmtree(store.folder / "2" / "state" / "d")
    again = Checkpoints(store.folder)
    assert again.latest_step() == 1
    again.restore(abstract_like(make_state()), 1)
    assert (store.folder / "2").exists()  # a reader must not take away what a running job is writing
    with pytest.raises(StorageError, match=r"no complete checkpoint; there are \[1\]"):
        again.restore(abstract_like(make_state()), 2)
    again.save(2, make_state(20), {})
    again.wait()
    assert bits(again.restore(abstract_like(make_state()), 2)[0]) == bits(make_state(20))


# Written while the run goes on


def test_what_was_saved_may_be_donated_at_once(store: Checkpoints):
    """Each save's arrays are taken over by the next step before they can have been written."""
    step = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + 1, x), donate_argnums=0)
    state = {f"{i}": jnp.full((1 << 20,), float(i)) for i in range(4)}
    for number in (1, 2):
        expected = [np.array(x) for x in jax.tree.leaves(state)]
        store.save(number, state, {})
        for _ in range(3):
            state = step(state)
        jax.block_until_ready(state)
        store.wait()
        found, _ = store.restore(abstract_like(state), number)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found), expected)


def test_a_save_is_completed_without_being_asked(store: Checkpoints, monkeypatch: pytest.MonkeyPatch):
    """Not only by the next save: a run that is killed long after has it. Until then it does not count."""
    write, go_on = checkpoint._write_checksums, threading.Event()
    monkeypatch.setattr("jaxrl_llm.checkpoint._write_checksums", lambda folder: go_on.wait(60) and write(folder))
    store.save(1, make_state(), {})
    store.poll()
    assert store.steps() == [] and Checkpoints(store.folder).newest_good() == (None, [])
    go_on.set()
    deadline = time.monotonic() + 60
    while store.steps() != [1] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Checkpoints(store.folder).newest_good() == (1, [])


def test_what_is_held_does_not_count(store: Checkpoints):
    """Until it is released, and never where it is not."""
    store.save(1, make_state(1), {}, hold=True)
    time.sleep(0.3)
    assert store.steps() == []
    store.release()
    store.wait()
    assert store.steps() == [1]
    store.save(2, make_state(2), {}, hold=True)
    store.close()
    assert store.steps() == [1]
    store.save(2, make_state(2), {})
    store.wait()
    assert store.steps() == [1, 2]


def test_what_is_spared_stays(store: Checkpoints):
    for step in (1, 2, 3, 4):
        store.save(step, make_state(step), {}, spare=(1,))
    store.wait()
    assert store.steps() == [1, 3, 4]
    store.save(5, make_state(5), {}, spare=(4,))
    store.wait()
    assert store.steps() == [4, 5]


# Damage


def test_a_resume_falls_back_to_the_newest_that_is_whole(tmp_path: Path):
    """A byte that is not as it was, in twenty places."""
    store = saved(tmp_path / "checkpoints", 1, 2, 3)
    files = sorted(path for path in (store.folder / "3").rglob("*") if path.is_file() and path.stat().st_size)
    places = np.random.default_rng(0)
    for number in range(20):
        path = files[number % len(files)]
        whole = bytearray(path.read_bytes())
        at = places.integers(len(whole))
        whole[at] ^= 1 << places.integers(8)
        before = path.read_bytes()
        path.write_bytes(whole)
        again = Checkpoints(store.folder)
        step, problems = again.newest_good()
        assert step == 2 and len(problems) == 1 and "checkpoints/3" in problems[0]
        if path.name != CHECKSUMS:  # which may then name another file, or another sum of a file
            assert f"{path}: is not as it was written" in problems[0]
        assert bits(again.restore(abstract_like(make_state()), step)[0]) == bits(make_state(2))
        with pytest.raises(StorageError, match="step 2 is whole; without --strict_resume"):
            Checkpoints(store.folder).newest_good(strict=True)
        path.write_bytes(before)
    assert Checkpoints(store.folder).newest_good(strict=True) == (3, [])


def truncate(folder: Path) -> None:
    largest = max(folder.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[:-1])


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def without_checksums(folder: Path) -> None:
    (folder / CHECKSUMS).unlink()


@pytest.mark.parametrize("damage", [truncate, empty, without_checksums, shutil.rmtree])
def test_a_newest_step_that_is_lost_is_missed(tmp_path: Path, damage: Callable[[Path], None]):
    store = saved(tmp_path / "checkpoints", 1, 2)
    damage(store.folder / "2")
    again = Checkpoints(store.folder)
    step, problems = again.newest_good()
    assert step == 1 and "checkpoints/2" in problems[0]
    with pytest.raises(StorageError, match="checkpoints/2"):
        Checkpoints(store.folder).newest_good(strict=True)
    again.save(2, make_state(2), {})  # the run comes by it again
    again.wait()
    assert Checkpoints(store.folder).newest_good(strict=True) == (2, [])
    aside = [path.name for path in store.folder.iterdir() if path.name.startswith("damaged")]
    assert aside == (["damaged-2"] if damage is truncate else [])  # what can still be looked at is not thrown away


@pytest.mark.parametrize("damage", [truncate, empty, without_checksums, shutil.rmtree])
def test_where_all_are_bad_nothing_starts_anew(tmp_path: Path, damage: Callable[[Path], None]):
    store = saved(tmp_path / "checkpoints", 1, 2)
    for step in (1, 2):
        damage(store.folder / str(step))
    with pytest.raises(StorageError, match="nothing is left to go on from; to start anew, take away") as caught:
        Checkpoints(store.folder).newest_good()
    assert caught.value.exit_code == 4 and "checkpoints/2" in str(caught.value)


def test_a_first_save_that_was_interrupted_is_no_damage(tmp_path: Path):
    store = saved(tmp_path / "checkpoints", 1)
    without_checksums(store.folder / "1")
    (store.folder / "newest").unlink()
    assert Checkpoints(store.folder).newest_good(strict=True) == (None, [])


# A disk that is full


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["_write_checksums", "_write_whole"])
def test_a_failed_save_leaves_the_others(store: Checkpoints, monkeypatch: pytest.MonkeyPatch, where: str):
    """Told by the next save at the latest, whatever it was that failed."""
    store.save(1, make_state(1), {})
    store.wait()
    with monkeypatch.context() as patch:
        patch.setattr(f"jaxrl_llm.checkpoint.{where}", full)
        store.save(2, make_state(2), {})
        with pytest.raises(StorageError, match="checkpoints/2: cannot be saved: .*No space left"):
            store.save(3, make_state(3), {})
    assert store.steps() == [1]
    assert bits(Checkpoints(store.folder).restore(abstract_like(make_state()))[0]) == bits(make_state(1))
    store.save(2, make_state(2), {})
    store.wait()
    assert store.steps() == [1, 2]


def test_the_same_step_twice_is_refused(store: Checkpoints):
    store.save(1, make_state(), {})
    with pytest.raises(StorageError, match="is already there"):
        store.save(1, make_state(), {})

"""Checkpoints: bit for bit or not at all."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

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


@pytest.mark.parametrize("critic", [True, False])
def test_round_trip_is_bit_for_bit(store: Checkpoints, critic: bool):
    state = make_state(critic=critic)
    store.save(7, state, {"cursor": 56, "names": ["a", "é"], "best": None})
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
    assert store.steps() == [10, 11]
    assert store.latest_step() == 11
    assert bits(store.restore(abstract_like(make_state()), 10)[0]) == bits(make_state(10))
    assert sorted(path.name for path in store.folder.iterdir()) == ["10", "11"]


def test_part_of_a_state(store: Checkpoints):
    state = make_state()
    store.save(1, state, {})
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
    with pytest.raises(StorageError, match=expected):
        store.restore(abstract_like(target), 1)


def test_every_flipped_byte_is_found(store: Checkpoints):
    state = make_state()
    store.save(1, state, {})
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
    assert bits(again.restore(abstract_like(make_state()), 2)[0]) == bits(make_state(20))


def test_a_failed_save_leaves_the_others(store: Checkpoints, monkeypatch: pytest.MonkeyPatch):
    store.save(1, make_state(1), {})

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="cannot be saved: .*No space left"):
        patch.setattr("jaxrl_llm.checkpoint._write_checksums", full)
        store.save(2, make_state(2), {})
    assert store.steps() == [1]
    store.save(2, make_state(2), {})
    assert store.steps() == [1, 2]


def test_the_same_step_twice_is_refused(store: Checkpoints):
    store.save(1, make_state(), {})
    with pytest.raises(StorageError, match="is already there"):
        store.save(1, make_state(), {})

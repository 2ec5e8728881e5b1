"""Batches in parts: split, joined, regrouped and selected, rows keep their prompts and their devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.types import Batch


def labelled(groups: int, n: int, width: int = 3) -> Batch:
    """A batch of which every number tells where it stood."""
    prompt, row = np.arange(groups, dtype=np.int32), np.arange(groups * n, dtype=np.int32)
    tokens = row[:, None] * width + np.arange(width, dtype=np.int32)
    fields: dict[str, Any] = {
        "prompts": prompt[:, None] + np.zeros((1, 2), np.int32),
        "prompt_mask": np.ones((groups, 2), bool),
        "prompt_valid": prompt % 3 > 0,
        "record_arrays": {"answer": 10 * prompt, "table": prompt[:, None, None] + np.zeros((1, 2, 2), np.int32)},
        "uid": 100 + np.repeat(prompt, n),
        "responses": tokens,
        "response_mask": tokens % 2 == 0,
        "response_length": row,
        "rollout_log_probs": -tokens.astype(np.float32),
        "finish_reason": row % 2 + 1,
        "scores": np.stack([row, -row], 1).astype(np.float32),
    }
    return Batch(**fields)


def row_fields(batch: Batch) -> dict[str, Any]:
    per_prompt = ("prompts", "prompt_mask", "prompt_valid", "record_arrays")
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name not in per_prompt}
    return {name: value for name, value in fields.items() if value is not None}


def assert_same(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def assert_rows_have_their_prompts(batch: Batch) -> None:
    np.testing.assert_array_equal(np.repeat(batch.prompts[:, 0], batch.n), batch.uid - 100)
    np.testing.assert_array_equal(10 * batch.prompts[:, 0], batch.record_arrays["answer"])
    np.testing.assert_array_equal(batch.prompts[:, 0] % 3 > 0, batch.prompt_valid)


SHAPES = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 4))


@given(SHAPES)
@settings(deadline=None, max_examples=25)
def test_parts_joined_are_the_whole(shape: tuple[int, int, int, int]) -> None:
    """And each part takes as many prompts from every shard of the batch as from any other."""
    share, shards, parts, n = shape
    batch = labelled(share * shards * parts, n)
    split = batch.split(parts)
    assert_same(batch.join_parts(row_fields(split)), row_fields(batch))
    shard_of_prompt = np.arange(batch.num_prompts) // (share * parts)
    for j in range(parts):
        part = jax.tree.map(lambda x, j=j: x[j], split)
        assert (part.num_prompts, part.n) == (share * shards, n)
        assert_rows_have_their_prompts(part)
        np.testing.assert_array_equal(part.prompts[:, 0], np.arange(j, batch.num_prompts, parts))
        # Contiguous parts of the part lie where those of the batch lie: no row moves between devices.
        np.testing.assert_array_equal(shard_of_prompt[part.prompts[:, 0]], np.repeat(np.arange(shards), share))


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
@settings(deadline=None, max_examples=15)
def test_regrouped_rows_keep_their_order_and_their_prompts(groups: int, n: int, times: int) -> None:
    batch = labelled(groups, n * times)
    regrouped = batch.regroup(n)
    assert (regrouped.num_prompts, regrouped.n) == (groups * times, n)
    assert_same(row_fields(regrouped), row_fields(batch))
    assert_rows_have_their_prompts(jax.tree.map(np.asarray, regrouped))


@given(st.integers(1, 5), st.integers(1, 3), st.data())
@settings(deadline=None, max_examples=25)
def test_selected_prompts_bring_all_their_rows(groups: int, n: int, data: st.DataObject) -> None:
    batch = labelled(groups, n)
    chosen = np.array(data.draw(st.lists(st.integers(0, groups - 1), min_size=1, max_size=5)))
    selected: Batch = batch.select(chosen)  # type: ignore[arg-type]
    assert (selected.num_prompts, selected.n) == (len(chosen), n)
    assert_rows_have_their_prompts(selected)
    rows = (chosen[:, None] * n + np.arange(n)).ravel()
    assert_same(row_fields(selected), jax.tree.map(lambda x: x[rows], row_fields(batch)))


def test_a_batch_does_not_split_or_regroup_unevenly() -> None:
    batch = labelled(4, 3)
    with pytest.raises(AssertionError):
        batch.split(3)
    with pytest.raises(AssertionError):
        batch.regroup(2)

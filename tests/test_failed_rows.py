"""A row whose reward failed may hold anything: a step's statistics, losses and updates are the same, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_llm.types import Batch
from tests import tiny_folder
from tests.test_collect import all_equal, run_of

OVERLONG = {"reward__overlong_buffer__enable": True, "reward__overlong_buffer__len": 4}
CORRECTION = {"is": "token", "is_batch_normalize": True, "rs": "seq_mean_k3", "rs_threshold": 5.0}
GRPO: dict[str, Any] = {
    **tiny_folder.KL_LOSS,
    **OVERLONG,
    **{f"algorithm__rollout_correction__rollout_{name}": value for name, value in CORRECTION.items()},
    "algorithm__mask_truncated": True,
    "actor__entropy_coeff": 0.01,
    "actor__mini_batch_size": 2,
    "actor__micro_batch_size": 2,
}
PPO: dict[str, Any] = {
    **OVERLONG,
    "algorithm__estimator": "gae",
    "algorithm__use_kl_in_reward": True,
    "algorithm__kl_ctrl__type": "adaptive",
    "algorithm__kl_ctrl__horizon": 100,
    "algorithm__whiten_rewards": True,
    "critic__mini_batch_size": 2,
}
GDPO = {
    "algorithm__estimator": "gdpo",
    "actor__loss_agg_mode": "seq-mean-token-mean",
    "reward__functions": ("tests.tiny_folder:picky", "tests.tiny_folder:brief"),
}


def with_garbage(batch: Batch, seed: int) -> Batch:
    """With other responses in the rows that have failed, their log-probs NaN or large."""
    rng, host = np.random.default_rng(seed), jax.device_get(batch)
    failed, (rows, width) = ~host.row_valid, host.responses.shape
    assert 0 < failed.sum() < rows
    length = rng.integers(0, width + 1, rows)
    anything = {
        "responses": rng.integers(0, len(tiny_folder.VOCABULARY), (rows, width)),
        "response_length": length,
        "response_mask": (np.arange(width) < length[:, None]) & (rng.random((rows, width)) < 0.8),
        "rollout_log_probs": np.where(rng.random((rows, width)) < 0.5, np.nan, rng.normal(0, 50, (rows, width))),
        "finish_reason": rng.integers(1, 3, rows),
    }
    changed = {}
    for name, new in anything.items():
        old = getattr(host, name)
        mixed = np.where(failed if old.ndim == 1 else failed[:, None], new, old).astype(old.dtype)
        changed[name] = jax.device_put(mixed, getattr(batch, name).sharding)
    return batch.replace(**changed)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(GRPO, id="grpo"),
        pytest.param(PPO, id="ppo", marks=pytest.mark.long),
        pytest.param(GDPO, id="gdpo", marks=pytest.mark.long),
    ],
)
def test_whatever_stands_in_a_failed_row(changes: dict[str, Any]) -> None:
    found = []
    for seed in (0, 1):
        settings = {"reward__functions": ("tests.tiny_folder:picky",), "reward__max_failed_ratio": 1.0}
        run = run_of(trainer__steps=1, **{**settings, **changes})
        collect = run._collect

        def collected(*given: Any, collect: Any = collect, seed: int = seed) -> Any:
            plain = collect(*given)
            return dataclasses.replace(plain, batch=with_garbage(plain.batch, seed))

        run._collect = collected  # type: ignore[assignment]
        metrics, batch = next(run)
        host = jax.device_get(batch)
        assert np.isfinite(host.advantages).all() and not host.loss_mask[~host.row_valid].any()
        evidence = ("advantages", "returns", "loss_mask", "token_level_rewards")
        # What the rows cost is theirs, whatever became of their reward.
        counted = {name: value for name, value in metrics.items() if not name.startswith(("perf/", "timing"))}
        assert all(map(np.isfinite, counted.values()))
        found.append((counted, run.state(), [getattr(host, name)[host.row_valid] for name in evidence]))
    all_equal(*found)

"""Replaced prompts, curricula and conversations where rewards fail, are not there, or are not what was expected."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.collect import Collector
from jaxrl_llm.errors import RunAborted, UserError
from jaxrl_llm.rewards import jax_reward
from tests import tiny_folder
from tests.test_collect import run_of

ONE: dict[str, Any] = {"trainer__steps": 1, "rollout__n": 2, "reward__functions": ("tests.tiny_folder:digits",)}
FILTER: dict[str, Any] = {"algorithm__filter_groups__enable": True}


@jax_reward()
def often_nan(responses: jax.Array, mask: jax.Array, record_arrays: Any) -> jax.Array:
    return jnp.where(responses[:, 0] % 3 == 0, jnp.nan, (responses[:, 0] % 2).astype(jnp.float32))


@pytest.mark.long
def test_rows_that_fail_on_the_devices_are_failures_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the ratio over all that was sampled, and not in the means of what stands beside other scores."""
    monkeypatch.setattr(tiny_folder, "constant", often_nan)
    functions = ("tests.tiny_folder:constant", "tests.tiny_folder:digits")
    both = {**ONE, "reward__functions": functions, "reward__max_failed_ratio": 1.0}
    metrics, batch = next(run_of(**both))
    valid = np.asarray(batch.row_valid)
    assert 0 < valid.sum() < 8 and metrics["reward/failed_ratio"] == 1 - valid.mean()
    said = [ids[own] for ids, own in zip(np.asarray(batch.responses), np.asarray(batch.response_mask), strict=True)]
    texts = tiny_folder.tokenizer().batch_decode(said, skip_special_tokens=True)
    letters = np.array([sum(c.isalpha() for c in text) for text in texts])
    assert metrics["reward_extra/digits/letters/mean"] == pytest.approx(letters[valid].mean())

    sampled, failed = 0, 0
    run = run_of(**both, **FILTER)
    assert isinstance(run._collect, Collector)
    write = run._collect._write

    def watch(*args: Any) -> Any:
        nonlocal sampled, failed
        batch, *others = write(*args)
        sampled, failed = sampled + batch.num_rows, failed + int((~np.asarray(batch.row_valid)).sum())
        return batch, *others

    monkeypatch.setattr(run._collect, "_write", watch)
    metrics, _ = next(run)
    assert sampled == 8 * metrics["train/num_gen_batches"] and failed
    assert metrics["reward/failed_ratio"] == pytest.approx(failed / sampled)
    with pytest.raises(RunAborted, match=r"row \d, reward 'digits'|row \d: a JAX reward's score is not finite"):
        next(run_of(**{**both, "reward__max_failed_ratio": 0.0}))


def test_why_a_greedy_baseline_failed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[str] = []

    def sampled_ones(prompt: str, response: str, record: Any) -> float:
        scored.append(response)
        if len(scored) > 1 and len(scored) <= 5:  # after the trial, which comes first; the greedy ones are the first
            raise RuntimeError("no greed")
        return float(len(response))

    monkeypatch.setattr(tiny_folder, "digits", sampled_ones)
    remax = {**ONE, "algorithm__estimator": "remax"}
    with pytest.raises(RunAborted, match="failed on every response(.|\n)*greedy response, row 0(.|\n)*no greed"):
        next(run_of(**remax))


def test_a_curriculum_is_told_of_where_prompts_are_replaced() -> None:
    digit = {"reward__functions": ("tests.tiny_folder:starts_with_a_digit",)}
    metrics, _ = next(run_of(**{**ONE, **digit}, **FILTER, data__curriculum__sampler="hard"))
    assert metrics["curriculum/drawn_ratio"] > 4 / 12 and metrics["train/num_gen_batches"] > 1


@pytest.mark.parametrize("weights", [(0.6, 0.4), (0.8, 0.2), (0.1, 0.9)])
def test_weights_that_sum_to_one_make_a_success(weights: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 .6 and .4 are more than 1 together."""
    monkeypatch.setattr(tiny_folder, "constant", lambda prompt, response, record: 1.0)
    both = {"reward__functions": ("tests.tiny_folder:constant",) * 2, "reward__weights": weights}
    metrics, _ = next(run_of(**{**ONE, **both}, data__curriculum__sampler="hard"))
    assert metrics["curriculum/success/mean"] == pytest.approx(1.0)


def test_a_metric_that_is_not_there_at_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function scores none of these prompts, or it was there before: no reason to end a run."""
    changes: dict[str, Any] = {**ONE, **FILTER, "algorithm__filter_groups__max_num_gen_batches": 2}
    named = {**changes, "algorithm__filter_groups__metric": "digits/letters", "trainer__steps": 2}
    elsewhere: dict[str, Any] = {
        "reward__functions": ("tests.tiny_folder:constant", "tests.tiny_folder:digits"),
        "reward__data_sources": ("words,signs", "another"),
    }
    metrics, _ = next(run_of(**{**named, **elsewhere}))
    assert metrics["filter_groups/unfilled"] == 4
    run = run_of(**named)
    assert next(run)[0]["filter_groups/unfilled"] == 0
    bare = lambda *args: tiny_folder.digits(*args)["score"]  # noqa: E731
    object.__setattr__(run._inputs.rewards.rewards[0], "function", bare)  # nothing beside the score from now on
    assert next(run)[0]["filter_groups/unfilled"] == 4
    with pytest.raises(UserError, match="no response has it; did you mean 'digits/letters'"):
        next(run_of(**{**named, "algorithm__filter_groups__metric": "digits/lettrs"}))

"""docs/algorithms.md names everything there is, its code runs, and what it says of all losses holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import ESTIMATORS, AdvantageInputs
from jaxrl_llm.algorithms.correction import IS_LEVELS, RS_KINDS
from jaxrl_llm.algorithms.log_probs import KL_KINDS
from jaxrl_llm.algorithms.losses import AGGREGATIONS, POLICY_LOSSES, Norm
from jaxrl_llm.algorithms.mismatch import off_policy_metrics
from jaxrl_llm.config import chosen_estimator, chosen_policy_loss
from tests import tiny

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("names", [ESTIMATORS, POLICY_LOSSES, AGGREGATIONS, KL_KINDS, IS_LEVELS, RS_KINDS])
def test_every_name_is_on_the_page(names: Any) -> None:
    assert [name for name in names if f"`{name}`" not in PAGE] == []


def test_every_metric_of_the_mismatch_is_on_the_page() -> None:
    zeros = jnp.zeros((1, 1))
    names = [name.removeprefix("rollout_corr/") for name in off_policy_metrics(zeros, zeros, jnp.ones((1, 1), bool))]
    assert [name for name in names if f"`{name}`" not in PAGE] == []


def test_pictures_and_files_that_the_page_links_exist() -> None:
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#]+)", prose) if "://" not in link]
    assert links and [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_the_example_runs() -> None:
    exec(compile(PYTHON[0], "docs/algorithms.md", "exec"), {})


def test_functions_of_ones_own_are_taken_by_a_config(tmp_path: Path) -> None:
    file = tmp_path / "my_algorithms.py"
    file.write_text(PYTHON[1])
    config = tiny.config(
        algorithm__estimator=f"{file}:sign_of_group",
        algorithm__estimator_kwargs={"scale_by": 0.5},
        actor__policy_loss=f"{file}:ppo_penalty",
        actor__loss_kwargs={"beta": 0.3},
    )
    rewards, mask = jnp.array([[3.0], [1.0], [1.5], [jnp.nan]]), jnp.array([[True], [True], [True], [False]])
    estimator, options = chosen_estimator(config)
    advantages, _ = estimator(AdvantageInputs(rewards, mask, uid=jnp.array([5, 5, 5, 5])), **options)
    assert advantages.tolist() == [[0.5], [-0.5], [-0.5], [0.0]]
    loss, options = chosen_policy_loss(config)
    old = jnp.array([[-1.0], [-1.0], [-1.0], [jnp.nan]])
    value, metrics = loss(old, old, advantages, mask, Norm.of(mask), **options)
    np.testing.assert_allclose(value, 0.5 / 3, rtol=1e-6)
    assert metrics["ppo_kl"] == 0


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "clip_cov"])
def test_with_one_update_a_batch_the_losses_have_one_gradient(name: str) -> None:
    rng = np.random.default_rng(0)
    log_probs = jnp.asarray(rng.normal(-2, 0.5, (3, 4)), jnp.float32)
    mask = jnp.asarray(np.arange(4)[None, :] < np.array([[4], [2], [3]]))
    advantages = jnp.where(mask, jnp.array([[1.0], [-0.5], [2.0]]), 0)

    def slope(name: str, **options: Any) -> Any:
        def loss(new: Any) -> Any:
            kwargs = {"aggregation": "seq-mean-token-mean", "key": jax.random.key(0)} | options
            return POLICY_LOSSES[name](new, log_probs, advantages, mask, Norm.of(mask), **kwargs)[0]

        return jax.grad(loss)(log_probs)

    expected = jnp.where(mask, -advantages / mask.sum(1, keepdims=True) / 3, 0)
    np.testing.assert_allclose(slope(name), expected, atol=1e-6)

# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Algorithm functions in isolation
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/jaxrl_llm/blob/main/notebooks/3_algorithm_functions.ipynb)
#
# `jaxrl_llm.algorithms` is arrays in, arrays out. Here: hand-made batches small enough to check in one's head, gradients,
# and property tests with chex and hypothesis.

# %%
# @title Install (does nothing where the package is there already)
REPOSITORY = "https://github.com/OWNER/jaxrl_llm"  # @param {type:"string"}
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("jaxrl_llm") is None:
    subprocess.run(["git", "clone", "--depth", "1", REPOSITORY, "jaxrl_llm"], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-e", "./jaxrl_llm[notebooks]"], check=True)
    sys.path.insert(0, os.path.abspath("jaxrl_llm"))
ROOT = os.path.dirname(os.path.dirname(importlib.util.find_spec("jaxrl_llm").origin))
SMALL = bool(os.environ.get("JAXRL_LLM_SMALL"))  # set where the notebooks are only tested

# %%
import chex
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms.advantages import ESTIMATORS, gae, grpo, rloo
from jaxrl_llm.algorithms.losses import POLICY_LOSSES, Norm, vanilla

# %% [markdown]
# ## Group advantages
# Two prompts (`uid` 1 and 2), three responses each. The second group's rewards are all equal: it teaches nothing, and
# its advantage is exactly 0.

# %%
scores = jnp.array([1.0, 0.0, 0.0, 0.5, 0.5, 0.5])
uid = jnp.array([1, 1, 1, 2, 2, 2])
mask = jnp.arange(4)[None, :] < jnp.array([2, 4, 3, 1, 2, 4])[:, None]
rewards = jnp.zeros((6, 4)).at[:, 0].set(scores)
for name, (advantages, _) in {
    "grpo": grpo(rewards, mask, uid),
    "grpo, scale none (Dr. GRPO)": grpo(rewards, mask, uid, scale="none"),
    "rloo": rloo(rewards, mask, uid),
}.items():
    print(f"{name:<28}", np.asarray(advantages[:, 0]).round(3))

# %% [markdown]
# ## GAE passes over what is not the model's
# The middle token is a tool's output: its mask is False, and value and advantage go through it.

# %%
one = jnp.array([[True, False, True]])
advantages, returns = gae(
    jnp.array([[0.0, 9.0, 1.0]]), one, jnp.array([[0.25, 9.0, 0.5]]), gamma=0.9, lam=0.8, whiten=False
)
print(advantages, returns)

# %% [markdown]
# ## The clipped loss and its gradient

# %%
ratios = jnp.linspace(0.01, 2.0, 400)[:, None]
old = jnp.log(jnp.full_like(ratios, 0.4))
new = old + jnp.log(ratios)
whole = jnp.ones_like(ratios, bool)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for advantage, color in ((1.0, "C0"), (-1.0, "C1")):

    def loss(new_log_probs, advantage=advantage):
        return vanilla(
            new_log_probs, old, jnp.full_like(ratios, advantage), whole, Norm.of(whole), aggregation="token-sum"
        )[0]

    per_token = jax.vmap(
        lambda n, o, a=advantage: vanilla(
            n[None], o[None], jnp.full((1, 1), a), jnp.ones((1, 1), bool), Norm.of(jnp.ones((1, 1)))
        )[0]
    )(new, old)
    axes[0].plot(ratios, per_token, color=color, label=f"advantage {advantage:+.0f}")
    axes[1].plot(ratios, jax.grad(loss)(new), color=color)
axes[0].set(title="Loss of a token", xlabel="ratio new / old")
axes[1].set(title="Its gradient in the new log-prob", xlabel="ratio new / old")
axes[0].legend()
plt.show()

# %% [markdown]
# ## Properties
# What must hold for any input is tested on any input. `chex.assert_*` works inside jitted functions, where it costs
# nothing once traced.

# %%
rows = st.lists(st.floats(-5, 5, width=32), min_size=6, max_size=6)
EXAMPLES = 10 if SMALL else 50


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(rows)
def group_advantages_sum_to_zero(scores):
    rewards = jnp.zeros((6, 4)).at[:, 0].set(jnp.array(scores))
    advantages, _ = rloo(rewards, mask, uid)
    sums = jnp.array([advantages[:3, 0].sum(), advantages[3:, 0].sum()])
    chex.assert_trees_all_close(sums, jnp.zeros(2), atol=1e-4)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(rows, st.sampled_from([float("nan"), float("inf"), -1e30]))
def padding_reaches_neither_value_nor_gradient(scores, hostile):
    rewards = jnp.zeros((6, 4)).at[:, 0].set(jnp.array(scores))
    log_probs = jnp.where(mask, -1.0, hostile)

    def loss(log_probs):
        advantages, _ = grpo(rewards, mask, uid)
        return vanilla(log_probs, jnp.full((6, 4), -1.1), advantages, mask, Norm.of(mask))[0]

    value, gradient = jax.value_and_grad(loss)(log_probs)
    clean, clean_gradient = jax.value_and_grad(loss)(jnp.where(mask, -1.0, -3.0))
    chex.assert_trees_all_equal((value, gradient), (clean, clean_gradient))


group_advantages_sum_to_zero()
padding_reaches_neither_value_nor_gradient()
print("both hold")

# %% [markdown]
# A micro-batch never changes the gradient: denominators (`Norm`) are those of the whole mini-batch, fixed before it is
# split.

# %%
advantages, _ = grpo(rewards, mask, uid)
norm = Norm.of(mask)
log_probs, old_log_probs = jnp.full((6, 4), -1.0), jnp.full((6, 4), -1.1)
whole_loss, _ = vanilla(log_probs, old_log_probs, advantages, mask, norm)
parts = [
    vanilla(log_probs[i : i + 2], old_log_probs[i : i + 2], advantages[i : i + 2], mask[i : i + 2], norm)[0]
    for i in (0, 2, 4)
]
print(float(whole_loss), float(sum(parts)))
print("estimators:", ", ".join(ESTIMATORS))
print("losses:", ", ".join(POLICY_LOSSES))

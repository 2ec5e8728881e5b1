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
# # Your own reward and your own advantage estimator
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/jaxrl_llm/blob/main/notebooks/5_your_own_reward_and_estimator.ipynb)
#
# Both are functions in a file of yours, named in the config by `file.py:function`. Their signatures are all there is to
# declare.

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
import tempfile
from pathlib import Path

import jaxrl_llm

folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A reward
# `f(prompt, response, record) -> number`, or a dict with `score` and whatever else should reach the metrics, samples and
# evaluation. `None` means that the response could not be scored: the row is left out of every statistic. Here: near
# misses get something.

# %%
_ = (folder / "my_rewards.py").write_text(
    '''
def close(prompt: str, response: str, record: dict) -> dict:
    """1 for the right sum, half of that for one that is off by ten: the forgotten carry."""
    if not response.isdigit():
        return {"score": 0.0, "distance": 100, "number": False}
    distance = abs(int(response) - int(record["answer"]))
    return {"score": 1.0 if distance == 0 else 0.5 if distance == 10 else 0.0, "distance": distance, "number": True}
'''
)

# %% [markdown]
# ## An estimator
# A parameter without a default is evidence that it needs (`rewards`, `mask`, `uid`, `values`, …); keyword-only ones are
# options. It returns advantages and returns, both `[B, R]`.

# %%
_ = (folder / "my_estimator.py").write_text(
    '''
import jax.numpy as jnp

from jaxrl_llm.algorithms.masked import group_stats, row_sums, spread


def sign_of_group(rewards, mask, uid, *, scale_by=1.0):
    """Better or worse than the group's mean, whatever the distance."""
    scores, valid = row_sums(rewards, mask)
    stats = group_stats(scores, uid, valid)
    advantages = spread(jnp.where(stats.flat, 0, scale_by * jnp.sign(scores - stats.mean)), mask)
    return advantages, advantages
'''
)

# %%
# @title Knobs
steps = 100  # @param {type:"slider", min:5, max:200, step:5}
if SMALL:
    steps = 2
config = jaxrl_llm.load_config(
    f"{ROOT}/configs/quickstart.py",
    {
        "trainer.steps": steps,
        "eval.interval": steps,
        "reward.functions": (f"{folder}/my_rewards.py:close", "exact"),
        "reward.weights": (0.5, 0.5),
        "algorithm.estimator": f"{folder}/my_estimator.py:sign_of_group",
        "algorithm.estimator_kwargs": {"scale_by": 0.7},
        **({"data.train_batch_size": 8} if SMALL else {}),
    },
)
for metrics, batch in jaxrl_llm.fit(config):
    pass
shown = ("critic/score/mean", "rewards/close/mean", "rewards/exact/mean", "reward_extra/close/distance/mean")
print({name: round(metrics[name], 3) for name in shown})

# %% [markdown]
# What is wrong is said before a model is loaded, with the nearest name.

# %%
try:
    jaxrl_llm.load_config(f"{ROOT}/configs/quickstart.py", {"actor.clip_ration": 0.3, "rollout.n": 1})
except jaxrl_llm.errors.UserError as error:
    print(error)

# %% [markdown]
# A reward may also be a JAX function of tokens, `@jaxrl_llm.rewards.jax_reward`; then the whole step is one pure
# function that can be jitted, scanned and vmapped over seeds: see `jaxrl_llm/steps/step.py`.

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
# # PPO against GRPO on the same task
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/jaxrl_llm/blob/main/notebooks/2_ppo_and_grpo.ipynb)
#
# Both are one program here: they differ in the estimator of the advantage and in whether a critic exists. This notebook
# trains both on the sums of the quickstart, looks at what the critic has learned, and at the two places of the KL.

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
import matplotlib.pyplot as plt
import numpy as np

import jaxrl_llm

# %%
# @title Knobs
steps = 100  # @param {type:"slider", min:5, max:200, step:5}
seed = 0  # @param {type:"integer"}
if SMALL:
    steps = 2
changes = {"trainer.steps": steps, "seed": seed, "eval.interval": max(1, steps // 20)}
ppo_changes = {}
if SMALL:
    changes |= {"data.train_batch_size": 8, "actor.mini_batch_size": 4, "critic.mini_batch_size": 4}
    ppo_changes = {"critic.warmup_steps": 1}


def train(recipe: str, **more):
    """The history of a run, and its last batch."""
    config = jaxrl_llm.load_config(f"{ROOT}/configs/{recipe}.py", changes | more)
    history = []
    for metrics, batch in jaxrl_llm.fit(config):
        history.append(metrics)
    return history, batch


# %%
grpo_history, _ = train("quickstart")
ppo_history, batch = train("quickstart_ppo", **ppo_changes)

# %% [markdown]
# PPO's first steps train the critic alone (`critic.warmup_steps`), so its reward starts later. Explained variance says
# how much of the returns' variation the values account for: 0 is a critic that knows nothing but the mean, 1 a perfect
# one.

# %%
ACCURACY = "val-core/column_sums/reward/mean@1"
figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
for name, history in (("GRPO", grpo_history), ("PPO", ppo_history)):
    axes[0].plot([m["critic/score/mean"] for m in history], label=name)
    points = [(i, m[ACCURACY]) for i, m in enumerate(history) if ACCURACY in m]
    axes[1].plot(*zip(*points, strict=True), "o-", label=name)
axes[0].set(title="Sampled reward", xlabel="step", ylim=(0, 1.02))
axes[1].set(title="Held-out accuracy, greedy", xlabel="step", ylim=(0, 1.02))
axes[1].legend(loc="lower right")
axes[2].plot([m["critic/vf_explained_var"] for m in ppo_history])
axes[2].axhline(0, color="gray", linewidth=0.8)
axes[2].set(title="Explained variance of the critic", xlabel="step", ylim=(-1, 1))
plt.show()

# %% [markdown]
# ## What the critic expects, token by token
# `values[t]` is the expected return before response token t is known. In a response that goes wrong the value falls at
# the token that spoils it: that is the credit which a group's mean cannot give.

# %%
from jaxrl_llm.quickstart import FOLDER
from jaxrl_llm.tokenizer import load_tokenizer

tokenizer = load_tokenizer(FOLDER)
scores = np.asarray(batch.token_level_scores.sum(1))
rows = [*np.flatnonzero(scores == 0)[:3], *np.flatnonzero(scores == 1)[:3]]
for row in rows:
    prompt = tokenizer.decode(np.asarray(batch.prompts[row // batch.n])[np.asarray(batch.prompt_mask[row // batch.n])])
    own = np.asarray(batch.response_mask[row])
    pieces = [tokenizer.decode([t]) for t in np.asarray(batch.responses[row])[own]]
    told = "  ".join(f"{p}: {v:.2f}" for p, v in zip(pieces, np.asarray(batch.values[row])[own], strict=True))
    print(f"{prompt:<7} score {scores[row]:.0f}   {told}")

# %% [markdown]
# ## Two places of the KL
# In the reward it is subtracted token by token before the advantage, and its coefficient may adapt; in the loss it is a
# term with a gradient of its own. They must not be confused, and either makes a reference exist.

# %%
in_reward, _ = train("quickstart_ppo", **ppo_changes, **{"algorithm.kl_ctrl.kl_coef": 0.05})
in_loss, _ = train("quickstart", **{"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.05, "actor.kl_loss_type": "k2"})
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
axes[0].plot([m["actor/reward_kl_penalty"] for m in in_reward], label="coefficient 0.05")
axes[0].plot([m["actor/reward_kl_penalty"] for m in ppo_history], label="coefficient 0.001")
axes[0].set(title="KL in the reward (PPO), nats a token", xlabel="step")
axes[0].legend()
axes[1].plot([m["actor/kl_loss"] for m in in_loss], color="C2")
axes[1].set(title="KL in the loss (GRPO, coefficient 0.05)", xlabel="step")
plt.show()

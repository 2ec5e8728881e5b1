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
# The critic alone is trained at first, on a policy that does not move yet; four passes over each batch.
warmup_steps = 40  # @param {type:"integer"}
ppo_changes = {"critic.warmup_steps": warmup_steps, "critic.epochs": 4, "critic.mini_batch_size": 8}
if SMALL:
    warmup_steps = 1
    changes |= {"data.train_batch_size": 8, "actor.mini_batch_size": 4, "model.scan_layers": True}
    ppo_changes |= {"critic.warmup_steps": 1, "critic.mini_batch_size": 4}


def train(recipe: str, keep: int = 0, **more):
    """The history of a run, and the batch of its step `keep` (0: none)."""
    config = jaxrl_llm.load_config(f"{ROOT}/configs/{recipe}.py", changes | more)
    history, kept = [], None
    for metrics, batch in jaxrl_llm.fit(config):
        history.append(metrics)
        if len(history) == keep:
            kept = batch
    return history, kept


# %%
grpo_history, _ = train("quickstart")
ppo_history, batch = train("quickstart_ppo", keep=warmup_steps, **ppo_changes)

# %% [markdown]
# The shaded steps train the critic alone (`critic.warmup_steps`): the policy, and with it the reward, stays where it is.
# Explained variance says how much of the returns' variation the values account for: 0 is a critic that knows nothing but
# the mean, 1 a perfect one. It rises while the critic has a policy that stands still to learn, and falls when that
# policy improves faster than the critic follows.

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
for ax in axes:
    ax.axvspan(0, warmup_steps, color="gray", alpha=0.15, linewidth=0)
axes[2].set(title="Explained variance of the critic", xlabel="step", ylim=(-1, 1))
plt.show()

# %% [markdown]
# ## What the critic expects, token by token
# `values[t]` is the expected return before response token t is known. At the end of the warm-up, the mean over
# responses to sums without a carry, and with one, right and wrong. First the critic learns which sums are hard: a sum
# with a carry comes out right less than half of the time, and its value says so before the first token. A value that
# parts right from wrong *within* a response, after the digit that forgets the carry, is the credit that a group's mean
# cannot give; how much of that it has learned in so few steps is the distance between the two lines of a colour.

# %%
from jaxrl_llm.quickstart import FOLDER
from jaxrl_llm.tokenizer import load_tokenizer

tokenizer = load_tokenizer(FOLDER)
scores = np.asarray(batch.token_level_scores.sum(1))
values, mask = np.asarray(batch.values), np.asarray(batch.response_mask)
prompts = [
    tokenizer.decode(np.asarray(ids)[np.asarray(own)])
    for ids, own in zip(batch.prompts, batch.prompt_mask, strict=True)
]
carry = np.repeat([sum(int(n[-1]) for n in prompt[:-1].split("+")) > 9 for prompt in prompts], batch.n)
figure, ax = plt.subplots(figsize=(5, 3.2), layout="constrained")
for has, color, name in ((False, "C0", "no carry"), (True, "C1", "carry")):
    for score, style, outcome in ((1, "o-", "right"), (0, "s--", "wrong")):
        rows = (carry == has) & (scores == score)
        if rows.sum() > 1:
            means = [values[rows & mask[:, t], t].mean() for t in range(3)]
            ax.plot(range(3), means, style, color=color, label=f"{name}, {outcome} ({rows.sum()})")
ax.set(title="Value before each token", xlabel="response token", xticks=range(3), ylim=(0, 1.1))
ax.legend()
plt.show()

# %% [markdown]
# ## Two places of the KL
# In the reward it is subtracted token by token before the advantage, and its coefficient may adapt; in the loss it is a
# term with a gradient of its own. They must not be confused, and either makes a reference exist.

# %%
in_reward, _ = train("quickstart_ppo", **ppo_changes, **{"algorithm.kl_ctrl.kl_coef": 0.5})
in_loss = {
    coefficient: train(
        "quickstart",
        **{"actor.use_kl_loss": True, "actor.kl_loss_coef": coefficient, "actor.kl_loss_type": "k2"},
    )[0]
    for coefficient in (0.001, 0.5)
}
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
axes[0].plot([m["actor/reward_kl_penalty"] for m in in_reward], label="coefficient 0.5")
axes[0].plot([m["actor/reward_kl_penalty"] for m in ppo_history], label="coefficient 0.001")
axes[0].set(title="KL in the reward (PPO), nats a token", xlabel="step")
axes[0].legend()
for coefficient, history in in_loss.items():
    axes[1].plot([m["actor/kl_loss"] for m in history], label=f"coefficient {coefficient}")
axes[1].set(title="KL in the loss (GRPO), nats a token", xlabel="step")
axes[1].legend()
plt.show()

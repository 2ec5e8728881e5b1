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
# # RLHF: from preferences to a reward model to PPO
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/jaxrl_llm/blob/main/notebooks/6_rlhf.ipynb)
#
# Three stages (Ouyang et al. 2022): a model is fine-tuned on given responses; another learns from pairs which of two
# responses is better; PPO then trains the first on the second's score. Here the first stage is done: it is the packaged
# model, which adds two-digit numbers and forgets most carries. The other two take a minute or two each on two CPU cores.

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

import matplotlib.pyplot as plt
import numpy as np

import jaxrl_llm
from jaxrl_llm.reward_model import train_reward_model
from jaxrl_llm.tasks import column_pairs

folder = Path(tempfile.mkdtemp())

# %%
# @title Knobs
pair_steps = 500  # @param {type:"slider", min:50, max:1000, step:50}
steps = 100  # @param {type:"slider", min:5, max:200, step:5}
kl_coef = 0.05  # @param {type:"number"}
seed = 0  # @param {type:"integer"}
if SMALL:
    pair_steps, steps = 3, 2
common = {"seed": seed, "logging.progress": "none"}
if SMALL:
    common |= {"eval.max_prompts": 40, "eval.batch_size": 40, "model.scan_layers": True}

# %% [markdown]
# ## Pairs
# A right and a wrong answer to each sum, in TRL's fields `prompt`, `chosen`, `rejected`. Real ones come from people; a
# file of records with these fields is all that `data.train` needs.

# %%
for pair in column_pairs(split="test")[::200]:
    print(pair["prompt"], " better:", pair["chosen"], " worse:", pair["rejected"])

# %% [markdown]
# ## The reward model
# The language model with a head that gives one number in place of the next token's probabilities, read at a text's last
# token. The loss is −log σ(score of the better − score of the worse): Bradley and Terry's probability that the better
# one wins.

# %%
pair_changes = {**common, "trainer.steps": pair_steps, "eval.interval": max(1, pair_steps // 10)}
if SMALL:
    pair_changes |= {"data.train_batch_size": 8, "data.train": ("jaxrl_llm.tasks:column_pairs(split='test')",)}
config = jaxrl_llm.load_config(f"{ROOT}/configs/quickstart_reward_model.py", pair_changes)
pair_history = [metrics for metrics, _ in train_reward_model(config, folder / "reward_model")]

# %% [markdown]
# The run's folder holds the trained model as an ordinary sequence-classification folder, `model/`, which transformers
# reads as well. As a reward it is called with prompts, responses and records, like any other.

# %%
from jaxrl_llm.loading import load_inputs, make_layout
from jaxrl_llm.reward_scorer import make_scorer

chain = {**common, "reward.model.path": str(folder / "reward_model" / "model"), "algorithm.kl_ctrl.kl_coef": kl_coef}
config = jaxrl_llm.load_config(f"{ROOT}/configs/quickstart_rlhf.py", chain)
scorer, _ = make_scorer(config, load_inputs(config), make_layout(config))
scorer.load()
scorer.compile(lambda text: None)
for response in ("85", "75", "95", "84", "8", "855", "+"):
    (found,) = scorer(["47+38="], [response], [{"prompt": "47+38="}])
    print(f"47+38={response:<5} {found['score']:+.2f}")

# %%
pairs = column_pairs(split="test")
scores = {
    side: [row["score"] for row in scorer([""] * len(pairs), [pair[side] for pair in pairs], pairs)]
    for side in ("chosen", "rejected")
}
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
ACCURACY = "val-core/column_pairs/reward/mean@1"
points = [(i + 1, m[ACCURACY]) for i, m in enumerate(pair_history) if ACCURACY in m]
axes[0].plot(*zip(*points, strict=True), "o-")
axes[0].set(title="Held-out pairs in the right order", xlabel="step", ylim=(0.45, 1.02))
bins = np.linspace(min(scores["rejected"]), max(scores["chosen"]), 40)
axes[1].hist(scores["chosen"], bins, alpha=0.6, label="right sums")
axes[1].hist(scores["rejected"], bins, alpha=0.6, label="wrong sums")
axes[1].set(title="Scores of held-out sums", xlabel="score")
axes[1].legend()
plt.show()

# %% [markdown]
# ## PPO on its score
# The reward is the score, less `kl_coef` times the KL to the packaged model, token by token. Whether a sum is right is
# only watched (`exact` has weight 0): the policy is never told.

# %%
policy_changes = {**chain, "trainer.steps": steps, "eval.interval": max(1, steps // 20), "trainer.export": False}
if SMALL:
    policy_changes |= {"data.train_batch_size": 8, "actor.mini_batch_size": 4}
    policy_changes |= {"critic.warmup_steps": 1, "critic.mini_batch_size": 4}


def train_policy(**more):
    config = jaxrl_llm.load_config(f"{ROOT}/configs/quickstart_rlhf.py", policy_changes | more)
    return [metrics for metrics, _ in jaxrl_llm.fit(config)]


history = train_policy()

# %%
SCORE, EXACT = "val-core/column_sums/reward/mean@1", "val-aux/column_sums/exact/mean@1"


def evaluated(history, name):
    """The steps at which a run was evaluated, and what was found."""
    return zip(*[(i + 1, m[name]) for i, m in enumerate(history) if name in m], strict=True)


figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
axes[0].plot(*evaluated(history, SCORE), "o-")
axes[0].set(title="Held out: the reward model's score", xlabel="step")
axes[1].plot(*evaluated(history, EXACT), "o-")
axes[1].set(title="Held out: right sums, only watched", xlabel="step", ylim=(0, 1.02))
axes[2].plot([m["actor/reward_kl_penalty"] for m in history])
axes[2].set(title="KL to the packaged model, nats a token", xlabel="step")
plt.show()
print(f"held-out sums right after training: {history[-1][EXACT]:.3f}")

# %% [markdown]
# ## Where the reward model is wrong
# Already the model above likes `47+38=84`: few pairs have shown it sums that are off by one. A policy finds what a reward
# model wrongly likes. The same with one that has seen a fifth of the pairs: without the KL its score keeps rising while
# the sums go wrong again. Nothing but what is only watched tells (Gao et al. 2022).

# %%
weak_changes = pair_changes | {"trainer.steps": 3 if SMALL else 100, "data.eval": (), "eval.interval": 0}
config = jaxrl_llm.load_config(f"{ROOT}/configs/quickstart_reward_model.py", weak_changes)
_ = [metrics for metrics, _ in train_reward_model(config, folder / "weak")]
weak = {"reward.model.path": str(folder / "weak" / "model")}
histories = {
    coefficient: train_policy(**weak, **{"algorithm.kl_ctrl.kl_coef": coefficient}) for coefficient in (kl_coef, 0.0)
}

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for coefficient, found in histories.items():
    for ax, name in zip(axes, (SCORE, EXACT), strict=True):
        ax.plot(*evaluated(found, name), "o-", markersize=4, label=f"kl_coef {coefficient}")
axes[0].set(title="Held out: the weak model's score", xlabel="step")
axes[1].set(title="Held out: right sums", xlabel="step", ylim=(0, 1.02))
axes[1].legend()
plt.show()

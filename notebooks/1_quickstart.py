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
# # Quickstart: a small model learns to carry
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/jaxrl_llm/blob/main/notebooks/1_quickstart.ipynb)
#
# A language model of 0.3 million parameters adds two-digit numbers, `47+38=`, one character a token. The book it learned
# from mostly forgot the carry, and so does the model. Reinforcement learning knows nothing but whether the sum is right.
# Watch it learn to carry; it takes about a minute on two CPU cores.

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
from jaxrl_llm.evaluation import wilson_interval

# %% [markdown]
# ## Before
# What the model answers greedily. Sums without a carry it gets right, the others mostly not.
# %%
from jaxrl_llm.generate import generate
from jaxrl_llm.quickstart import FOLDER
from jaxrl_llm.steps.sampling import Sampling

questions = ["12+34=", "47+38=", "55+27=", "60+19=", "68+94=", "30+30="]


def ask(model: str) -> None:
    *_, answers = generate(model, questions, max_new_tokens=4, sampling=Sampling(temperature=0.0))
    for question, (answer, _) in zip(questions, answers, strict=True):
        a, b = question.rstrip("=").split("+")
        print(f"{question}{answer:<5}{'right' if answer == str(int(a) + int(b)) else 'wrong'}")


ask(str(FOLDER))

# %% [markdown]
# ## Training
# Each step draws prompts, samples several responses to each, scores them, and makes the better ones of a group more
# likely. Every knob can be changed here or below; the same code path as `python -m jaxrl_llm.train`.

# %%
# @title Knobs
steps = 100  # @param {type:"slider", min:5, max:200, step:5}
prompts_a_step = 32  # @param {type:"integer"}
responses_each = 8  # @param {type:"integer"}
learning_rate = 3e-5  # @param {type:"number"}
seed = 0  # @param {type:"integer"}
if SMALL:
    steps, prompts_a_step = 2, 8

config = jaxrl_llm.load_config(
    f"{ROOT}/configs/quickstart.py",
    {
        "trainer.steps": steps,
        "data.train_batch_size": prompts_a_step,
        "rollout.n": responses_each,
        "optimizer.lr": learning_rate,
        "seed": seed,
        "eval.interval": (every := max(1, steps // 20)),
    },
)
history = []
run = jaxrl_llm.fit(config)
for metrics, batch in run:
    history.append(metrics)
    if len(history) % (2 * every) == 0:
        held_out = metrics["val-core/column_sums/reward/mean@1"]
        print(f"step {len(history):3}  reward {metrics['critic/score/mean']:.2f}  held-out accuracy {held_out:.3f}")

# %% [markdown]
# ## What happened
# The reward of sampled responses, and the greedy accuracy on sums that training never draws. The entropy first rises,
# while the model is of two minds about the carry, then falls. A group whose responses all get the same reward teaches
# nothing: that share grows as sums become sure.

# %%
step = np.arange(1, len(history) + 1)
figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
axes[0].plot(step, [m["critic/score/mean"] for m in history], label="sampled reward")
evaluated = [
    (s, m["val-core/column_sums/reward/mean@1"])
    for s, m in zip(step, history, strict=True)
    if "val-core/column_sums/reward/mean@1" in m
]
axes[0].plot(*zip(*evaluated, strict=True), "o-", label="held-out accuracy, greedy")
axes[0].set(title="Reward", xlabel="step", ylim=(0, 1.02))
axes[0].legend(loc="lower right")
axes[1].plot(step, [m["actor/entropy"] for m in history])
axes[1].set(title="Entropy, nats a token", xlabel="step")
axes[2].plot(step, [m["frac_reward_zero_std"] for m in history])
axes[2].set(title="Groups that teach nothing (equal rewards)", xlabel="step", ylim=(0, 1.02))
plt.show()

last = evaluated[-1][1]
low, high = wilson_interval(last * 1000, 1000)
print(f"held-out accuracy {last:.3f}, 95% interval [{low:.3f}, {high:.3f}] over 1,000 sums")

# %% [markdown]
# ## The batch of the last step
# A batch is an immutable tree of arrays that the phases add evidence to. One group: eight responses to one prompt, their
# scores, and the advantages that come of them.

# %%
from jaxrl_llm.tokenizer import load_tokenizer

tokenizer = load_tokenizer(FOLDER)
scores, advantages = np.asarray(batch.token_level_scores.sum(1)), np.asarray(batch.advantages[:, 0])
spread = [g for g in range(batch.num_prompts) if np.ptp(scores[g * batch.n : (g + 1) * batch.n]) > 0]
group = spread[0] if spread else 0
print(tokenizer.decode(np.asarray(batch.prompts[group])[np.asarray(batch.prompt_mask[group])]))
for row in range(group * batch.n, (group + 1) * batch.n):
    own = np.asarray(batch.responses[row])[np.asarray(batch.response_mask[row])]
    print(
        f"  {tokenizer.decode(own, skip_special_tokens=True):<6} score {scores[row]:.0f}  advantage {advantages[row]:+.2f}"
    )

# %% [markdown]
# Next: change the knobs above; `2_ppo_and_grpo` for the critic; `5_your_own_reward_and_estimator` to change what is
# learned.

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
# # GSM8K with a model of 0.5B to 1.5B parameters
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/OWNER/jaxrl_llm/blob/main/notebooks/4_gsm8k.ipynb)
#
# Grade-school word problems, rewarded if the number after `####` is right. Meant for a T4, a TPU v5e or an H100 with a
# model from the hub (not run on one by its authors); on a CPU it does two small steps with SmolLM2-135M, to see that it
# works.

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
import glob
import tempfile

import jax

import jaxrl_llm

print(jax.devices())

# %%
# @title Knobs
model = "HuggingFaceTB/SmolLM2-360M-Instruct"  # @param {type:"string"}
train = "hf:openai/gsm8k:main:train"  # @param {type:"string"}
held_out = "hf:openai/gsm8k:main:test"  # @param {type:"string"}
steps = 100  # @param {type:"integer"}
prompts_a_step = 16  # @param {type:"integer"}
responses_each = 8  # @param {type:"integer"}
response_length = 384  # @param {type:"integer"}
dtype = "bfloat16"  # @param ["bfloat16", "float32"]
# A T4 has no bfloat16 arithmetic: take float32 there, and fewer rows at a time.
rows_at_a_time = 8  # @param {type:"integer"}
if SMALL or jax.devices()[0].platform == "cpu":
    model = os.environ.get("JAXRL_LLM_MODEL", f"{ROOT}/models/smollm2-135m")
    train = held_out = os.environ.get("JAXRL_LLM_GSM8K", f"{ROOT}/notebooks/four_problems.jsonl")
    steps, prompts_a_step, responses_each, response_length, dtype, rows_at_a_time = 2, 2, 2, 16, "float32", 4

# %%
config = jaxrl_llm.load_config(
    f"{ROOT}/configs/gsm8k_grpo.py",
    {
        "model.path": model,
        "model.dtype": dtype,
        "data.train": train,
        "data.eval": held_out,
        "data.train_batch_size": prompts_a_step,
        "rollout.n": responses_each,
        "rollout.response_length": response_length,
        "actor.micro_batch_size": rows_at_a_time,
        "trainer.score_micro_batch_size": rows_at_a_time,
        "trainer.steps": steps,
        "trainer.save_interval": max(1, steps // 4),
        "eval.interval": max(1, steps // 4),
        "eval.max_prompts": 256,
        "eval.batch_size": min(64, 4 * prompts_a_step),
    },
)

# %% [markdown]
# Leaving the loop early, by the stop button for instance, leaves a usable state (`run.state()`); a `workdir` that exists
# is resumed.

# %%
workdir = tempfile.mkdtemp() if SMALL else "runs/gsm8k"
run = jaxrl_llm.fit(config, workdir)
for metrics, _ in run:
    line = {name: metrics[name] for name in ("critic/score/mean", "response_length/mean", "perf/throughput")}
    held = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
    print(run.step, {name: round(value, 3) for name, value in (line | held).items()})

# %%
print(sorted(os.path.relpath(path, workdir) for path in glob.glob(f"{workdir}/*")))

"""Does the mean over a row's tokens make wrong responses long? GRPO against Dr. GRPO on a task where length is free.

    python -m benchmarks.length_bias --out docs/length_bias.png

A prompt is one token out of K. The first response token answers it, the reward is 1 if that answer is right, and what
follows is filler until a stop token, which no reward looks at. The policy is a two-layer transformer, first fitted to
examples: one answer in five is right, the filler after a right answer is another token than after a wrong one (so that
the policy can tell), and after every filler the stop has the same chance, whatever the answer was. Then it is trained
by whole pure steps, scanned over steps and vmapped over seeds. Variants differ in advantage and aggregation alone. One
JSON line each, [first steps, last steps], means over the seeds.

`answer only` is the control: advantages of Dr. GRPO on the first token and 0 on the others, which cannot have earned
the reward. In expectation its gradient is that of Dr. GRPO, so what lengths do there is what learning the answer does
to them through shared parameters, and not the work of the loss.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs import base
from jaxrl_llm.algorithms.advantages import grpo
from jaxrl_llm.config import Config, from_config_dict
from jaxrl_llm.models.transformer import TransformerConfig, init_params, make_transformer
from jaxrl_llm.steps.phases import make_program
from jaxrl_llm.steps.rollout import StopRules
from jaxrl_llm.steps.step import make_step
from jaxrl_llm.types import FINISH_LENGTH, FINISH_STOP, Array, Batch, Params, Prompts, RunState, TrainState

# Token ids: stop, filler after a right answer, filler after a wrong one, then K answers, then the K prompts.
K = 8
STOP, AFTER_RIGHT, AFTER_WRONG, ANSWERS = 0, 1, 2, 3
PROMPTS, VOCAB = ANSWERS + K, ANSWERS + 2 * K
WIDTH = 32  # tokens of the response frame
P_RIGHT, P_STOP = 0.2, 1 / 8  # of the examples
EXAMPLES, FIT_STEPS, FIT_LR = 128, 600, 5e-3  # rows a step, steps and learning rate of the fit
GROUPS, N, LR = 12, 8, 3e-4  # prompts a step, responses to each, learning rate of the training
WINDOW = 10  # steps at the start and at the end that the printed figures are means of

MODEL = make_transformer(
    TransformerConfig(
        vocab_size=VOCAB,
        real_vocab_size=VOCAB,
        num_layers=2,
        width=32,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        mlp_width=64,
        max_positions=64,
    )
)

# name -> (estimator, scale, loss_agg_mode)
VARIANTS = {
    "GRPO": ("grpo", "group", "seq-mean-token-mean"),
    "GRPO, token-mean": ("grpo", "group", "token-mean"),
    "Dr. GRPO": ("grpo", "none", "seq-mean-token-sum-norm"),
    "answer only": ("benchmarks.length_bias:answer_only", "none", "seq-mean-token-sum-norm"),
}
COLORS = ("#D55E00", "#E69F00", "#0072B2", "#555555")
STYLES = ("-", "-", "-", "--")
PANELS = {  # measured quantity -> title
    "wrong_length": "tokens of wrong responses",
    "right_length": "tokens of right responses",
    "correlation": "corr. of length, advantage",
    "accuracy": "share of right responses",
}
Measured = dict[str, Array]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/length_bias.png"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args(argv)
    if args.steps < 1 or args.seeds < 1:
        parser.error("steps and seeds must be at least 1")

    keys = jax.vmap(jax.random.key)(jnp.arange(args.seeds))
    fitted = jax.jit(jax.vmap(fit))(keys)
    found = {}
    for name in VARIANTS:
        found[name] = jax.tree.map(np.asarray, train_seeds(name, keys, fitted, args.steps))
        print(json.dumps({"variant": name} | reached(found[name])), flush=True)
    draw(found, args.out)


def make_config(steps: int, groups: int, n: int, **changes: Any) -> Config:
    """A config of this task; `changes` are keys with __ for the dot."""
    raw = base.get_config()
    raw.model.update(path="none", scan_layers=False)
    raw.data.update(train=("none",), train_batch_size=groups)
    raw.reward.functions = ("number",)
    raw.rollout.update(n=n, prompt_length=1, response_length=WIDTH)
    raw.trainer.steps = steps
    raw.optimizer.weight_decay = 0.0
    for name, value in changes.items():
        section, key = name.split("__")
        raw[section][key] = value
    return from_config_dict(raw)


def make_prompts(key: Array, groups: int, first_uid: Array) -> Prompts:
    asked = jax.random.randint(key, (groups,), 0, K)
    return Prompts(
        prompts=PROMPTS + asked[:, None],
        prompt_mask=jnp.ones((groups, 1), bool),
        uid=first_uid + jnp.arange(groups),
        prompt_valid=jnp.ones(groups, bool),
        record_arrays={"answer": ANSWERS + asked},
    )


def reward(responses: Array, mask: Array, records: Any) -> Array:
    """1 if the first token is the answer."""
    del mask
    return (responses[:, 0] == records["answer"]).astype(jnp.float32)


# The policy before training


def fit(key: Array) -> Params:
    """Parameters fitted to examples: the actor's update with the loss −A log π and A = 1 is a supervised one."""
    config = make_config(
        FIT_STEPS,
        EXAMPLES,
        1,
        algorithm__estimator="reinforce_plus_plus",
        actor__policy_loss="gpg",
        optimizer__lr=FIT_LR,
        optimizer__schedule="cosine",
    )
    actor = make_program(config, MODEL).actor

    def step(state: TrainState, i: Array) -> tuple[TrainState, None]:
        step_key = jax.random.fold_in(key, i)
        return actor.update(state, make_examples(step_key), step_key)[0], None

    state = actor.init(init_params(MODEL, jax.random.fold_in(key, FIT_STEPS)))
    return jax.lax.scan(step, state, jnp.arange(FIT_STEPS))[0].params


def make_examples(key: Array) -> Batch:
    """EXAMPLES rows of an answer, right with P_RIGHT, then filler with a stop after each token with P_STOP."""
    asked_key, right_key, wrong_key, stop_key = jax.random.split(key, 4)
    prompts = make_prompts(asked_key, EXAMPLES, jnp.int32(0))
    answer = prompts.record_arrays["answer"]
    right = jax.random.uniform(right_key, answer.shape) < P_RIGHT
    wrong = ANSWERS + (answer - ANSWERS + jax.random.randint(wrong_key, answer.shape, 1, K)) % K
    stops = (jax.random.uniform(stop_key, (EXAMPLES, WIDTH)) < P_STOP).at[:, 0].set(False)
    end = jnp.where(stops.any(1), stops.argmax(1), WIDTH)[:, None]
    place = jnp.arange(WIDTH)[None, :]
    filler = jnp.where(right, AFTER_RIGHT, AFTER_WRONG)[:, None]
    tokens = jnp.where(place == 0, jnp.where(right, answer, wrong)[:, None], jnp.where(place < end, filler, STOP))
    mask = place <= end
    return Batch(
        prompts=prompts.prompts,
        prompt_mask=prompts.prompt_mask,
        prompt_valid=prompts.prompt_valid,
        record_arrays=prompts.record_arrays,
        uid=prompts.uid,
        responses=jnp.where(mask, tokens, 0),
        response_mask=mask,
        response_length=mask.sum(1),
        rollout_log_probs=None,
        finish_reason=jnp.where(stops.any(1), FINISH_STOP, FINISH_LENGTH),
        loss_mask=mask,
        advantages=mask.astype(jnp.float32),
    )


# The training


def answer_only(rewards: Array, mask: Array, uid: Array) -> tuple[Array, Array]:
    """The control's estimator: s − mean_g on the first token, 0 on the others."""
    advantages, returns = grpo(rewards, mask, uid, scale="none")
    return jnp.where(jnp.arange(mask.shape[1]) == 0, advantages, 0), returns


def train_seeds(variant: str, keys: Array, fitted: Params, steps: int) -> Measured:
    """`steps` whole steps from fitted parameters; each quantity measured is [seeds, steps]."""
    estimator, scale, aggregation = VARIANTS[variant]
    config = make_config(
        steps,
        GROUPS,
        N,
        algorithm__estimator=estimator,
        algorithm__scale=scale,
        actor__loss_agg_mode=aggregation,
        optimizer__lr=LR,
        optimizer__max_grad_norm=0.0,  # aggregations differ in the gradient's size, and a clip would act on some only
    )
    stops = StopRules(
        ids=jnp.array([STOP], jnp.int32),
        strings=jnp.zeros((2, VOCAB), jnp.int32),
        min_new_tokens=jnp.int32(1),  # the answer is never the stop, or short would be wrong by definition
    )
    program = make_program(config, MODEL, stops=stops)
    step = make_step(program, reward)

    def one_seed(key: Array, params: Params) -> Measured:
        def one_step(state: RunState, i: Array) -> tuple[RunState, Measured]:
            prompt_key, step_key = jax.random.split(jax.random.fold_in(key, i))
            state, _, batch = step(state, make_prompts(prompt_key, GROUPS, i * GROUPS), step_key)
            return state, measure(batch)

        return jax.lax.scan(one_step, program.init(params), jnp.arange(steps))[1]

    return jax.jit(jax.vmap(one_seed))(keys, fitted)


def measure(batch: Batch) -> Measured:
    """Scalars of one step; NaN where no row counts."""
    assert batch.scores is not None and batch.advantages is not None
    length, right = batch.response_length.astype(jnp.float32), batch.scores[:, 0] > 0
    advantage = batch.advantages[:, 0]
    everywhere = jnp.ones_like(right)

    def mean(x: Array, rows: Array) -> Array:
        return jnp.where(rows, x, 0).sum() / rows.sum()

    # Rows of groups that are all right or all wrong have no advantage and teach nothing.
    live = advantage != 0
    dx, dy = length - mean(length, live), advantage - mean(advantage, live)
    return {
        "wrong_length": mean(length, ~right),
        "right_length": mean(length, right),
        "correlation": mean(dx * dy, live) / jnp.sqrt(mean(dx**2, live) * mean(dy**2, live)),
        "accuracy": mean(right.astype(jnp.float32), everywhere),
        # Whether the policy can tell: the filler that goes with its answer follows it.
        "tells": mean((batch.responses[:, 1] == jnp.where(right, AFTER_RIGHT, AFTER_WRONG)) * 1.0, everywhere),
        "truncated": mean((batch.finish_reason == FINISH_LENGTH).astype(jnp.float32), everywhere),
    }


# What was found


def reached(measured: dict[str, np.ndarray]) -> dict[str, list[float]]:
    """[first, last] of each quantity, means over WINDOW steps and the seeds."""
    return {
        name: [round(float(np.nanmean(part)), 3) for part in (values[:, :WINDOW], values[:, -WINDOW:])]
        for name, values in measured.items()
    }


def draw(found: dict[str, dict[str, np.ndarray]], picture: Path) -> None:
    """Mean over the seeds, and the band from the least to the greatest seed, of blocks of 5 steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(11, 3.1), layout="constrained")
    for ax, (quantity, title) in zip(axes, PANELS.items(), strict=True):
        for (name, measured), color, style in zip(found.items(), COLORS, STYLES, strict=True):
            values = measured[quantity]
            blocks = np.array_split(np.arange(values.shape[1]), max(values.shape[1] // 5, 1))
            middle = [block.mean() for block in blocks]
            seeds = np.stack([np.nanmean(values[:, block], 1) for block in blocks], 1)
            ax.fill_between(middle, seeds.min(0), seeds.max(0), color=color, alpha=0.15, linewidth=0)
            ax.plot(middle, seeds.mean(0), color=color, linestyle=style, linewidth=2, label=name)
        ax.set_title(title, fontsize=10.5)
        ax.set_xlabel("step")
        ax.grid(alpha=0.25)
    for ax in axes[:2]:
        ax.set_ylim(0, WIDTH)
    axes[2].set(ylim=(-1, 1), yticks=(-1, -0.5, 0, 0.5, 1))
    axes[2].axhline(0, color="black", linewidth=0.8)
    axes[3].set_ylim(0, 1)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(found), frameon=False)
    figure.savefig(picture, dpi=130)


if __name__ == "__main__":
    main()

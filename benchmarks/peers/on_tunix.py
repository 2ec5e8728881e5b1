"""tunix at the work of benchmarks.rollout and benchmarks.update: its in-process sampler and its GRPO training step.

    TUNIX_PYTHON -m benchmarks.peers.on_tunix --work sample --prompts 8 --n 8 --prompt-length 256
    TUNIX_PYTHON -m benchmarks.peers.on_tunix --work update --prompts 16

Run from the checkout, where google-tunix is (`python -m benchmarks.peers` makes the environment); this package need not
be there. Prints one JSON line. Options, tokens and lengths are those of benchmarks.rollout and benchmarks.update.

Its sampler's loop computes every row until the last one is done, and a row is done at an end token, which nobody can
place at a drawn length. Rows of different lengths are therefore sampled up to the longest, at what they would cost if
each ended where it should; counted are the tokens wanted. Its step gets rows padded to the response's width, as its
GRPO learner makes them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.measure import lengths
from benchmarks.measure.clock import repeated, rss_mb, timing
from benchmarks.measure.presets import PRESETS

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORK, required=True)
    parser.add_argument("--preset", choices=PRESETS, default="llama-5m")
    for name, default in (("prompts", 16), ("n", 1), ("prompt-length", 32), ("response-length", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lengths", type=lengths.spec, default="full")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    case = parser.parse_args()
    call, tokens = WORK[case.work](case)
    start = time.perf_counter()
    call()
    first = time.perf_counter() - start
    line = {"peer": f"tunix {version('google-tunix')}", **vars(case)}
    seconds = repeated(call, case.repeats)
    line |= timing(seconds, tokens) | {"compile_s": round(first - min(seconds), 2), "rss_mb": rss_mb()}
    print(json.dumps(line), flush=True)


def make_model(case: argparse.Namespace) -> Any:
    from flax import nnx
    from tunix.models.llama3 import model as llama  # pyright: ignore[reportMissingImports]

    shape = PRESETS[case.preset]
    config = llama.ModelConfig(
        num_layers=shape["num_hidden_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["hidden_size"],
        hidden_dim=shape["intermediate_size"],
        num_heads=shape["num_attention_heads"],
        head_dim=shape["head_dim"],
        num_kv_heads=shape["num_key_value_heads"],
        rope_theta=shape["rope_theta"],
        norm_eps=shape["rms_norm_eps"],
        weight_tying=shape["tie_word_embeddings"],
    )
    return llama.Llama3(config, rngs=nnx.Rngs(case.seed))


def random_prompts(case: argparse.Namespace) -> np.ndarray:
    """int32 [rows, P], each prompt n times."""
    rng = np.random.default_rng(case.seed)
    drawn = rng.integers(1, PRESETS[case.preset]["vocab_size"], (case.prompts, case.prompt_length))
    return np.repeat(drawn.astype(np.int32), case.n, axis=0)


class NumberTokenizer:
    """Token ids as numbers in a text. No BOS (it is falsy), and an end token that is never drawn."""

    def __init__(self, vocab_size: int) -> None:
        self._end = vocab_size + 7

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(number) for number in text.split()]

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return self._end

    def pad_id(self) -> int:
        return 0

    def dedup_bos_ids(self, ids: list[int]) -> list[int]:
        return ids


def sample(case: argparse.Namespace) -> tuple[Callable[[], None], int]:
    """A call, which returns when all is there, and the tokens that are wanted of it."""
    from tunix.generate import sampler  # pyright: ignore[reportMissingImports]

    shape, rows = PRESETS[case.preset], case.prompts * case.n
    drawn = lengths.draw(case.lengths, rows, case.response_length, case.seed)
    texts = [" ".join(map(str, prompt)) for prompt in random_prompts(case)]
    cache = sampler.CacheConfig(
        cache_size=case.prompt_length + case.response_length,
        num_layers=shape["num_hidden_layers"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
    )
    made = sampler.Sampler(make_model(case), NumberTokenizer(shape["vocab_size"]), cache)
    how = {"temperature": case.temperature, "top_p": case.top_p, "seed": 1}

    def call() -> None:
        steps = int(drawn.max())
        out = made(texts, max_generation_steps=steps, max_prompt_length=case.prompt_length, **how)
        assert [len(tokens) for tokens in out.tokens] == [steps] * rows

    return call, int(drawn.sum())


def update(case: argparse.Namespace) -> tuple[Callable[[], None], int]:
    """As `sample`; a GRPO step without KL, with clipping and AdamW. A group of one takes its step like others."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from tunix.rl import algo_core, common  # pyright: ignore[reportMissingImports]
    from tunix.rl.grpo import grpo_learner  # pyright: ignore[reportMissingImports]
    from tunix.sft import peft_trainer  # pyright: ignore[reportMissingImports]

    vocab_size, rows, width = PRESETS[case.preset]["vocab_size"], case.prompts * case.n, case.response_length
    drawn = lengths.draw(case.lengths, rows, width, case.seed)
    mask = (np.arange(width)[None, :] < drawn[:, None]).astype(np.int32)
    responses = np.random.default_rng(case.seed + 1).integers(1, vocab_size, (rows, width)).astype(np.int32)
    prompts = random_prompts(case)
    example = common.TrainExample(
        prompt_ids=jnp.asarray(prompts),
        prompt_mask=jnp.ones(prompts.shape, jnp.int32),
        completion_ids=jnp.asarray(responses * mask),
        completion_mask=jnp.asarray(mask),
        advantages=jnp.asarray(np.arange(rows) % 2 - 0.5, jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=None,  # with one update a batch they are the new ones, held constant
    )
    config = grpo_learner.GRPOConfig(num_generations=max(case.n, 2), beta=0.0)
    if not hasattr(config, "temperature"):
        config.temperature = case.temperature
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.01))
    settings = peft_trainer.TrainingConfig(eval_every_n_steps=1000, max_steps=1000)
    model = make_model(case)
    trainer = peft_trainer.PeftTrainer(model, optimizer, settings)

    def loss(model: Any, train_example: Any, algo_config: Any) -> Any:
        return algo_core.grpo_loss_fn(model, train_example, algo_config, pad_id=0, eos_id=vocab_size + 7)

    trainer.with_loss_fn(loss, has_aux=True)
    trainer.with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": config})
    step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)

    def call() -> None:
        jax.block_until_ready((step(example), jax.tree.leaves(nnx.state(model))))

    return call, rows * case.prompt_length + int(drawn.sum())


WORK = {"sample": sample, "update": update}

if __name__ == "__main__":
    main()

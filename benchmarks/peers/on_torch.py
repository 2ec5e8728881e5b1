"""transformers and TRL at the work of benchmarks.step and benchmarks.scoring: GRPO of a Hugging Face folder in torch.

    TORCH_PYTHON -m benchmarks.peers.on_torch --peer transformers --model models/smollm2-135m
    TORCH_PYTHON -m benchmarks.peers.on_torch --peer trl --model models/smollm2-135m

Run from the checkout, where torch and TRL are (`python -m benchmarks.peers` makes the environment); this package need
not be there. One JSON line for each `part`: generation; scoring, log-probs of the same responses; update, forward and
backward passes, clipping and AdamW; iteration, generation and update together. `transformers` is a hand-written loop on
its generate(), `trl` TRL's own GRPOTrainer. Prompts are digits, one token each, and no response ends before its limit.
`tokens` as in benchmarks.rollout for generation, else of prompts and responses, a prompt counted for each response.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

from benchmarks.measure.clock import repeated, rss_mb, timing
from benchmarks.measure.prompts import records

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
)
from transformers.utils import logging  # pyright: ignore[reportMissingImports]

LR, CLIP_NORM, EPSILON = 1e-6, 1.0, 0.2
Parts = Iterator[tuple[str, list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, required=True)
    parser.add_argument("--model", required=True, help="a folder")
    for name, default in (("prompts", 8), ("n", 8), ("prompt-length", 40), ("response-length", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--micro-batch", type=int, default=16, help="rows at a time")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of products (float32)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    case = parser.parse_args()
    torch.set_num_threads(case.threads)
    torch.manual_seed(case.seed)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(case.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    rows = case.prompts * case.n
    for part, seconds in PEERS[case.peer](case, model, tokenizer):
        tokens = rows * (case.response_length + (case.prompt_length if part != "generation" else 0))
        line = {"peer": f"{case.peer} {version(case.peer)}", "part": part, **vars(case)}
        print(json.dumps(line | timing(seconds, tokens) | {"rss_mb": rss_mb()}), flush=True)


# transformers


def on_transformers(case: argparse.Namespace, model: Any, tokenizer: Any) -> Parts:
    texts = [record["prompt"] for record in records(case.prompts, case.prompt_length)]
    given = tokenizer(texts, return_tensors="pt", add_special_tokens=False)
    given = {name: given[name].repeat_interleave(case.n, 0) for name in ("input_ids", "attention_mask")}
    assert given["input_ids"].shape[1] == case.prompt_length, given["input_ids"].shape
    limits = dict.fromkeys(("min_new_tokens", "max_new_tokens"), case.response_length)
    sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, **limits}
    found: list[torch.Tensor] = []
    model.eval()
    # Without a gradient products are fastest of parameters that are of their type already.
    view = model if case.dtype == "float32" else copy.deepcopy(model).to(torch.bfloat16)
    generation = repeated(lambda: found.append(view.generate(**given, **sampling)), case.repeats)
    yield "generation", generation
    ids = found[-1]
    assert ids.shape == (case.prompts * case.n, case.prompt_length + case.response_length), ids.shape
    parts = ids.split(case.micro_batch)

    @torch.no_grad()
    def score() -> None:
        for part in parts:
            log_probs(view, part, case.response_length)

    yield "scoring", repeated(score, case.repeats)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    advantages = (torch.arange(len(ids)) % 2 * 2.0 - 1).split(case.micro_batch)
    model.train()

    def update() -> None:
        for part, advantage in zip(parts, advantages, strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "bfloat16"):
                new = log_probs(model, part, case.response_length)
            ratio = (new - new.detach()).exp()
            clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
            gain = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
            (-gain.sum() / (len(ids) * case.response_length)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()

    updates = repeated(update, case.repeats)
    yield "update", updates
    yield "iteration", [a + b for a, b in zip(generation, updates, strict=True)]


def log_probs(model: Any, ids: Any, count: int) -> Any:
    """Of the last `count` tokens of each row; logits exist for those alone."""
    logits = model(input_ids=ids, logits_to_keep=count + 1, use_cache=False).logits[:, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -count:].flatten(), reduction="none")
    return -loss.view(len(ids), count)


# TRL


class Clock(TrainerCallback):
    """Seconds of each training step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def on_trl(case: argparse.Namespace, model: Any, tokenizer: Any) -> Parts:
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    steps = case.repeats + 1
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        use_cpu=True,
        shuffle_dataset=False,
        per_device_train_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.prompts * case.n // case.micro_batch,
        num_generations=case.n,
        max_completion_length=case.response_length,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        generation_kwargs={"min_new_tokens": case.response_length},
        beta=0.0,
        num_iterations=1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=CLIP_NORM,
        bf16=case.dtype == "bfloat16",  # which it would be always, and so would checkpointing
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    generation: list[float] = []
    rollout: list[float] = []
    batches: list[dict[str, Any]] = []
    model.generate = clocked(model.generate, generation)
    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        callbacks=[clock],
        reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        train_dataset=Dataset.from_list(records(case.prompts, case.prompt_length) * steps),
    )
    trainer._generate_and_score_completions = clocked(trainer._generate_and_score_completions, rollout, batches)
    trainer.train()
    ids, mask = (torch.cat([batches[-1][f"{x}_{y}"] for x in ("prompt", "completion")], 1) for y in ("ids", "mask"))
    assert ids.shape == (case.prompts * case.n, case.prompt_length + case.response_length), ids.shape
    assert len(generation) == len(rollout) == len(clock.seconds) == steps

    @torch.no_grad()
    def score() -> None:
        trainer._get_per_token_logps_and_entropies(model, ids, mask, case.response_length, batch_size=case.micro_batch)

    updates = [whole - sampling for whole, sampling in zip(clock.seconds, rollout, strict=True)]
    yield "generation", generation[1:]
    yield "scoring", repeated(score, case.repeats)
    yield "update", updates[1:]
    yield "iteration", [a + b for a, b in zip(generation, updates, strict=True)][1:]


def clocked(fn: Callable[..., Any], seconds: list[float], results: list[Any] | None = None) -> Callable[..., Any]:
    """fn, which also leaves the seconds of each call, and its result."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        out = fn(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        if results is not None:
            results.append(out)
        return out

    return call


PEERS: dict[str, Callable[..., Parts]] = {"transformers": on_transformers, "trl": on_trl}

if __name__ == "__main__":
    main()

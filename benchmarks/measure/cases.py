"""From a case to what the trainer would have: config, program and parameters of a model."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.measure import lengths
from benchmarks.measure.presets import PRESETS, SIZES
from benchmarks.measure.prompts import DIGITS
from configs import base
from jaxrl_llm import load_config
from jaxrl_llm.config import Config
from jaxrl_llm.config_values import hint_of, parse
from jaxrl_llm.costs import Job as Costs
from jaxrl_llm.errors import UserError
from jaxrl_llm.loading import build_program, load_inputs, policy_params
from jaxrl_llm.models import hf
from jaxrl_llm.sharding import Layout
from jaxrl_llm.steps.phases import Program
from jaxrl_llm.steps.reward import write_scores
from jaxrl_llm.types import FINISH_LENGTH, FINISH_STOP, Array, Batch, Params, Prompts

Case = argparse.Namespace


@contextlib.contextmanager
def model_folder(options: argparse.Namespace) -> Iterator[Path]:
    """The folder of --model, or one with the config and a tokenizer of the preset, without weights."""
    sizes = {key: getattr(options, name) for name, key in SIZES.items() if getattr(options, name)}
    if options.model:
        if sizes:
            raise UserError(f"--model {options.model}: a folder's sizes cannot be changed, found {sorted(sizes)}")
        yield options.model
        return
    described = {**PRESETS[options.preset], **sizes}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (folder / hf.CONFIG).write_text(json.dumps(described))
        _tokenizer(described["vocab_size"]).save_pretrained(path)
        yield folder


def _tokenizer(size: int) -> Any:
    """Digits, one token each, an end token, and words that make up the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<end>", *DIGITS, *(f"<{i}>" for i in range(size))][:size]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    ends = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<end>")
    return PreTrainedTokenizerFast(tokenizer_object=made, **ends)


def config_of(case: Case, folder: Path, **overrides: Any) -> Config:
    """The config of a run with the case's shapes; `overrides` are dotted keys with _ _ for the dot.

    Raises:
      UserError: listing everything that is wrong.
    """
    settings = {
        "model.path": str(folder),
        "model.fresh": case.model is None,
        "model.dtype": case.dtype,
        "model.scan_layers": case.layers == "scan",
        "model.remat": case.remat,
        "model.use_remove_padding": case.packed == "yes",
        "model.logprob_chunk": case.logprob_chunk,
        "rollout.n": case.n,
        "rollout.prompt_length": case.prompt_length,
        "rollout.response_length": case.response_length,
        "rollout.ignore_eos": True,
        "data.train": (f"benchmarks.measure.prompts:records(count={case.prompts}, length={case.prompt_length})",),
        "data.chat_template": False,
        "data.train_batch_size": case.prompts,
        "reward.functions": ("benchmarks.measure.cases:even_length",),
        # Of a single response no group estimator can be asked.
        "algorithm.estimator": "grpo" if case.n > 1 else "reinforce_plus_plus",
        "actor.micro_batch_size": case.micro_batch,
        "trainer.score_micro_batch_size": case.micro_batch,
        "seed": case.seed,
    }
    settings |= {name.replace("__", "."): value for name, value in overrides.items()}
    if kept := lengths.stops(case.lengths):
        size = hf.read_shape(folder).vocab_size
        settings["rollout.stop_token_ids"] = tuple(range(1, 1 + round(size / kept)))
    texts = [change.partition("=") for change in case.changes]
    settings |= {key: parse(text, hint_of(Config, key)) for key, _, text in texts}
    return load_config(base.__file__, settings)


def even_length(prompt: str, response: str, record: Any) -> float:
    """A reward that costs nothing and differs between responses."""
    return float(len(response) % 2 == 0)


@dataclasses.dataclass(frozen=True)
class Job:
    """What a run would have before its first step, on one device."""

    case: Case
    config: Config
    program: Program
    params: Params
    costs: Costs


def open_job(case: Case, folder: Path, **overrides: Any) -> Job:
    """Model, program and parameters; `overrides` as `config_of`."""
    config, layout = config_of(case, folder, **overrides), Layout.single()
    inputs = load_inputs(config, train=False)
    program = build_program(config, inputs, layout, config.trainer.steps)
    params, _ = policy_params(config, program.actor_model, layout, inputs.folder)
    return Job(case, config, program, params, costs_of(config, folder))


def costs_of(config: Config, folder: Path) -> Costs:
    """What `work.model_flops` counts by."""
    return Costs.of(config, hf.read_shape(folder))


def random_tokens(job: Job, *shape: int) -> np.ndarray:
    """int32 of that shape, none of which is token 0."""
    rng = np.random.default_rng([job.case.seed, *shape])
    return rng.integers(1, job.program.actor_model.vocab_size, shape).astype(np.int32)


def random_prompts(job: Job, max_new_tokens: np.ndarray | None = None) -> Prompts:
    """Prompts [G, P] of random tokens, without padding, on the device."""
    count, width = job.case.prompts, job.case.prompt_length
    arrays = {
        "prompts": random_tokens(job, count, width),
        "prompt_mask": np.ones((count, width), bool),
        "uid": np.arange(count, dtype=np.int32),
        "prompt_valid": np.ones(count, bool),
        "max_new_tokens": max_new_tokens,
    }
    return Prompts(**job.program.layout.put_rows(arrays))


def random_batch(job: Job, response_lengths: np.ndarray) -> Batch:
    """What the rollout of `random_prompts` might have left: random tokens, `response_lengths` int32 [B] of them."""
    prompts, width = random_prompts(job), job.case.response_length
    rows = len(response_lengths)
    mask = np.arange(width)[None, :] < response_lengths[:, None]
    evidence = {
        "uid": np.repeat(np.arange(job.case.prompts, dtype=np.int32), job.case.n),
        "responses": np.where(mask, random_tokens(job, rows, width), 0).astype(np.int32),
        "response_mask": mask,
        "response_length": response_lengths.astype(np.int32),
        "rollout_log_probs": np.where(mask, np.float32(-np.log(job.program.actor_model.vocab_size)), np.float32(0)),
        "finish_reason": np.where(response_lengths < width, FINISH_STOP, FINISH_LENGTH).astype(np.int32),
    }
    return Batch(
        prompts=prompts.prompts,
        prompt_mask=prompts.prompt_mask,
        prompt_valid=prompts.prompt_valid,
        record_arrays={},
        **job.program.layout.put_rows(evidence),
    )


def scored_batch(job: Job, response_lengths: np.ndarray) -> Batch:
    """The same with the evidence of every phase before the update: half of the responses to a prompt are right, and
    old policy and reference are the policy that sampled."""
    batch, program = random_batch(job, response_lengths), job.program

    def evidence(batch: Batch, scores: Array, kl_coef: Array) -> Batch:
        sampled = batch.rollout_log_probs
        batch = write_scores(batch, scores, scores[:, 0] >= 0, weights=(1.0,))
        if program.old_log_prob:
            batch = batch.write("old_log_prob", old_log_probs=sampled)
        if program.ref:
            batch = batch.write("ref", ref_log_prob=sampled)
        return program.adv(batch, kl_coef)[0]

    scores = (np.arange(batch.num_rows) % 2).astype(np.float32)[:, None]
    return jax.jit(evidence)(batch, scores, np.float32(0))

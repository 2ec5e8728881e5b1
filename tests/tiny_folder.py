"""A Hugging Face folder small enough to train in a test, with prompts and rewards for it.

The model is a random Llama with one token a character; its pad is its EOS. Functions here are named in configs by
`tests.tiny_folder:NAME`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import string
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import ConfigDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from configs import base
from jaxrl_llm.config import Config, from_config_dict
from jaxrl_llm.models import classifier, hf
from jaxrl_llm.models.families import transformer_config
from jaxrl_llm.models.transformer import init_params, make_transformer
from jaxrl_llm.rewards import batched, jax_reward
from tests.tokenizers_for_tests import CHATML, SPECIAL

EOS = SPECIAL.index("<|im_end|>")
CHARACTERS = "0123456789+-=? \nW" + string.ascii_lowercase
VOCABULARY = {c: i for i, c in enumerate([*SPECIAL, "<unk>", *CHARACTERS])}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 48,  # the last row of the embedding is padding
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "dtype": "float32",
}
LONGEST = 31  # tokens of the longest prompt of `records`
WIDTH = 8  # of a response
# Configs that share this share most of their programs, and a session compiles a program once.
KL_LOSS: dict[str, Any] = {"actor__use_kl_loss": True, "actor__kl_loss_coef": 0.05}


@functools.cache
def session_folder() -> Path:
    """A folder that is there until the process ends."""
    path = Path(tempfile.mkdtemp(prefix="tiny"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@contextlib.contextmanager
def compile_once() -> Iterator[None]:
    """Compiles with little optimization, in half the time, and reads back what was compiled before in this session."""
    settings = {
        "jax_disable_most_optimizations": True,
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(session_folder() / "programs"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; ChatML, no BOS, its end token pads."""
    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    end = SPECIAL[EOS]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, additional_special_tokens=list(SPECIAL), eos_token=end, pad_token=end, unk_token="<unk>"
    )
    wrapped.chat_template = CHATML
    return wrapped


@functools.cache
def folder(poisoned: bool = False) -> Path:
    """The model's folder. Its weights are so large that some tokens, EOS among them, are much likelier than others.

    Args:
      poisoned: the last norm is NaN, so that nothing can be computed.
    """
    model = make_transformer(transformer_config(LLAMA))
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(0))
    params = jax.tree.map(lambda x: 4 * x if x.ndim > 2 else x, params)
    params["embed"] = (10 * params["embed"]).at[EOS].multiply(2)
    if poisoned:
        params["final_norm"] = jnp.nan * params["final_norm"]
    path = session_folder() / ("poisoned" if poisoned else "model")
    hf.save_params(path, params, LLAMA, generation={"eos_token_id": [EOS]})
    tokenizer().save_pretrained(str(path))
    return path


@functools.cache
def reward_folder() -> Path:
    """A random reward model of the same shape and tokenizer. Its padding is not its end token."""
    shape = classifier.classifier_config({**LLAMA, "pad_token_id": VOCABULARY["<unk>"]})
    model = make_transformer(transformer_config(shape), score_head=True)
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(3))
    params = jax.tree.map(lambda x: 6 * x if x.ndim > 2 else x, params)
    params |= {name: 20 * params[name] for name in ("embed", "score")}
    path = session_folder() / "reward_model"
    hf.save_params(path, params, shape, generation={"eos_token_id": [EOS]})
    tokenizer().save_pretrained(str(path))
    return path


def raw_config(**overrides: Any) -> ConfigDict:
    """4 prompts × 4 responses a step, 4 steps; `overrides` are dotted keys with _ _ for the dot: rollout__n=2."""
    raw = base.get_config()
    raw.model.path = str(folder())
    raw.data.update(train="tests.tiny_folder:records", eval="tests.tiny_folder:records(count=6)", train_batch_size=4)
    raw.rollout.update(n=4, prompt_length=LONGEST, response_length=WIDTH)
    raw.rollout.cascade.halvings = 0  # one loop over tokens: half the time to compile
    raw.trainer.device_tflops = 1.0  # or each run would measure it
    raw.reward.functions = ("tests.tiny_folder:digits",)
    raw.reward.num_workers = 0  # a worker would start for each of many runs; test_reward_pool.py has some
    raw.optimizer.lr = raw.critic.optimizer.lr = 1e-2
    raw.trainer.update(steps=4, save_interval=2, rollout_dump=True, sample_interval=2)
    raw.eval.update(interval=2, batch_size=4)  # the last batch has two fillers
    raw.logging.update(name="tiny", progress="none")
    for name, value in overrides.items():
        *sections, key = name.split("__")
        at = raw
        for section in sections:
            at = at[section]
        at[key] = value
    return raw


def config(**overrides: Any) -> Config:
    return from_config_dict(raw_config(**overrides))


def records(count: int = 12, skip: int = 0) -> list[dict[str, str]]:
    """Sums, asked in two ways: at LONGEST tokens and at seven less."""
    found = []
    for i in range(skip, skip + count):
        a, b = divmod(7 * i, 10)
        prompt, source = (f"What is {a}+{b}?", "words") if i % 3 == 0 else (f"{a}+{b}=?", "signs")
        found.append({"prompt": prompt, "answer": str(a + b), "data_source": source})
    return found


def pairs(count: int = 12) -> list[dict[str, str]]:
    """The sums of `records`, each with a right and a wrong answer of two or more characters."""
    found = []
    for record in records(count):
        answer = record["answer"]
        found.append({**record, "chosen": f"is {answer}", "rejected": f"it {int(answer) + 3}"})
    return found


# Rewards


def digits(prompt: str, response: str, record: Any) -> dict[str, float]:
    """The share of a response's characters that are digits; tells how many are letters."""
    share = sum(c.isdigit() for c in response) / max(len(response), 1)
    return {"score": share, "letters": sum(c.isalpha() for c in response)}


def brief(prompt: str, response: str, record: Any) -> float:
    return 1 - len(response) / WIDTH


def starts_with_a_digit(prompt: str, response: str, record: Any) -> float:
    return float(response[:1].isdigit())


def constant(prompt: str, response: str, record: Any) -> float:
    return 0.5


def picky(prompt: str, response: str, record: Any) -> float | None:
    """Fails in each of the three ways, by the response's first character."""
    match response[:1]:
        case c if "a" <= c < "g":
            return None
        case c if "g" <= c < "m":
            raise ValueError("not this letter")
        case c if "m" <= c < "s":
            return float("nan")
    return digits(prompt, response, record)["score"]


def broken(prompt: str, response: str, record: Any) -> float:
    raise RuntimeError("the scorer is down")


@batched
def sleeping(prompts: list[str], responses: list[str], records: list[Any], seconds: float = 0.0) -> list[float]:
    time.sleep(seconds)
    return [digits("", response, {})["score"] for response in responses]


@jax_reward(answer=lambda record: int(record["answer"]))
def near_answer(responses: jax.Array, mask: jax.Array, record_arrays: Any) -> jax.Array:
    """[B]: the nearer the response's length is to the answer, the better."""
    return -0.1 * jnp.abs(mask.sum(1) - record_arrays["answer"])


@jax_reward(answer=lambda record: int(record["answer"]))
def even_tokens(responses: jax.Array, mask: jax.Array, record_arrays: Any) -> jax.Array:
    """[B, R]: the answer on each even token; outside the mask what must not count."""
    return jnp.where(mask, jnp.where(responses % 2 == 0, record_arrays["answer"][:, None], 0), jnp.nan)


# Environments


def counting(messages: Any, record: Any) -> dict[str, str] | None:
    """Tells how many characters the turn had, twice at most; nothing after a turn without any."""
    turns = [message["content"] for message in messages if message["role"] == "assistant"]
    if len(turns) > 2 or not turns[-1]:
        return None
    return {"role": "tool", "content": f"{len(turns[-1])}={record['answer']}"}


def moody(messages: Any, record: Any) -> str:
    """Fails where the turn has a letter of the second half of the alphabet, and hangs where it says so."""
    while messages[-1]["content"] == "sleep":
        time.sleep(0.1)
    if any(c > "m" for c in messages[-1]["content"]):
        raise RuntimeError("not this letter")
    return "go on"


def numbers(messages: Any, record: Any) -> int:
    return 7

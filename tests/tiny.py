"""A model, a config and prompts small enough for any test, and a reward that is a JAX function."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs import base
from jaxrl_llm.config import Config, from_config_dict
from jaxrl_llm.models.transformer import TransformerConfig, init_params, make_transformer
from jaxrl_llm.types import Array, Model, Params, Prompts

VOCAB = 64
SHAPE = TransformerConfig(
    vocab_size=VOCAB,
    real_vocab_size=VOCAB,
    num_layers=2,
    width=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_width=64,
    max_positions=128,
    tie_embeddings=True,
)


def model(**kwargs: Any) -> Model:
    return make_transformer(SHAPE, **kwargs)


@functools.cache
def params(seed: int = 0, **kwargs: Any) -> Params:
    """Parameters of a size at which the model is not nearly uniform."""

    @jax.jit
    def fresh(key: Array) -> Params:
        return jax.tree.map(lambda x: 6 * x if x.ndim > 2 else x, init_params(model(**kwargs), key))

    with jax.ensure_compile_time_eval():  # kept for others, so it must not be of a program that is being traced
        return fresh(jax.random.key(seed))


def config(**overrides: Any) -> Config:
    """A valid config of 4 prompts x 4 responses; `overrides` are dotted keys with _ _ for the dot, such as
    rollout__n=2."""
    raw = base.get_config()
    raw.model.path = "tiny"
    raw.data.train = ("none",)
    raw.reward.functions = ("number",)
    raw.data.train_batch_size = 4
    raw.rollout.update(n=4, prompt_length=6, response_length=8)
    raw.rollout.cascade.halvings = 0  # one loop over tokens: half the time to compile
    raw.trainer.device_tflops = 1.0  # or each run would measure it
    raw.trainer.steps = 3
    raw.optimizer.lr = 1e-2
    raw.model.logprob_chunk = 64
    for name, value in overrides.items():
        *sections, key = name.split("__")
        at = raw
        for section in sections:
            at = at[section]
        at[key] = value
    return from_config_dict(raw)


def prompts(count: int = 4, width: int = 6, seed: int = 0, first_uid: int = 100) -> Prompts:
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, VOCAB, size=(count, width)).astype(np.int32)
    lengths = rng.integers(2, width + 1, size=count)
    lengths[0] = width
    mask = np.arange(width)[None, :] >= width - lengths[:, None]
    return Prompts(
        prompts=jnp.asarray(np.where(mask, ids, 0)),
        prompt_mask=jnp.asarray(mask),
        uid=jnp.arange(first_uid, first_uid + count, dtype=jnp.int32),
        prompt_valid=jnp.ones(count, bool),
    )


def even_tokens(responses: Array, mask: Array, records: Any) -> Array:
    """A reward: the share of a response's tokens that are even."""
    del records
    return jnp.where(mask, responses % 2 == 0, False).sum(1) / jnp.maximum(mask.sum(1), 1)


def assert_close(found: Any, expected: Any) -> None:
    """Every leaf within 1e-4, absolute or relative."""
    leaves = jax.tree.flatten_with_path(expected)[0]
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, b), a in zip(leaves, jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=jax.tree_util.keystr(path))

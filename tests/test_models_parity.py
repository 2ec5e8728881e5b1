"""Our transformer computes what torch transformers computes (fixtures/make_model_fixtures.py made the numbers)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import jit

from jaxrl_llm.models.families import transformer_config
from jaxrl_llm.models.hf import load_params, read_config
from jaxrl_llm.models.transformer import RopeConfig, make_transformer, unstack_layers
from jaxrl_llm.types import Array, Model, Params

FIXTURES = Path(__file__).parent / "fixtures" / "models"
CASES = sorted(path.name for path in FIXTURES.iterdir())
UNSTACKED = ["bias", "gemma2", "gemma3", "qwen2", "qwen3_moe", "smollm3"]  # those whose layers differ, and one other
CACHED = ["gemma2", "gemma3", "head_dim", "mistral_window", "olmo2", "phi3", "qwen2", "qwen3_moe", "smollm3", "yarn"]
TOLERANCE = 1e-5  # of the largest entry, in float32


@dataclasses.dataclass(frozen=True)
class Case:
    model: Model
    params: Params
    expected: dict[str, np.ndarray]
    apply: Callable[..., tuple[Array, Any]]  # (params, tokens, positions, mask, cache) -> logits and cache
    run: Callable[..., tuple[Array, Any]]  # the same, compiled

    def logits(self, params: Params, tokens: Any, mask: Any) -> Array:
        return self.apply(params, tokens, positions_of(mask), mask, None)[0]

    def run_logits(self, tokens: Any, mask: Any) -> np.ndarray:
        return np.asarray(self.run(self.params, tokens, positions_of(mask), mask, None)[0])


@functools.cache
def load(name: str) -> Case:
    folder = FIXTURES / name
    model = make_transformer(transformer_config(read_config(folder)))
    params = jax.tree.map(jnp.asarray, load_params(folder, model.declare()))

    def apply(params: Params, tokens: Any, positions: Any, mask: Any, cache: Any) -> tuple[Array, Any]:
        where = (jnp.asarray(x, jnp.int32) for x in (tokens, positions, mask))
        hidden, cache = model.forward(params, *where, cache=cache)
        return model.heads["logits"](params, hidden), cache

    with np.load(folder / "expected.npz") as expected:
        return Case(model, params, dict(expected), apply, jit(apply))


def positions_of(mask: Any) -> np.ndarray:
    return np.maximum(np.cumsum(mask, 1, dtype=np.int32) - 1, 0)


def assert_close(found: Any, expected: Any, what: str = "") -> None:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error <= TOLERANCE, f"{what}: relative error {error:.2e}"


@functools.cache
def outcome(name: str, stacked: bool) -> tuple[Any, Any, Params]:
    """Logits, loss and its gradients on the fixture's tokens."""
    case = load(name)
    tokens, mask = case.expected["tokens"], case.expected["mask"]
    pairs = mask[:, 1:] & mask[:, :-1]

    def loss_of(params: Params) -> tuple[Array, Array]:
        logits = case.logits(params if stacked else unstack_layers(params), tokens, mask)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], 2)[..., 0]
        return -jnp.where(pairs, chosen, 0).sum() / pairs.sum(), logits

    (loss, logits), gradients = jit(jax.value_and_grad(loss_of, has_aux=True))(case.params)
    return logits, loss, jax.tree.map(np.asarray, gradients)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_torch(name: str) -> None:
    expected = load(name).expected
    mask = expected["mask"]
    assert mask[0].all() and not mask[1:, 0].any(), "one row without padding, the others with"
    found = outcome(name, True)[0]
    assert found.dtype == jnp.float32
    assert_close(np.asarray(found) * mask[..., None], expected["logits"])


def test_a_row_alone_equals_the_row_among_padded_ones() -> None:
    case = load("llama3")
    tokens, mask = case.expected["tokens"], case.expected["mask"]
    for row in (0, 2):
        length = mask[row].sum()
        alone = case.run_logits(tokens[row : row + 1, -length:], mask[row : row + 1, -length:])
        assert_close(alone[0], case.expected["logits"][row, -length:], f"row {row}")


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_torch(name: str) -> None:
    expected, (_, loss, gradients) = load(name).expected, outcome(name, True)
    assert_close(loss, expected["loss"], "loss")
    tensors = [key.removeprefix("grad/") for key in expected if key.startswith("grad/")]
    assert len(tensors) >= 6
    for tensor in tensors:
        assert_close(by_torch_name(gradients, tensor), expected[f"grad/{tensor}"], tensor)


@pytest.mark.parametrize("name", ["gemma2", "untied"])
def test_rows_of_the_embedding_that_the_tokenizer_does_not_know_have_no_probability(name: str) -> None:
    case = load(name)
    config = dataclasses.replace(transformer_config(read_config(FIXTURES / name)), real_vocab_size=90)
    hidden = jax.random.normal(jax.random.key(0), (2, 3, 32))
    known, padded = (make.heads["logits"](case.params, hidden) for make in (case.model, make_transformer(config)))
    np.testing.assert_array_equal(padded[..., :90], known[..., :90])
    assert (padded[..., 90:] == -jnp.inf).all()
    gradient = jax.grad(lambda p: make_transformer(config).heads["logits"](p, hidden)[..., 5].sum())(case.params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("name", UNSTACKED)
def test_unrolled_layers_give_what_scanned_ones_give(name: str) -> None:
    (logits, _, gradients), (found, _, by_layer) = outcome(name, True), outcome(name, False)
    mask = load(name).expected["mask"][..., None]
    assert_close(found * mask, logits * mask, "logits")
    jax.tree.map(assert_close, by_layer, gradients)


def by_torch_name(params: Params, name: str) -> np.ndarray:
    """Spelled out, not read from the family's table, so that a wrong table is seen."""
    parts = name.split(".")
    if parts[1] != "layers":
        top = {"model.embed_tokens.weight": "embed", "model.norm.weight": "final_norm", "lm_head.weight": "lm_head"}
        return params[top[name]].T if name == "lm_head.weight" else params[top[name]]
    layer, leaves = int(parts[2]), params["layers"]
    match parts[3:]:
        case [*_, module, "weight"] if "norm" in module:
            after = "mlp_post_norm" in leaves
            names = {
                "input_layernorm": "attn_norm",
                "post_attention_layernorm": "attn_post_norm" if after else "mlp_norm",
                "pre_feedforward_layernorm": "mlp_norm",
                "post_feedforward_layernorm": "mlp_post_norm",
            }
            return leaves[names.get(module, module)][layer]
        case ["mlp", "gate", "weight"]:
            return leaves["router"]["kernel"][layer].T
        case ["mlp", "experts", "gate_up_proj"]:
            experts = leaves["experts"]
            return np.concatenate([experts["gate"][layer], experts["up"][layer]], -1).swapaxes(1, 2)
        case ["mlp", "experts", "down_proj"]:
            return leaves["experts"]["down"][layer].swapaxes(1, 2)
        case [_, "qkv_proj" | "gate_up_proj" as module, "weight"]:
            fused = "qkv" if module == "qkv_proj" else ("gate", "up")
            return np.concatenate([leaves[part]["kernel"][layer] for part in fused], 1).T
        case [_, module, kind]:
            leaf = leaves[module.removesuffix("_proj")]
            return leaf["kernel"][layer].T if kind == "weight" else leaf["bias"][layer]
    raise ValueError(name)


@pytest.mark.parametrize("name", CACHED)
def test_prefill_and_decode_equal_the_full_forward(name: str) -> None:
    """The prompt once, then token by token in the rows that share it, gives the logits of the whole sequence."""
    case = load(name)
    model, params = case.model, case.params
    n, prompt_width, steps = 2, 12, 8
    # Rows of 12 prompt tokens, left-padded; every second row continues with tokens of its own.
    tokens = case.expected["tokens"]
    prompts = tokens[:, :prompt_width]
    lengths = np.array([12, 5, 1, 9], np.int32)
    prompt_mask = np.arange(prompt_width)[None, :] >= prompt_width - lengths[:, None]
    responses = np.stack([tokens[:, prompt_width:], 1 + tokens[:, prompt_width:] // 2], 1).reshape(-1, steps)

    rows_tokens = np.concatenate([np.repeat(prompts, n, 0), responses], 1)
    rows_mask = np.concatenate([np.repeat(prompt_mask, n, 0), np.ones_like(responses, bool)], 1)
    full = case.run_logits(rows_tokens, rows_mask)

    cache = model.init_cache(prompts.shape[0], prompt_width)
    found, cache = case.run(params, prompts, positions_of(prompt_mask), prompt_mask, cache)
    np.testing.assert_array_equal(cache.length, lengths)
    assert_close(found[:, -1], full[::n, prompt_width - 1], "prefill")

    cache = cache.fork(n, steps)
    position = np.repeat(lengths, n)[:, None]
    for t in range(steps):
        found, cache = case.run(params, responses[:, t : t + 1], position + t, np.ones_like(position, bool), cache)
        assert_close(found[:, 0], full[:, prompt_width + t], f"token {t}")


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mistral_window"])
def test_a_prompt_and_its_responses_in_one_line_equal_rows_of_their_own(name: str) -> None:
    """blocks = (P, n): logits and gradients of the responses, prompts left-padded and responses of several lengths."""
    case = load(name)
    model, (width, n, steps) = case.model, (12, 2, 8)
    tokens = case.expected["tokens"][:3]
    lines = tokens.shape[0]
    prompt_mask = np.arange(width)[None, :] >= width - np.array([12, 5, 1])[:, None]
    responses = np.stack([tokens[:, width:], 1 + tokens[:, width:] // 2], 1).reshape(lines * n, steps)
    own = np.arange(steps)[None, :] < np.array([8, 3, 8, 8, 1, 6])[:, None]
    wanted = jax.random.normal(jax.random.key(0), (lines * n, steps, 97))

    def in_rows(params: Params) -> Array:
        mask = np.concatenate([np.repeat(prompt_mask, n, 0), own], 1)
        rows = np.concatenate([np.repeat(tokens[:, :width], n, 0), responses], 1)
        return case.logits(params, rows, mask)[:, width:]

    def in_lines(params: Params) -> Array:
        mask = np.concatenate([prompt_mask, own.reshape(lines, -1)], 1).astype(np.int32)
        start = np.repeat(prompt_mask.sum(1), n)[:, None]
        positions = (start + positions_of(own)).reshape(lines, -1)
        positions = np.concatenate([positions_of(prompt_mask), positions], 1)
        line = np.concatenate([tokens[:, :width], responses.reshape(lines, -1)], 1)
        hidden, _ = model.forward(params, *map(jnp.asarray, (line, positions, mask)), blocks=(width, n))
        return model.heads["logits"](params, hidden[:, width:].reshape(lines * n, steps, -1))

    def graded(logits: Callable[[Params], Array]) -> Any:
        def total(params: Params) -> tuple[Array, Array]:
            found = jnp.where(own[..., None], logits(params), 0)
            return (found * wanted).sum(), found

        return jit(jax.grad(total, has_aux=True))(case.params)

    (expected_gradient, expected), (gradient, found) = graded(in_rows), graded(in_lines)
    assert_close(found, expected, "logits")
    jax.tree.map(lambda g, e: assert_close(g, e, "gradient"), gradient, expected_gradient)


def test_the_cases_differ_in_what_they_are_named_for() -> None:
    configs = {case: transformer_config(read_config(FIXTURES / case)) for case in CASES}
    assert configs["tied"].tie_embeddings and not configs["untied"].tie_embeddings
    assert configs["head_dim"].head_dim * configs["head_dim"].num_heads != configs["head_dim"].width
    assert configs["linear"].rope.kind == "linear" and configs["llama3"].rope.kind == "llama3"
    assert configs["bias"].qkv_bias and configs["bias"].output_bias and configs["bias"].mlp_bias
    assert configs["qwen2"].qkv_bias and not configs["qwen2"].output_bias
    assert configs["qwen2"].windows == (0, 5) and configs["mistral_window"].windows == (6, 6)
    assert configs["smollm3"].layer_ropes == (configs["smollm3"].rope, None)
    assert configs["gemma2"].windows == configs["gemma3"].windows == (5, 0)
    assert configs["gemma2"].attention_softcap == 1 and configs["gemma2"].logit_softcap == 2
    assert configs["gemma3"].layer_ropes == (RopeConfig(100.0), RopeConfig(1000.0, "linear", 2.0))
    assert configs["phi3"].windows == (7, 7) and configs["phi3"].rope.fraction == 0.5
    assert configs["longrope"].rope.attention_factor > 1.05 and configs["longrope"].max_positions == 32
    assert configs["yarn"].rope.kind == "yarn" and configs["yarn"].rope.attention_factor > 1.1
    assert configs["qwen3"].qk_norm == "head" and not configs["qwen3"].windows
    assert (FIXTURES / "untied" / "model.safetensors.index.json").is_file()

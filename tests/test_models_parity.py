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

from jaxrl_llm.models.families import transformer_config
from jaxrl_llm.models.hf import load_params, read_config
from jaxrl_llm.models.transformer import make_transformer, unstack_layers
from jaxrl_llm.types import Array, Model, Params

FIXTURES = Path(__file__).parent / "fixtures" / "models"
CASES = sorted(path.name for path in FIXTURES.iterdir())
UNSTACKED = ["bias", "qwen2", "smollm3"]  # with layers in a tuple, too: those whose layers differ, and one other
TOLERANCE = 1e-5  # of the largest entry, in float32


@dataclasses.dataclass(frozen=True)
class Case:
    model: Model
    params: Params
    expected: dict[str, np.ndarray]
    forward: Callable[..., Any]  # the model's, compiled

    def logits(self, params: Params, tokens: Any, mask: Any) -> Array:
        hidden, _ = self.forward(params, jnp.asarray(tokens), positions_of(mask), jnp.asarray(mask, jnp.int32))
        return self.model.heads["logits"](params, hidden)


@functools.cache
def load(name: str) -> Case:
    folder = FIXTURES / name
    model = make_transformer(transformer_config(read_config(folder)))
    params = jax.tree.map(jnp.asarray, load_params(folder, model.declare()))
    with np.load(folder / "expected.npz") as expected:
        return Case(model, params, dict(expected), jax.jit(model.forward))


def positions_of(mask: Array | np.ndarray) -> Array:
    return jnp.maximum(jnp.cumsum(jnp.asarray(mask, jnp.int32), 1) - 1, 0)


def assert_close(found: Any, expected: Any, what: str = "") -> None:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error <= TOLERANCE, f"{what}: relative error {error:.2e}"


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_torch(name: str) -> None:
    case = load(name)
    mask = case.expected["mask"]
    assert mask[0].all() and not mask[1:, 0].any(), "one row without padding, the others with"
    found = case.logits(case.params, case.expected["tokens"], mask)
    assert found.dtype == jnp.float32
    assert_close(found * mask[..., None], case.expected["logits"])


def test_a_row_alone_equals_the_row_among_padded_ones() -> None:
    case = load("llama3")
    tokens, mask = case.expected["tokens"], case.expected["mask"]
    for row, length in enumerate(mask.sum(1)):
        alone = case.logits(case.params, tokens[row : row + 1, -length:], mask[row : row + 1, -length:])
        assert_close(alone[0], case.expected["logits"][row, -length:], f"row {row}")


@pytest.mark.parametrize(
    ("name", "stacked"), [*((name, True) for name in CASES), *((name, False) for name in UNSTACKED)]
)
def test_gradients_equal_torch(name: str, stacked: bool) -> None:
    case = load(name)
    expected = case.expected
    tokens, mask = expected["tokens"], expected["mask"]
    pairs = mask[:, 1:] & mask[:, :-1]

    def loss_of(params: Params) -> Array:
        layers = params if stacked else unstack_layers(params)
        log_probs = jax.nn.log_softmax(case.logits(layers, tokens, mask)[:, :-1])
        chosen = jnp.take_along_axis(log_probs, jnp.asarray(tokens)[:, 1:, None], 2)[..., 0]
        return -jnp.where(pairs, chosen, 0).sum() / pairs.sum()

    loss, gradients = jax.jit(jax.value_and_grad(loss_of))(case.params)
    assert_close(loss, expected["loss"], "loss")
    tensors = [key.removeprefix("grad/") for key in expected if key.startswith("grad/")]
    assert len(tensors) >= 6
    for tensor in tensors:
        assert_close(by_torch_name(gradients, tensor), expected[f"grad/{tensor}"], tensor)


def by_torch_name(params: Params, name: str) -> Array:
    """Spelled out, not read from the family's table, so that a wrong table is seen."""
    parts = name.split(".")
    if parts[1] != "layers":
        top = {"model.embed_tokens.weight": "embed", "model.norm.weight": "final_norm", "lm_head.weight": "lm_head"}
        return params[top[name]].T if name == "lm_head.weight" else params[top[name]]
    layer, module = int(parts[2]), parts[-2]
    if "norm" in module:
        return params["layers"][{"input_layernorm": "attn_norm"}.get(module, module)][layer]
    leaf = params["layers"][module.removesuffix("_proj")]
    return leaf["kernel"][layer].T if parts[-1] == "weight" else leaf["bias"][layer]


@pytest.mark.parametrize("name", ["head_dim", "mistral_window", "qwen2", "qwen3", "smollm3", "tied"])
def test_prefill_and_decode_equal_the_full_forward(name: str) -> None:
    """The prompt once, then token by token in the rows that share it, gives the logits of the whole sequence."""
    case = load(name)
    model, params = case.model, case.params
    n, prompt_width, steps = 2, 12, 8
    # Rows of 12 prompt tokens, left-padded; every second row continues with tokens of its own.
    tokens = jnp.asarray(case.expected["tokens"])
    prompts = tokens[:, :prompt_width]
    lengths = jnp.array([12, 5, 1, 9])
    prompt_mask = jnp.arange(prompt_width)[None, :] >= prompt_width - lengths[:, None]
    responses = jnp.stack([tokens[:, prompt_width:], 1 + tokens[:, prompt_width:] // 2], 1).reshape(-1, steps)

    rows_tokens = jnp.concatenate([jnp.repeat(prompts, n, 0), responses], 1)
    rows_mask = jnp.concatenate([jnp.repeat(prompt_mask, n, 0), jnp.ones_like(responses, bool)], 1)
    full = case.logits(params, rows_tokens, rows_mask)

    cache = model.init_cache(prompts.shape[0], prompt_width)
    mask = prompt_mask.astype(jnp.int32)
    hidden, cache = case.forward(params, prompts, positions_of(prompt_mask), mask, cache=cache)
    assert cache is not None
    np.testing.assert_array_equal(cache.length, lengths)
    assert_close(model.heads["logits"](params, hidden[:, -1]), full[::n, prompt_width - 1], "prefill")

    cache = cache.fork(n, steps)
    position = jnp.repeat(lengths, n)
    for t in range(steps):
        ones = jnp.ones_like(position)[:, None]
        hidden, cache = case.forward(params, responses[:, t : t + 1], position[:, None], ones, cache=cache)
        assert_close(model.heads["logits"](params, hidden[:, 0]), full[:, prompt_width + t], f"token {t}")
        position = position + 1


@pytest.mark.parametrize("name", ["mistral_window", "qwen2"])
def test_a_prompt_and_its_responses_in_one_line_equal_rows_of_their_own(name: str) -> None:
    """blocks = (P, n): logits and gradients of the responses, prompts left-padded and responses of several lengths."""
    case = load(name)
    model, (width, n, steps) = case.model, (12, 2, 8)
    tokens = jnp.asarray(case.expected["tokens"])[:3]
    lines = tokens.shape[0]
    prompt_mask = jnp.arange(width)[None, :] >= width - jnp.array([12, 5, 1])[:, None]
    responses = jnp.stack([tokens[:, width:], 1 + tokens[:, width:] // 2], 1).reshape(lines * n, steps)
    own = jnp.arange(steps)[None, :] < jnp.array([8, 3, 8, 8, 1, 6])[:, None]
    wanted = jax.random.normal(jax.random.key(0), (lines * n, steps, 97))

    def in_rows(params: Params) -> Array:
        mask = jnp.concatenate([jnp.repeat(prompt_mask, n, 0), own], 1)
        rows = jnp.concatenate([jnp.repeat(tokens[:, :width], n, 0), responses], 1)
        return case.logits(params, rows, mask)[:, width:]

    def in_lines(params: Params) -> Array:
        mask = jnp.concatenate([prompt_mask, own.reshape(lines, -1)], 1).astype(jnp.int32)
        start = jnp.repeat(prompt_mask.sum(1), n)[:, None]
        positions = (start + positions_of(own)).reshape(lines, -1)
        positions = jnp.concatenate([positions_of(prompt_mask), positions], 1)
        line = jnp.concatenate([tokens[:, :width], responses.reshape(lines, -1)], 1)
        hidden, _ = model.forward(params, line, positions, mask, blocks=(width, n))
        return model.heads["logits"](params, hidden[:, width:].reshape(lines * n, steps, -1))

    def graded(logits: Callable[[Params], Array]) -> Any:
        def total(params: Params) -> tuple[Array, Array]:
            found = jnp.where(own[..., None], logits(params), 0)
            return (found * wanted).sum(), found

        return jax.jit(jax.grad(total, has_aux=True))(case.params)

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
    assert configs["qwen3"].qk_norm == "head" and not configs["qwen3"].windows
    assert (FIXTURES / "untied" / "model.safetensors.index.json").is_file()

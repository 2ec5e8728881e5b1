"""flax.nnx modules as models: the page's example runs, and sampler and scorer say the same of any causal module."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.models.nnx import from_nnx, params_of
from jaxrl_llm.models.transformer import init_params
from jaxrl_llm.steps.rollout import append, no_stop_rules, rollout
from jaxrl_llm.steps.sampling import Sampling
from jaxrl_llm.steps.scoring import response_hidden, score_tokens, score_values
from jaxrl_llm.types import Batch, Model
from tests import tiny, tiny_folder

ROOT = Path(__file__).parents[1]
EXAMPLE = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "own_model.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module", autouse=True)
def _compile_once() -> Iterator[None]:
    with tiny_folder.compile_once():
        yield


class Recurrent(nnx.Module):
    """A GRU: neither attention nor a look at positions and mask. Its dropout would be noticed if it were on."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(tiny.VOCAB, 16, rngs=rngs)
        self.cell = nnx.GRUCell(16, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(16, tiny.VOCAB, rngs=rngs)
        self.worth = nnx.Linear(16, 1, rngs=rngs)

    def encode(self, tokens: Any) -> Any:
        x = self.dropout(4 * self.embed(tokens))
        graph, state = nnx.split(self.cell)

        def step(carry: Any, token: Any) -> Any:
            return nnx.merge(graph, state)(carry, token)

        return jax.lax.scan(step, jnp.zeros((len(tokens), 16)), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def recurrent(head: str = "logits") -> Model:
    heads = {"logits": lambda m, h: 3 * m.head(h), "value": lambda m, h: m.worth(h)[..., 0]}
    return from_nnx(
        Recurrent,
        vocab_size=tiny.VOCAB,
        forward=lambda module, tokens, positions, mask: module.encode(tokens),
        heads={head: heads[head]},
    )


def test_the_example_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = EXAMPLE
    monkeypatch.chdir(ROOT)
    given: dict[str, Any] = {"__name__": "own_model"}
    exec(compile(code, "docs/own_model.md", "exec"), given)
    assert int(given["state"].step) == 3 and given["scores"][-1] > given["scores"][0]
    assert given["metrics"]["training/rollout_probs_diff_max"] < 2e-6
    assert given["state"].actor.params["block"]["norm"]["scale"].shape == (16,)


@functools.cache
def fresh() -> Recurrent:
    module = Recurrent(nnx.Rngs(0))
    module.eval()
    return module


@jax.jit
def log_probs(params: Any, batch: Batch) -> Any:
    return score_tokens(recurrent(), params, batch, temperature=1.0, chunk_tokens=64, with_entropy=False).log_probs


@pytest.fixture(scope="module")
def sampled() -> Batch:
    """Two responses each to four prompts."""
    options: dict[str, Any] = {"sampling": Sampling(), "stops": no_stop_rules(tiny.VOCAB)}
    sample = jax.jit(functools.partial(rollout, recurrent(), n=2, width=8, **options))
    return sample(params_of(fresh()), tiny.prompts(), jax.random.key(0))


def test_sampler_and_scorer_say_the_same(sampled: Batch) -> None:
    assert sampled.rollout_log_probs is not None
    np.testing.assert_allclose(log_probs(params_of(fresh()), sampled), sampled.rollout_log_probs, atol=2e-6)
    assert np.ptp(np.asarray(sampled.rollout_log_probs)) > 1, "the policy is not nearly uniform"


def test_it_is_what_the_module_says_of_each_sequence_alone(sampled: Batch) -> None:
    """Row by row, without padding, prompts and caches."""
    encode = jax.jit(lambda tokens: fresh().encode(tokens)[0])

    @jax.jit
    def in_lines(params: Any) -> Any:
        return response_hidden(recurrent(), params, sampled), score_values(recurrent("value"), params, sampled)

    hidden, values = in_lines(params_of(fresh()))
    for row in (0, 3, 7):
        prompt = sampled.prompts[row // 2][sampled.prompt_mask[row // 2]]
        alone = encode(jnp.concatenate([prompt, sampled.responses[row]])[None])[len(prompt) - 1 : -1]
        np.testing.assert_allclose(hidden[row], alone, atol=1e-6)
        np.testing.assert_allclose(values[row], fresh().worth(alone)[:, 0], atol=1e-6)


def test_packed_lines_are_computed_as_rows_of_one_sequence_each(sampled: Batch) -> None:
    mask = jnp.arange(8)[None, :] < jnp.array([8, 3, 1, 0, 0, 0, 2, 7])[:, None]
    shorter = sampled.replace(response_mask=mask, response_length=mask.sum(1, dtype=jnp.int32))
    score = functools.partial(score_values, recurrent("value"), params_of(fresh()), shorter)
    expected, found = jax.jit(score)(), jax.jit(functools.partial(score, packed_width=11))()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert (expected != 0).sum() == 21


def test_what_stands_in_padding_changes_nothing(sampled: Batch) -> None:
    params, mask = params_of(fresh()), jnp.arange(8)[None, :] < jnp.array([8, 3, 1, 0, 5, 8, 2, 7])[:, None]
    shorter = sampled.replace(response_mask=mask, response_length=mask.sum(1, dtype=jnp.int32))
    prompts = jnp.where(sampled.prompt_mask, sampled.prompts, 9)
    other = shorter.replace(responses=jnp.where(mask, shorter.responses, 9), prompts=prompts)
    one, two, whole = (log_probs(params, batch) for batch in (shorter, other, sampled))
    np.testing.assert_array_equal(one, two)
    np.testing.assert_allclose(jnp.where(mask, whole, 0), one, atol=1e-6)


def test_tokens_put_in_at_once_or_one_by_one(sampled: Batch) -> None:
    """With gaps between them, after a fork and after a row that gets nothing."""
    model, params = recurrent(), params_of(fresh())
    tokens, real = sampled.responses[:, :4], jnp.array([[1, 0, 1, 1], [0, 0, 0, 0]] * 4, bool)
    put = jax.jit(functools.partial(append, model))
    _, cache = put(params, model.init_cache(4, 6), sampled.prompts, sampled.prompt_mask)
    cache = cache.fork(2, 5)
    at_once, filled = put(params, cache, tokens, real)
    for i in range(4):
        hidden, cache = put(params, cache, tokens[:, i : i + 1], real[:, i : i + 1])
    np.testing.assert_array_equal(filled.length, cache.length)
    np.testing.assert_allclose(hidden[::2], at_once[::2], atol=1e-6)
    assert np.abs(hidden[::2] - hidden[1::2]).max() > 1e-2


def test_fresh_parameters_are_those_of_the_module() -> None:
    model = recurrent()
    params = jax.jit(lambda key: init_params(model, key))(jax.random.key(1))
    made = params_of(fresh())
    assert jax.tree.structure(params) == jax.tree.structure(made)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(made), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a.std(), b.std(), rtol=0.3, atol=1e-6)


def test_what_is_refused() -> None:
    class Averaging(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.norm = nnx.BatchNorm(4, rngs=rngs)

    with pytest.raises(ValueError, match=r"state beside its parameters: \['norm'\]\['mean'\]"):
        from_nnx(Averaging, vocab_size=8)
    flat = from_nnx(Recurrent, vocab_size=8, forward=lambda module, tokens, positions, mask: tokens)
    params, ids = params_of(fresh()), jnp.ones((2, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"expected hidden \[2, 3, D\], found \(2, 3\)"):
        flat.forward(params, ids, ids, ids)
    both: Any = lambda module, tokens, positions, mask: (tokens, None)  # noqa: E731
    twice = from_nnx(Recurrent, vocab_size=8, forward=both)
    with pytest.raises(ValueError, match=r"expected hidden \[2, 3, D\], found tuple"):
        twice.forward(params, ids, ids, ids)
    for made, name, words in (
        (from_nnx(Recurrent, vocab_size=8, heads={"logits": lambda m, h: m.head(h)}), "logits", "2, 8), found (2, 64)"),
        (from_nnx(Recurrent, vocab_size=8, heads={"value": lambda m, h: m.worth(h)}), "value", "(2,), found (2, 1)"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"heads['{name}'] of hidden (2, 16): expected ")) as caught:
            made.heads[name](params, jnp.ones((2, 16)))
        assert words in str(caught.value)
    without = {name: x for name, x in params.items() if name != "worth"}
    wide = {**params, "embed": {"embedding": jnp.ones((tiny.VOCAB, 17))}}
    for given, words in (
        (without, "['worth']['bias']: the module has (1,), given is none (2 differ)"),
        (wide, "['embed']['embedding']: the module has (64, 16), given is (64, 17)"),
        ({**params, "more": jnp.ones(3)}, "['more']: the module has no such one, given is (3,)"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            recurrent().forward(given, ids, ids, ids)
    with pytest.raises(NotImplementedError, match="packed of several segments"):
        flat.forward(params, ids, ids, ids, prefix_ids=ids)

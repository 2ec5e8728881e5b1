"""Low-rank overlays: what they compute, what they train, and what is written of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.config import LoraModule
from jaxrl_llm.errors import UserError
from jaxrl_llm.export import export
from jaxrl_llm.models import hf, lora
from jaxrl_llm.models.declare import init_declared
from jaxrl_llm.models.peft import export_adapter
from jaxrl_llm.models.quantize import declare_quantized, quantize_kernels
from jaxrl_llm.models.transformer import make_transformer, unstack_layers
from jaxrl_llm.steps.phases import make_program
from jaxrl_llm.steps.step import make_step, step_key
from jaxrl_llm.trainer import fit
from jaxrl_llm.types import Param, Params
from tests import tiny, tiny_folder

RANK, ALPHA = 3, 12.0
SCALE = ALPHA / RANK
MODEL = make_transformer(dataclasses.replace(tiny.SHAPE, lora_scale=SCALE))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, tiny.VOCAB, (2, 6)), jnp.int32)
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@functools.cache
def overlay(zero: bool = False, targets: tuple[str, ...] = ("all-linear",)) -> Params:
    declared = lora.declare_overlay(MODEL.declare(), rank=RANK, target_modules=targets, dtype=jnp.float32)
    fresh = init_declared(declared, jax.random.key(1))
    if zero:
        return fresh
    # Both of a size at which they matter.
    leaves, structure = jax.tree.flatten(fresh)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    return structure.unflatten([0.2 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)])


@jax.jit
def hidden(params: Params) -> jax.Array:
    ones = jnp.ones_like(TOKENS)
    return MODEL.forward(params, TOKENS, jnp.broadcast_to(jnp.arange(6), (2, 6)), ones)[0]


# What is computed


def test_an_overlay_computes_what_merged_kernels_compute() -> None:
    base = tiny.params()
    joined = lora.join(overlay(), base)
    merged = lora.merge(joined, SCALE)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    for name in MATRICES:
        pair, kernel = overlay()["layers"][name], base["layers"][name]["kernel"]
        expected = np.asarray(kernel) + SCALE * np.einsum("lir,lro->lio", pair["lora_a"], pair["lora_b"])
        np.testing.assert_allclose(merged["layers"][name]["kernel"], expected, rtol=1e-5, atol=1e-6)
    found = hidden(joined)
    np.testing.assert_allclose(found, hidden(merged), rtol=2e-4, atol=2e-4)
    assert np.abs(np.asarray(found) - np.asarray(hidden(base))).max() > 0.1
    np.testing.assert_allclose(hidden(unstack_layers(joined)), found, rtol=2e-4, atol=2e-4)


def test_a_fresh_overlay_changes_nothing_and_its_a_is_peft_s() -> None:
    fresh = overlay(zero=True)
    np.testing.assert_array_equal(hidden(lora.join(fresh, tiny.params())), hidden(tiny.params()))
    for name in MATRICES:
        a = np.asarray(fresh["layers"][name]["lora_a"])
        bound = a.shape[1] ** -0.5
        assert 0.8 * bound < np.abs(a).max() <= bound
        assert not np.array_equal(a[0], a[1])


def test_its_gradient_is_the_kernel_s_through_the_product() -> None:
    """dA = s · G Bᵀ and dB = s · Aᵀ G with G the gradient of the merged kernel."""
    base, laid = tiny.params(), overlay()
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 6, tiny.SHAPE.width)), jnp.float32)

    def loss(params: Params) -> jax.Array:
        return (hidden(params) * weights).sum()

    found = jax.grad(lambda trained: loss(lora.join(trained, base)))(laid)
    of_kernels = jax.grad(loss)(lora.merge(lora.join(laid, base), SCALE))["layers"]
    for name in MATRICES:
        gradient, pair = of_kernels[name]["kernel"], laid["layers"][name]
        expected = {
            "lora_a": SCALE * jnp.einsum("lio,lro->lir", gradient, pair["lora_b"]),
            "lora_b": SCALE * jnp.einsum("lir,lio->lro", pair["lora_a"], gradient),
        }
        for part, value in expected.items():
            got, size = found["layers"][name][part], float(jnp.abs(value).max())
            np.testing.assert_allclose(got, value, rtol=2e-3, atol=2e-4 * size, err_msg=f"{name} {part}")


def test_only_named_modules_have_one() -> None:
    assert set(overlay(targets=("v_proj", "q_proj"))["layers"]) == {"q", "v"}
    with pytest.raises(UserError, match="config.model.target_modules: 'q_prj': did you mean 'q_proj'?"):
        overlay(targets=("q_prj",))


def test_the_config_knows_the_modules_by_name() -> None:
    assert set(typing.get_args(LoraModule)) == {lora.ALL, *lora.MODULES}


def test_what_is_trained_cannot_be_frozen_too() -> None:
    with pytest.raises(ValueError, match="both trained and frozen"):
        lora.join({"embed": 1}, {"embed": 2})
    assert lora.join({"a": 1}, None) == {"a": 1}


def test_quantized_kernels_are_within_half_a_level_and_keep_their_overlay() -> None:
    quantized = quantize_kernels(tiny.params())
    declared = jax.tree.map(
        lambda p: (p.shape, p.dtype), declare_quantized(MODEL.declare()), is_leaf=lambda x: isinstance(x, Param)
    )
    assert jax.tree.map(lambda x: (x.shape, x.dtype), quantized) == declared
    for name in MATRICES:
        layer, kernel = quantized["layers"][name], tiny.params()["layers"][name]["kernel"]
        scale = np.asarray(layer["scale"])[:, None, :]
        error = np.abs(np.asarray(layer["kernel"], np.float32) * scale - np.asarray(kernel))
        assert (error <= 0.501 * scale).all() and np.abs(layer["kernel"]).max() == 127
    joined = lora.join(overlay(), quantized)
    kept = jax.tree.map(np.testing.assert_array_equal, lora.merge(joined, SCALE), joined)
    assert kept["layers"]["q"].keys() == {"kernel", "scale", "lora_a", "lora_b"}
    whole = {
        name: {"kernel": layer["kernel"] * layer["scale"][:, None, :]} if name in MATRICES else layer
        for name, layer in quantized["layers"].items()
    }
    dequantized = lora.join(overlay(), {**quantized, "layers": whole})
    np.testing.assert_allclose(hidden(joined), hidden(dequantized), rtol=2e-4, atol=2e-4)


# What is trained

PPO: dict[str, Any] = {
    "model__lora_rank": RANK,
    "model__target_modules": ("q_proj", "v_proj"),
    "algorithm__estimator": "gae",
    "algorithm__use_kl_in_reward": True,
    "critic__freeze_trunk": True,
}


def test_a_step_trains_the_overlay_and_the_value_head_alone() -> None:
    config = tiny.config(**PPO)
    program = make_program(config, MODEL, tiny.model(value_head=True))
    assert program.critic is not None
    critic = init_declared(program.critic.declare(), jax.random.key(0))
    state = jax.jit(program.init)(tiny.params(), critic, None, jax.random.key(3))
    assert state.reference is None and program.reference(state) is state.base  # not kept twice
    assert set(state.actor.params["layers"]) == {"q", "v"} and set(state.critic.params) == {"value_head"}
    trained = lora.count(state.actor.params)
    assert 2 * trained <= lora.count(state.actor.opt_state) <= 2 * trained + 4, "two moments and some counters"
    own = program.init(tiny.params(), critic, reference=tiny.params(1))
    assert program.reference(own) is own.reference is not None  # one that is given is the one that is read
    before = jax.tree.map(np.asarray, state)
    after, metrics, batch = jax.jit(make_step(program, tiny.even_tokens))(state, tiny.prompts(), step_key(0, 0))
    jax.tree.map(np.testing.assert_array_equal, after.base, before.base)
    # B moves from zero at once; A has no gradient before B has moved.
    for role, leaf in (("actor", "lora_b"), ("critic", "value_head")):
        paths = jax.tree.flatten_with_path(getattr(after, role).params)[0]
        moved = [float(np.abs(x).max()) for path, x in paths if leaf in jax.tree_util.keystr(path)]
        assert moved and min(moved) > 0, role
    assert np.isfinite(metrics["actor/grad_norm"])
    # Before the first update the policy is the reference.
    np.testing.assert_allclose(batch.ref_log_prob, batch.old_log_probs, atol=1e-6)


# A run

LORA: dict[str, Any] = {
    "model__lora_rank": 2,
    "model__quantize_base": "int8",
    "actor__use_kl_loss": True,
    "optimizer__lr": 0.05,
    "trainer__rollout_dump": False,
    "eval__interval": 0,
    "data__eval": (),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("lora")
    with fit(tiny_folder.config(**LORA), folder) as made:
        list(made)
        return folder, jax.tree.map(np.asarray, made.state())


@pytest.mark.long
def test_a_checkpoint_holds_the_overlay_and_resumes_bit_for_bit(run: tuple[Path, Any], tmp_path: Path) -> None:
    folder, final = run
    names = set(json.loads((folder / "checkpoints" / "4" / "checksums.json").read_text()))
    assert names and Checkpoints(folder / "checkpoints").steps() == [2, 4]
    with fit(tiny_folder.config(**LORA, trainer__steps=2), tmp_path) as first:
        list(first)
    with fit(tiny_folder.config(**LORA), tmp_path) as second:
        assert second.step == 2
        list(second)
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, second.state()), final)
    assert "parameters are trained" in (tmp_path / "events.jsonl").read_text()


def test_an_adapter_folder_is_what_peft_lays_over_the_model(run: tuple[Path, Any], tmp_path: Path) -> None:
    """Names as PEFT gives them (seen in a folder that PEFT wrote), and W + alpha/r · B A is what is exported merged."""
    folder, _ = run
    assert export(folder, tmp_path / "merged") == export(folder, tmp_path / "adapter", adapter=True) == 4
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA" and settings["r"] == 2 and settings["lora_alpha"] == 16.0
    assert settings["target_modules"] == sorted(lora.MODULES)
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    base = load_file(tiny_folder.folder() / "model.safetensors")
    changed = [name for name in base if not np.array_equal(base[name], merged[name])]
    assert len(changed) == 7 * tiny_folder.LLAMA["num_hidden_layers"]
    for name in changed:
        module = "base_model.model." + name.removesuffix(".weight")
        a, b = adapter.pop(f"{module}.lora_A.weight"), adapter.pop(f"{module}.lora_B.weight")
        assert a.shape == (2, base[name].shape[1]) and b.shape == (base[name].shape[0], 2)
        np.testing.assert_allclose(merged[name], base[name] + 8.0 * (b @ a), rtol=1e-5, atol=1e-6)
    assert not adapter


def test_what_cannot_be_an_adapter_is_refused(run: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="adapter: already exists"):
        (tmp_path / "adapter").mkdir()
        (tmp_path / "adapter" / "file").touch()
        export(run[0], tmp_path / "adapter", adapter=True)
    phi = hf.read_config(Path(__file__).parent / "fixtures" / "models" / "phi3")
    with pytest.raises(UserError, match="phi3: .*gate_up_proj.* holds several projections"):
        export_adapter(tmp_path / "new", overlay(), phi, alpha=ALPHA, base_model="phi")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model__fresh": True}, "corrections of random parameters"),
        ({"model__lora_rank": 0, "model__quantize_base": "int8"}, "only what LoRA leaves frozen can be quantized"),
        ({"model__lora_rank": 0, "model__target_modules": "q_proj"}, "say what LoRA trains, and there is none"),
        ({"model__target_modules": ("q_prj",)}, "config.model.target_modules: must be one of all-linear, q_proj"),
        ({"model__target_modules": ()}, "nothing would be trained"),
        ({"reference__sync_steps": 2, "actor__use_kl_loss": True}, "the reference is the model without its overlay"),
        ({"critic__freeze_trunk": True}, "there is no critic"),
        (
            {"critic__freeze_trunk": True, "critic__path": "x", "algorithm__estimator": "gae"},
            "a frozen trunk is the actor's",
        ),
    ],
)
def test_what_the_config_refuses(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny.config(**{"model__lora_rank": 2, **overrides})

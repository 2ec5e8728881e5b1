"""Where arrays lie: rules, and on eight devices what one gives, at an eighth of its work."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.config import check_devices
from jaxrl_llm.errors import UserError
from jaxrl_llm.input_notes import mesh_notices
from jaxrl_llm.loading import make_layout
from jaxrl_llm.models.architecture import MoeConfig
from jaxrl_llm.models.transformer import make_transformer
from jaxrl_llm.sharding import AXES, BATCH_AXES, Layout, make_mesh
from jaxrl_llm.steps.optimizer import make_optimizer
from jaxrl_llm.steps.phases import make_program
from tests import tiny
from tests.cut_tokens import CUT
from tests.on_devices import FLAGS, IS_LONG, JOBS, LONG, LONG_JOBS, MESHES, QUICK, SAMPLED, STEPS

ROOT = Path(__file__).parents[1]
REPLAYS = [
    pytest.param(case, mesh, marks=() if mesh in QUICK[case] else pytest.mark.long)
    for case, meshes in LONG.items()
    for mesh in meshes
]


# What eight devices found


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """result(job): what tests/on_devices.py found. The jobs run beside each other, each in a process of its own."""
    folder, found, running = tmp_path_factory.mktemp("devices"), {}, {}
    for job in [job for job in JOBS if IS_LONG or job not in LONG_JOBS]:
        own = {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": str(job == "sample")}
        command = [sys.executable, "-W", "error", "-m", "tests.on_devices", job, str(folder / job)]
        with (folder / f"{job}.log").open("w") as log:
            running[job] = subprocess.Popen(command, cwd=ROOT, env=os.environ | own, stdout=log, stderr=log)

    def wait(job: str) -> Any:
        if job not in found:
            code, log = running[job].wait(), (folder / f"{job}.log").read_text()
            assert code == 0, log
            found[job] = pickle.loads((folder / job).read_bytes())
        return found[job]

    yield wait
    for process in running.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize(("case", "mesh"), REPLAYS)
def test_the_recorded_tokens_of_a_run_give_the_same_run(result: Callable[[str], Any], case: str, mesh: str) -> None:
    runs = result(case)
    for found, expected in zip(runs[mesh]["after"], runs["single"]["after"], strict=True):
        (state, metrics, batch), (single_state, single_metrics, single_batch) = found, expected
        np.testing.assert_array_equal(batch.responses, single_batch.responses)
        tiny.assert_close(metrics, single_metrics)
        tiny.assert_close(batch, single_batch)
        tiny.assert_close(state, single_state)


def test_a_reward_model_is_cut_and_scores_alike(result: Callable[[str], Any]) -> None:
    found = result("train")["scored"]
    np.testing.assert_allclose(found["all"]["scores"], found["single"]["scores"], rtol=1e-5)
    assert np.std(found["single"]["scores"]) > 0.05
    placed = found["all"]["placed"]
    assert placed["embed"] == ((48, 32), (24, 16)) and placed["score"] == ((1, 32), (1, 32))


@pytest.mark.parametrize("case", [pytest.param("grpo", marks=pytest.mark.long), "ppo"])
def test_the_run_that_is_replayed_does_something(result: Callable[[str], Any], case: str) -> None:
    """Parameters move by much more than the tolerance, rows differ in length, every part of the loss is there."""
    after = result(case)["single"]["after"]
    assert len(after) == STEPS
    (first, _, _), (last, metrics, _) = after[0], after[-1]
    roles = [(first.actor, last.actor)] + ([(first.critic, last.critic)] if case == "ppo" else [])
    for before, now in roles:
        for a, b in zip(jax.tree.leaves(before.params), jax.tree.leaves(now.params), strict=True):
            assert np.abs(a - b).max() > 1e-3
    assert 0 < metrics["critic/score/mean"] < 1 and metrics["actor/grad_norm"] > 0.01
    assert max(abs(found["actor/ppo_kl"]) for _, found, _ in after) > 1e-4  # the last rate is 0: nothing moves then
    if case == "grpo":
        assert metrics["actor/kl_loss"] > 1e-4
    else:
        assert metrics["actor/reward_kl_penalty"] != 0 and metrics["critic/vf_loss"] > 0


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=() if mesh in SAMPLED else pytest.mark.long) for mesh in MESHES]
)
def test_in_float64_every_mesh_samples_the_same_tokens(result: Callable[[str], Any], mesh: str) -> None:
    batch, single = result("sample")[mesh], result("sample")["single"]
    assert single.rollout_log_probs.dtype == np.float64
    assert len(set(single.response_length.tolist())) > 3
    for name in ("responses", "response_mask", "response_length", "finish_reason", "uid"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(single, name), err_msg=name)
    np.testing.assert_allclose(batch.rollout_log_probs, single.rollout_log_probs, atol=1e-12)


@pytest.mark.parametrize(("case", "mesh"), [replay for replay in REPLAYS if replay.values[0] == "ppo"])
def test_a_device_does_its_share_of_the_work(result: Callable[[str], Any], case: str, mesh: str) -> None:
    """Scoring and updates, in micro-batches: an eighth, but for the optimizer's work on parameters that are whole."""
    runs = result(case)
    assert runs[mesh]["flops"] < 1.6 / 8 * runs["single"]["flops"]


@pytest.mark.parametrize(("case", "mesh"), REPLAYS)
def test_activations_stay_where_their_rows_are(result: Callable[[str], Any], case: str, mesh: str) -> None:
    assert result(case)[mesh]["gathers"] == {}


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("tokens", ["many", "few"])
def test_experts_give_the_same_on_every_mesh(result: Callable[[str], Any], tokens: str, mesh: str) -> None:
    found, single = result("experts")[tokens][mesh], result("experts")[tokens]["single"]
    tiny.assert_close(found["result"], single["result"])
    assert found["flops"] < 1.6 / 8 * single["flops"]


# The residual stream cut along its tokens


@pytest.mark.long
@pytest.mark.parametrize("how", ["uncut", *CUT])
@pytest.mark.parametrize("rows", [0, 1], ids=["full", "padded"])
def test_a_cut_residual_stream_gives_the_same(result: Callable[[str], Any], how: str, rows: int) -> None:
    """Log-probs, entropies, loss and gradients; of lines of 63 tokens on four devices."""
    found, single = (result("sequence_parallel")[name]["results"][rows] for name in (how, "single"))
    tiny.assert_close(found, single)
    (_, stats), grads = single
    assert np.ptp(stats.log_probs) > 1 and (stats.log_probs == 0).any() == rows
    assert all(np.abs(grad).max() > 0.1 for grad in jax.tree.leaves(grads))


@pytest.mark.long
def test_a_cut_residual_stream_takes_less_memory(result: Callable[[str], Any]) -> None:
    found = result("sequence_parallel")
    assert found["scanned, full"]["temp"] < 0.85 * found["uncut"]["temp"]


def test_kernels_give_the_same_of_each_device_s_share(result: Callable[[str], Any]) -> None:
    """Log-probs and the gradient, of blocks and of packed lines, with rows over four devices and heads over two."""
    found = result("attention")
    for of in (found["blocks"], found["packed"]):
        tiny.assert_close(of["results"], of["single"])
        log_probs, gradient = of["results"]
        assert np.ptp(log_probs) > 1 and all(np.abs(leaf).max() > 0.1 for leaf in jax.tree.leaves(gradient))
        # One line of four with its prompt once and its three responses; two of four query heads, one of two key heads.
        assert of["asked"] == {(1, 2, 1), (3, 2, 1)} and not of["gathers"]


def test_tokens_are_cut_where_a_config_says_so() -> None:
    plain = abstract_layout(data=2, fsdp=2, tensor=4)
    assert plain.named(("batch", "length", None)).spec == P(BATCH_AXES, None, None)
    cut = dataclasses.replace(plain, sequence_parallel=True)
    assert cut.named(("batch", "length", None)).spec == P(BATCH_AXES, "tensor", None)
    assert make_layout(tiny.config(model__sequence_parallel=True)).sequence_parallel


# The trainer's compiled phases


def test_a_phase_does_its_share_of_the_work(result: Callable[[str], Any]) -> None:
    found = result("train")
    assert found["phases"].keys() == found["single"].keys()
    assert {"gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor"} == found["single"].keys()
    ratios = {name: 8 * found["phases"][name]["flops"] / found["single"][name]["flops"] for name in found["single"]}
    # Advantages are a few numbers per token, part of them global.
    assert ratios.pop("adv") < 8
    assert max(ratios.values()) < 1.6, ratios


def test_no_phase_gathers_rows(result: Callable[[str], Any]) -> None:
    gathers = {name: phase["gathers"] for name, phase in result("train")["phases"].items()}
    # The sampler wants whole distributions, of which each `tensor` device has a part; of its own 8 rows of 32.
    assert all(shape.startswith("f32[8,") for shape in gathers.pop("gen"))
    assert not any(gathers.values()), gathers


def test_the_state_stays_as_declared(result: Callable[[str], Any]) -> None:
    found = result("train")
    assert found["state"] == found["declared"]
    for role in ("actor", "critic"):
        own = {path: shapes for path, shapes in found["state"].items() if path.startswith(role)}
        moments = {path: shapes for path, shapes in own.items() if {"mu", "nu"} & set(path.split("."))}
        assert len(moments) == 2 * sum(path.startswith(f"{role}.params") for path in own)
        for path, (shape, part) in moments.items():
            cut = 1 if "norm" in path or "value_head" in path else 4  # fsdp and tensor are 2 each
            assert np.prod(shape) == cut * np.prod(part), path


def test_evidence_is_spread_over_data_and_fsdp(result: Callable[[str], Any]) -> None:
    batch = result("train")["batch"]
    assert {"advantages", "returns", "loss_mask", "values", "ref_log_prob", "scores", "prompts"} <= batch.keys()
    for name, (shape, part) in batch.items():
        assert (shape[0] // 4, *shape[1:]) == part, name


def test_updates_take_over_the_buffers_of_the_state_before(result: Callable[[str], Any]) -> None:
    assert all(result("train")["donated"]) and not any(result("train")["kept"])


def test_the_trainer_runs_on_eight_devices(result: Callable[[str], Any]) -> None:
    first, last = result("train")["metrics"]
    assert first["actor/grad_norm"] > 0 and last["critic/grad_norm"] > 0
    assert any(name.startswith("val-core/") for name in last)


# The mesh


def abstract_layout(**sizes: int) -> Layout:
    """A layout that is only asked for shardings, on devices that are not there."""
    mesh: Any = AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return Layout(mesh)


def test_experts_are_cut_by_expert() -> None:
    shape = dataclasses.replace(tiny.SHAPE, moe=MoeConfig(num_experts=4, per_token=2, width=8, normalized=True))
    layout = abstract_layout(data=2, fsdp=2, tensor=2)
    layers = jax.tree.map(lambda s: s.spec, layout.params(make_transformer(shape).declare()))["layers"]
    assert layers["experts"]["gate"] == layers["experts"]["up"] == P(None, "tensor", "fsdp", None)
    assert layers["experts"]["down"] == P(None, "tensor", None, "fsdp")
    with pytest.raises(UserError, match=r"tensor = 8: does not divide the axis 'expert' \(4\) of layers.experts.down"):
        abstract_layout(tensor=8).params(make_transformer(shape).declare())


def test_a_mesh_has_named_axes_that_the_compiler_fills() -> None:
    mesh = make_mesh(data=1, fsdp=1, tensor=1)
    assert mesh.axis_names == AXES and mesh.size == 1
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 1, 0), (-1, 1, 1), (-1, -1, 1)])
def test_a_mesh_takes_all_devices_and_no_more(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="data=.* is not one of 1 device"):
        make_mesh(**dict(zip(AXES, sizes, strict=True)))


@pytest.mark.parametrize(
    ("overrides", "devices", "expected"),
    [
        ({}, 4, {"data": 4, "fsdp": 1, "tensor": 1}),
        ({"mesh__data": 1, "mesh__tensor": -1}, 8, {"data": 1, "fsdp": 1, "tensor": 8}),
        ({"mesh__fsdp": 3}, 8, "config.mesh.fsdp = 3, .* must multiply to the number of devices, 8"),
        ({"mesh__data": 2}, 8, "config.mesh.data = 2, .* must multiply to the number of devices, 8"),
        ({}, 8, "config.data.train_batch_size: .* must be a multiple of 8, found 4"),
        ({"data__eval": ("held out",), "eval__batch_size": 6}, 4, "config.eval.batch_size: .* multiple of 4, found 6"),
        ({"eval__batch_size": 6}, 4, {"data": 4, "fsdp": 1, "tensor": 1}),  # nothing is evaluated
        ({"data__eval": ("held out",), "eval__batch_size": 6, "mesh__data": 2, "mesh__tensor": 2}, 4,
         {"data": 2, "fsdp": 1, "tensor": 2}),
    ],
)  # fmt: skip
def test_what_a_config_asks_of_its_devices(overrides: dict[str, Any], devices: int, expected: Any) -> None:
    config = tiny.config(**overrides)
    if isinstance(expected, dict):
        assert check_devices(config, devices) == expected
    else:
        with pytest.raises(UserError, match=expected):
            check_devices(config, devices)


def test_what_a_run_says_of_its_mesh() -> None:
    def notices(sizes: dict[str, int], **changes: Any) -> list[str]:
        program = make_program(tiny.config(**changes), tiny.model())
        return mesh_notices(dataclasses.replace(program, layout=abstract_layout(**sizes)))

    assert notices({"tensor": 2}, model__sequence_parallel=True) == notices({"data": 4}) == []
    (parted,) = notices({"tensor": 4})
    assert parted.startswith("config.mesh.tensor = 4: does not divide the model's 2 heads of keys and values")
    (gathered,) = notices({"fsdp": 2})
    # Two layers of 10,240 elements of 4 bytes, half of which lie on each device as it is.
    assert "each of up to 8 tokens" in gathered and "gathers 0.1 MB of kernels over mesh.fsdp = 2" in gathered
    assert notices({"fsdp": 2}, rollout__gather_params=True) == notices({"fsdp": 2}, model__scan_layers=False) == []
    (nothing,) = notices({"data": 2}, model__sequence_parallel=True)
    assert nothing == "config.model.sequence_parallel = True: changes nothing, since mesh.tensor = 1"


# Parameters and optimizer state


def test_each_parameter_lies_as_its_axes_say() -> None:
    layout = abstract_layout(data=2, fsdp=2, tensor=2)
    found = jax.tree.map(lambda s: s.spec, layout.params(tiny.model().declare()))
    assert found["embed"] == P("tensor", "fsdp")
    layers = found["layers"]
    for name in ("q", "k", "v", "gate", "up"):
        assert layers[name]["kernel"] == P(None, "fsdp", "tensor")
    for name in ("o", "down"):
        assert layers[name]["kernel"] == P(None, "tensor", "fsdp")
    for norm in (layers["attn_norm"], layers["mlp_norm"], found["final_norm"]):
        assert NamedSharding(layout.mesh, norm).is_fully_replicated
    head = layout.params(tiny.model(value_head=True).declare())["value_head"]
    assert head["kernel"].is_fully_replicated and head["bias"].is_fully_replicated


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"tensor": 3}, "config.mesh.tensor = 3: does not divide the axis 'vocab' (64) of embed [64, 32]"),
        ({"fsdp": 5}, "config.mesh.fsdp = 5: does not divide the axis 'embed' (32) of embed [64, 32]"),
        (
            {"tensor": 32},
            "config.mesh.tensor = 32: does not divide the axis 'kv_heads' (16) of layers.k.kernel [2, 32, 16]",
        ),
    ],
)
def test_an_axis_that_cannot_be_cut_names_key_and_parameter(sizes: dict[str, int], what: str) -> None:
    with pytest.raises(UserError) as error:
        abstract_layout(**sizes).params(tiny.model().declare())
    assert str(error.value) == what


@pytest.mark.parametrize("clipped", [True, False])
def test_moments_lie_where_their_parameters_lie(clipped: bool) -> None:
    config = tiny.config(optimizer__schedule="cosine", optimizer__max_grad_norm=1.0 if clipped else 0.0)
    layout, optimizer = abstract_layout(data=2, fsdp=2, tensor=2), make_optimizer(config.optimizer, 10)
    declaration = tiny.model().declare()
    shardings, params = layout.optimizer(optimizer, declaration), layout.params(declaration)
    state = jax.eval_shape(optimizer.init, tiny.params())
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    for moment in ("mu", "nu"):
        assert optax.tree.get(shardings, moment) == params
    counts = [s for s, x in zip(jax.tree.leaves(shardings), jax.tree.leaves(state), strict=True) if x.ndim == 0]
    assert len(counts) >= 2 and all(s.is_fully_replicated for s in counts)


def test_rows_lie_over_data_and_fsdp_together() -> None:
    layout = abstract_layout(data=2, fsdp=3, tensor=4)
    assert layout.batch_shards == 6
    assert layout.rows.shard_shape((12, 5)) == (2, 5)
    assert layout.named(("batch", None, "heads")).spec == P(BATCH_AXES, None, "tensor")
    assert layout.replicated.shard_shape((12, 5)) == (12, 5)


def test_on_one_device_nothing_is_constrained() -> None:
    layout, x = Layout.single(), jnp.ones((3, 2))
    assert layout.constrain(x, ("batch", None)) is x
    assert layout.constrain_rows({"x": x})["x"] is x
    put = layout.put_rows({"x": np.arange(6).reshape(3, 2), "mask": np.ones(3, bool)})
    np.testing.assert_array_equal(put["x"], np.arange(6).reshape(3, 2))
    assert put["mask"].dtype == bool and put["x"].sharding == layout.rows


def test_put_rows_and_constraints_on_eight_devices(result: Callable[[str], Any]) -> None:
    found = result("train")["layout"]
    assert found["devices"] == {tuple(range(2 * i, 2 * i + 2)): 2 for i in range(4)}  # rows of a device -> such devices
    assert found["constrained"] == ((8, 4, 6), (2, 4, 3))
    assert found["constrained_rows"] == ((8, 4, 6), (2, 4, 6))

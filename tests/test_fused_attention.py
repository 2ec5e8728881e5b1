"""Kernels for attention: all agree with the plain products, and programs for GPUs and TPUs hold them.

They run without a GPU or a TPU. cuDNN's kernel is reached by `jax.nn.dot_product_attention`, whose own plain products
stand in for it with the same arguments; splash attention is interpreted; what is lowered for either device is read.
"""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import attention, fused_attention
from jaxrl_llm.models.attention import attend_lines
from jaxrl_llm.models.fused_attention import attend_rows, choose, cudnn, splash, trial
from jaxrl_llm.models.transformer import make_transformer, unstack_layers
from jaxrl_llm.sharding import AXES, Layout, abstract
from jaxrl_llm.types import Array, Packed
from tests import tiny

P, N, R = 5, 3, 6
STANDS_IN = partial(cudnn, implementation="xla")
KERNELS = {"cudnn": STANDS_IN, "splash": partial(splash, interpret=True)}
LEFT, LENGTHS = np.array([0, 3, 5]), np.array([[6, 2, 5], [0, 6, 1], [1, 0, 0]])


def lines(kind: str) -> tuple[Array, Array, Any]:
    """positions, segments [3, T] and `blocks`: full, padded, and with next to nothing in them."""
    prompt, before = np.arange(P)[None, :] >= LEFT[:, None], (P - LEFT)[:, None]
    at = np.maximum(np.arange(P)[None, :] - LEFT[:, None], 0)
    if kind == "left":
        return jnp.asarray(at), jnp.asarray(prompt, jnp.int32), (P, 0)
    if kind == "right":
        return jnp.asarray(np.tile(np.arange(P), (3, 1))), jnp.asarray(prompt[:, ::-1], jnp.int32), (P, 0)
    token = np.arange(R)[None, None, :]
    used = token < LENGTHS[:, :, None]
    after = np.broadcast_to(token + before[:, :, None], used.shape)
    if kind == "blocks":
        rest = used.reshape(3, -1), after.reshape(3, -1)
        blocks: Any = (P, N)
    else:
        slots, blocks = LENGTHS.sum(1).max() + 2, Packed(P, N, R)
        rest = np.zeros((3, slots), int), np.zeros((3, slots), int)
        for line, own in enumerate(used):
            where = np.nonzero(own)
            rest[0][line, : own.sum()], rest[1][line, : own.sum()] = where[0] + 1, after[line][own]
    segments, positions = np.concatenate([prompt, rest[0]], 1), np.concatenate([at, rest[1]], 1)
    return jnp.asarray(positions, jnp.int32), jnp.asarray(segments, jnp.int32), blocks


def both_ways(attention: Any, kind: str, **how: Any) -> list[Array]:
    """What it gives and its gradient, of 4 query heads and 2 key heads of 8."""
    positions, segments, blocks = lines(kind)

    def loss(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        out = attention(q, k, v, positions, segments, blocks=blocks, scale=0.4, **how)
        return (out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)).sum(), out

    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(x, (*positions.shape, h, 8)) for x, h in zip(keys, (4, 2, 2), strict=True))
    gradient, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, 2 * k, v)
    return [out, *gradient]


def assert_agree(kernel: Any, kind: str, **how: Any) -> None:
    expected = both_ways(attend_lines, kind, **how)
    found = both_ways(partial(attend_rows, kernel=kernel), kind, **how)
    for a, b in zip(found, expected, strict=True):
        assert jnp.abs(b).max() > 0.1
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["left", "right", "blocks", "packed"])
def test_lines_in_rows_are_the_same(kind: str, window: int | None) -> None:
    assert_agree(STANDS_IN, kind, window=window)


@pytest.mark.parametrize("how", [{}, {"window": 3, "softcap": 2.0}], ids=["plain", "window, cap"])
@pytest.mark.parametrize("kind", ["left", "right", "blocks", "packed"])
def test_queries_in_parts_are_the_same(kind: str, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = both_ways(attend_lines, kind, **how)
    monkeypatch.setattr(attention, "QUERIES_AT_ONCE", 2)
    assert [len(attention.cuts(length)) for length in (P, R, 99)] == [2, 3, 4]
    for a, b in zip(both_ways(attend_lines, kind, **how), whole, strict=True):
        assert jnp.abs(b).max() > 0.1
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("length", [1, 100, 191, 192, 255, 513, 4097])
def test_parts_of_queries_are_all_of_them(length: int) -> None:
    parts = attention.cuts(length)
    assert [i for start, end in parts for i in range(start, end)] == list(range(length)) and len(parts) <= 4


def test_a_large_score_that_is_not_seen_leaves_the_gradient_alone() -> None:
    def loss(k: Array, large: float) -> Array:
        k = jnp.concatenate([k, jnp.full((1, 1, 1, 8), large)], 1)
        at, one = jnp.arange(3)[None], jnp.ones((1, 3), jnp.int32)
        return attend_lines(jnp.ones((1, 3, 1, 8)), k, k, at, one, scale=1.0)[:, :2].var()

    k = jax.random.normal(jax.random.key(0), (1, 2, 1, 8))
    np.testing.assert_allclose(jax.grad(loss)(k, 1e3), jax.grad(loss)(k, 0.0), atol=1e-7)  # exp(8e3) is not finite


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("blocks", {}),
        ("left", {"window": 3, "softcap": 2.0}),
        ("packed", {"window": 3}),
        ("right", {"softcap": 2.0}),
    ],
)
def test_splash_is_the_same(kind: str, how: Any) -> None:
    assert_agree(KERNELS["splash"], kind, **how)


def test_what_no_kernel_takes_is_computed_by_products() -> None:
    """Segments and prefixes that say who sees whom, windows that only the running program knows, and lines that do not
    divide over the devices."""
    never: Any = None  # is not called
    positions, segments, blocks = lines("blocks")
    q, k, v = (jax.random.normal(jax.random.key(h), (*positions.shape, h, 8)) for h in (4, 2, 2))
    two: Any = SimpleNamespace(batch_shards=2, on_shards=never)
    for how in (
        {"blocks": None},
        {"blocks": blocks, "prefixes": segments},
        {"blocks": blocks, "window": jnp.int32(3)},
        {"blocks": blocks, "where": two},
    ):
        found = attend_rows(q, k, v, positions, segments, kernel=never, scale=0.4, **how)
        plain = {name: x for name, x in how.items() if name != "where"}
        np.testing.assert_array_equal(found, attend_lines(q, k, v, positions, segments, scale=0.4, **plain))


# What is compiled for the devices that are not here


class Way(NamedTuple):
    backward: bool
    remat: str = "none"
    scanned: bool = True
    mesh: bool = False


WAYS = {
    "forward": Way(False),
    "backward": Way(True),
    "windows, unrolled, computed again": Way(True, "dots", scanned=False),
    "eight devices": Way(True, "full", mesh=True),
}
SOFTMAX = r"stablehlo\.exponential.*tensor<(\d+x){4,}"  # by products: of no other array with so many axes


def lowered(kernel: Any, platform: str, way: Way) -> str:
    """The program of a model in bfloat16 over packed lines; without a kernel by plain products."""
    shape = dataclasses.replace(tiny.SHAPE, head_dim=64, windows=() if way.scanned else (0, 3))
    mesh: Any = AbstractMesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)
    where = Layout(mesh, sequence_parallel=True) if way.mesh else Layout.single()
    attention = partial(attend_rows, kernel=kernel, where=where) if kernel else attend_lines
    how: dict[str, Any] = {"remat": way.remat, "constrain": where.constrain, "attention": attention}
    model = make_transformer(shape, compute_dtype=jnp.bfloat16, **how)
    positions, segments, blocks = lines("packed")
    positions, segments = (jnp.concatenate([x, x[:1]]) for x in (positions, segments))

    def forward(params: Any) -> Array:
        entered = params if way.scanned else unstack_layers(params)
        hidden, _ = model.forward(entered, positions, positions, segments, blocks=blocks)
        return hidden.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(forward) if way.backward else forward).trace(abstract(model.declare()))
    return traced.lower(lowering_platforms=(platform,)).as_text().replace("\\22", '"')


@pytest.mark.parametrize("name", WAYS)
def test_programs_for_a_gpu_hold_cudnn_s_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)  # no such library is here
    way = WAYS[name]
    text = lowered(cudnn, "cuda", way)
    kernels = {"__cudnn$fmhaSoftmax"} | ({"__cudnn$fmhaSoftmaxBackward"} if way.backward else set())
    assert set(re.findall(r"__cudnn\$\w+", text)) == kernels
    # By lengths, with nothing like a mask; and of the model's windows the one that there is.
    assert set(re.findall(r"mask_type\W+(\w+)", text)) == {"PADDING_CAUSAL"}
    assert set(re.findall(r"sliding_window_length\W+(\d+)", text)) == ({"0"} if way.scanned else {"0", "3"})
    # Rows, heads and slots: prompts, and responses behind them; of four lines, or of the one that each device has.
    sizes = {tuple(map(int, re.findall(r"\d+", x))) for x in re.findall(r'"dimensions": \[([^]]*)', text)}
    assert sizes == ({(1, 2, 8, 8), (N, 2, 16, 16)} if way.mesh else {(4, 4, 8, 8), (4 * N, 4, 16, 16)})
    assert not re.search(SOFTMAX, text) and re.search(SOFTMAX, lowered(None, "cuda", way))


@pytest.mark.parametrize("name", WAYS)
def test_programs_for_a_tpu_hold_splash_s_kernels(name: str) -> None:
    text = lowered(splash, "tpu", WAYS[name])
    found = {part for part in ("fwd", "dq", "dkv") if re.search(rf"splash_mha_{part}", text)}
    assert "tpu_custom_call" in text and found == ({"fwd", "dq", "dkv"} if WAYS[name].backward else {"fwd"})
    assert not re.search(SOFTMAX, text)


# Which one is taken


def devices(platform: str, tensor: int = 1) -> Any:
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]), shape={"tensor": tensor})
    return SimpleNamespace(mesh=mesh, batch_shards=1, on_shards=None)


def chosen(wanted: str, where: Any, dtype: str = "bfloat16", scanned: bool = True, **changes: Any) -> Any:
    return choose(wanted, dataclasses.replace(tiny.SHAPE, **changes), dtype, scanned=scanned, where=where)


def test_a_cpu_takes_plain_products() -> None:
    for wanted in ("auto", "xla"):
        assert chosen(wanted, Layout.single()) is attend_lines
    for wanted, platform in (("cudnn", "gpu"), ("splash", "tpu")):
        words = f"config.model.attention = '{wanted}': runs on a {platform}, found a cpu; 'auto' takes"
        with pytest.raises(UserError, match=re.escape(words)):
            chosen(wanted, Layout.single())


def test_the_device_s_kernel_is_taken_if_it_passes_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_attention, "trial", lambda *of: None)
    for platform, kernel in (("gpu", cudnn), ("tpu", splash)):
        assert chosen("auto", devices(platform)).keywords["kernel"] is kernel
    assert chosen("xla", devices("gpu")) is attend_lines
    monkeypatch.setattr(fused_attention, "trial", lambda *of: "tried here, it failed (no memory)")
    for name, platform in (("cudnn", "gpu"), ("splash", "tpu")):
        assert chosen("auto", devices(platform)) is attend_lines
        with pytest.raises(UserError, match=rf"{name}.*it failed \(no memory\)"):
            chosen(name, devices(platform))


@pytest.mark.parametrize(
    ("name", "how", "words"),
    [
        ("cudnn", {"dtype": "float32"}, "bfloat16 or float16, found config.model.dtype = 'float32'"),
        ("cudnn", {"head_dim": 12}, "a multiple of 8 up to 256, the model's have 12"),
        ("cudnn", {"head_dim": 264}, "a multiple of 8 up to 256, the model's have 264"),
        ("cudnn", {"attention_softcap": 50.0}, "caps its scores"),
        ("cudnn", {"windows": (0, 4)}, "set model.scan_layers = False"),
        ("splash", {"windows": (4, 4)}, "set model.scan_layers = False"),
        ("splash", {"where": {"tensor": 4}}, "config.mesh.tensor = 4 does not divide the model's 2 key heads"),
    ],
)
def test_what_a_kernel_cannot_do_is_not_asked_of_it(name: str, how: Any, words: str) -> None:
    where = devices(fused_attention.PLATFORMS[name], **how.pop("where", {}))
    with pytest.raises(UserError, match=re.escape(words)):
        chosen(name, where, **how)
    assert chosen("auto", where, **how) is attend_lines


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, None),
        ({"scale": 0.25}, "its output is not what xla computes (window 4)"),
        ({"window": 3}, "its output is not"),
        ({"window": 5}, "its output is not"),
        ({"window": None}, "its output is not"),
        ({"v": 0}, "its dv is not"),
    ],
)
def test_a_trial_tells_right_from_wrong(changed: Any, found: str | None) -> None:
    def kernel(q: Array, k: Array, v: Array, real: Array, **how: Any) -> Array:
        v = jax.lax.stop_gradient(v) if "v" in changed else v
        return STANDS_IN(q, k, v, real, **how | {name: x for name, x in changed.items() if name != "v"})

    told = trial(kernel, dataclasses.replace(tiny.SHAPE, windows=(4, 4)), "bfloat16")
    assert told == found if found is None or told is None else found in told


def test_what_cannot_run_fails_its_trial() -> None:
    """Here both kernels do, as they would where a driver or a library lacks; a device of their own runs on without."""
    for name, kernel in fused_attention.KERNELS.items():
        assert (trial(kernel, tiny.SHAPE, "bfloat16") or "").startswith("tried here, it failed (")
        assert chosen("auto", devices(fused_attention.PLATFORMS[name])) is attend_lines
    assert "cuDNN is not detected" in (trial(cudnn, tiny.SHAPE, "bfloat16") or "")


@pytest.mark.skipif(jax.default_backend() == "cpu", reason="of a GPU's or a TPU's own kernel")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernel_of_this_device_passes(dtype: str) -> None:
    name = {home: name for name, home in fused_attention.PLATFORMS.items()}[jax.default_backend()]
    if name != "cudnn" or dtype == "bfloat16":
        shape = dataclasses.replace(tiny.SHAPE, head_dim=64, windows=(0, 4))
        assert trial(fused_attention.KERNELS[name], shape, dtype) is None

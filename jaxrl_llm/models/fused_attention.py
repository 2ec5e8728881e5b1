"""Attention by kernels that never write scores to memory: cuDNN's on NVIDIA GPUs, splash attention on TPUs. `choose`
decides between them and `attention.attend_lines`, which all agree with.

Kernels of a flash kind (Dao et al. 2022, arXiv:2205.14135) know rows in which a token sees what comes before it, and
no prompt that several rows share. So each response is put into a row of its own behind a copy of its prompt's keys and
values; the prompt itself is computed once. Of packed lines the attention alone computes padding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.architecture import TransformerConfig
from jaxrl_llm.models.attention import Window, attend_lines
from jaxrl_llm.models.lines import Rows
from jaxrl_llm.types import Array, Packed

LANES = 128  # lines are filled up to multiples of it for splash
BLOCKS = (512, 256, LANES)  # of queries and of keys; the largest that divides the line
CUDNN_SLOTS = 8  # and to multiples of this; an odd number jax refuses on the way back
CUDNN_DTYPES, CUDNN_HEAD_DIM = ("bfloat16", "float16"), (8, 256)  # sizes of a head: multiples of one, up to the other
Q_AXES, KV_AXES = ("batch", None, "heads", None), ("batch", None, "kv_heads", None)


class Kernel(Protocol):
    """softmax(scale · q kᵀ) v of rows whose queries are those of the last T of S slots.

    Args:
      q: [N, T, H, D]; k, v: [N, S, KV, D] with H a multiple of KV.
      real: bool [N, S], slots that are no padding: one run of them. A token sees the real ones up to its own.
      window, softcap: see `attend`.

    Returns:
      [N, T, H, D]; finite numbers where `real` is False, and their gradient is not read.
    """

    def __call__(
        self, q: Array, k: Array, v: Array, real: Array, *, scale: float, window: int | None, softcap: float | None
    ) -> Array: ...


def cudnn(
    q: Array,
    k: Array,
    v: Array,
    real: Array,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    implementation: Any = "cudnn",
) -> Array:
    """A `Kernel`: `jax.nn.dot_product_attention`, by lengths and causality; a mask would be held, and its gradient."""
    if softcap is not None:
        raise NotImplementedError("cudnn: no cap on scores")
    ahead, behind = k.shape[1] - q.shape[1], -k.shape[1] % CUDNN_SLOTS
    # It counts queries and keys from the same slot, the first that is real. A row of padding sees itself.
    first, length = jnp.argmax(real, 1), jnp.maximum(real.sum(1, dtype=jnp.int32), 1)
    q = jnp.pad(q, ((0, 0), (ahead, 0), (0, 0), (0, 0)))
    q, k, v = (_turn(jnp.pad(x, ((0, 0), (0, behind), (0, 0), (0, 0))), first) for x in (q, k, v))
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        is_causal=True,
        query_seq_lengths=length,
        key_value_seq_lengths=length,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )
    return _turn(out, -first)[:, ahead : real.shape[1]]


def _turn(x: Array, by: Array) -> Array:
    """[N, S, …], each row turned to the left by its `by` [N] slots."""
    rows, slots = x.shape[:2]
    at = (jnp.arange(slots)[None, :] + by[:, None]) % slots
    # Said to be unique, so that on the way back nothing has to be added up.
    return x.at[jnp.arange(rows)[:, None], at].get(unique_indices=True, mode="promise_in_bounds")


def splash(
    q: Array,
    k: Array,
    v: Array,
    real: Array,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    interpret: bool = False,
) -> Array:
    """A `Kernel`: jax's splash attention in Pallas. `interpret` runs it on any device, slowly."""
    # Here, since it takes its time and others do without.
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas

    count, heads = q.shape[1], q.shape[2]
    behind = -count % LANES  # and so much before the keys that they are a multiple too
    ahead = -(k.shape[1] + behind) % LANES

    def by_head(x: Array, ahead: int) -> Array:
        return jnp.pad(x, ((0, 0), (ahead, behind), (0, 0), (0, 0))).swapaxes(1, 2)

    # The kernel has no scale of its own.
    q, k, v = by_head((q * scale).astype(q.dtype), 0), by_head(k, ahead), by_head(v, ahead)
    # Padding sees padding, at least itself: over no key at all the kernel's softmax would divide by 0.
    segments = jnp.pad(real.astype(jnp.int32), ((0, 0), (ahead, behind)))
    size = (q.shape[2], k.shape[2])
    block_q, block_kv = (next(block for block in BLOCKS if length % block == 0) for length in size)
    offset = size[1] - size[0]
    if window is None:
        mask: Any = pallas.CausalMask(size, offset)
    else:
        mask = pallas.LocalMask(size, (window - 1, 0), offset)
    blocks = pallas.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    # Made while tracing: which of the mask's blocks are empty is known before the program is.
    with jax.ensure_compile_time_eval():
        kernel = pallas.make_splash_mha(
            pallas.MultiHeadMask([mask] * heads),
            block_sizes=blocks,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=softcap,
            interpret=interpret,
        )
    out: Any = jax.vmap(kernel)(q, k, v, pallas.SegmentIds(segments[:, offset:], segments))
    return out.swapaxes(1, 2)[:, :count]


class Where(Protocol):
    """What is asked of a `Layout` (sharding.py)."""

    @property
    def mesh(self) -> jax.sharding.Mesh: ...
    @property
    def batch_shards(self) -> int: ...
    def on_shards(self, function: Callable[..., Array], given: Any, found: Any, /) -> Callable[..., Array]: ...


KERNELS: dict[str, Kernel] = {"cudnn": cudnn, "splash": splash}
PLATFORMS = {"cudnn": "gpu", "splash": "tpu"}


def attend_rows(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    segments: Array,
    *,
    kernel: Kernel,
    where: Where | None = None,
    prefixes: Array | None = None,
    blocks: tuple[int, int] | Packed | None = None,
    scale: float,
    window: Window = None,
    softcap: float | None = None,
) -> Array:
    """`attend_lines` by a kernel, where what is seen follows from `blocks` and the window is known while tracing.

    Args:
      where: the devices that lines and heads are spread over; None: one.
    """
    known = isinstance(window, int | None)
    if blocks is None or prefixes is not None or not known or (where and q.shape[0] % where.batch_shards):
        how: dict[str, Any] = {"prefixes": prefixes, "blocks": blocks}
        return attend_lines(q, k, v, positions, segments, **how, scale=scale, window=window, softcap=softcap)

    def run(q: Array, k: Array, v: Array, real: Array) -> Array:
        out = kernel(q, k, v, real, scale=scale, window=window, softcap=softcap)
        return jnp.where(real[:, real.shape[1] - q.shape[1] :, None, None], out, 0)

    lines = partial(_by_row, run, blocks)
    if where is not None:
        lines = where.on_shards(lines, (Q_AXES, KV_AXES, KV_AXES, ("batch", None)), Q_AXES)
    return lines(q, k, v, segments)


def _by_row(
    run: Callable[..., Array], blocks: tuple[int, int] | Packed, q: Array, k: Array, v: Array, segments: Array
) -> Array:
    """Lines [B, P + …] with run(q, k, v, real) of their prompts, and of each response behind its prompt's keys."""
    width, n = blocks[:2]
    tokens = (q, k, v, segments > 0)
    prompt = tuple(x[:, :width] for x in tokens)
    of_prompt = run(*prompt)
    if n == 0:
        return of_prompt
    rest, rows = tuple(x[:, width:] for x in tokens), None
    if isinstance(blocks, Packed):
        rows = Rows.of(segments[:, width:], blocks)
        rest = (*(rows.into_rows(x) for x in rest[:3]), rows.real)
    own = tuple(x.reshape(x.shape[0] * n, -1, *x.shape[2:]) for x in rest)
    keys = (jnp.concatenate([jnp.repeat(x, n, axis=0), y], 1) for x, y in zip(prompt[1:], own[1:], strict=True))
    found = run(own[0], *keys).reshape(q.shape[0], -1, *q.shape[2:])
    if rows is not None:
        found = jnp.where((segments[:, width:] > 0)[:, :, None, None], rows.into_slots(found), 0)
    return jnp.concatenate([of_prompt, found], 1)


# Which one


def choose(wanted: str, shape: TransformerConfig, dtype: str, *, scanned: bool, where: Where) -> Callable[..., Array]:
    """What computes attention over lines on these devices, with the signature of `attend_lines`.

    Args:
      wanted: "xla", which is `attend_lines`; "cudnn" or "splash"; "auto": cuDNN on a GPU and splash on a TPU, where
        they do what the model asks, else xla.
      dtype: of queries, keys and values.
      scanned: layers are scanned, and windows known only to the running program.

    Raises:
      UserError: what is wanted by name cannot be had here.
    """
    name = wanted
    if wanted == "auto":
        platform = where.mesh.devices.flat[0].platform
        name = next((name for name, home in PLATFORMS.items() if home == platform), "xla")
    if name == "xla":
        return attend_lines
    if why := refusal(name, shape, dtype, scanned, where):
        if wanted == "auto":
            return attend_lines
        raise UserError(f"config.model.attention = {wanted!r}: {why}; 'auto' takes what can be had, 'xla' always can")
    return partial(attend_rows, kernel=KERNELS[name], where=where)


def refusal(name: str, shape: TransformerConfig, dtype: str, scanned: bool, where: Where) -> str | None:
    """Why a kernel is not to be had, None if it is: what it cannot do, or what came of trying it."""
    (multiple, most), tensor = CUDNN_HEAD_DIM, where.mesh.shape["tensor"]
    if (found := where.mesh.devices.flat[0].platform) != PLATFORMS[name]:
        return f"runs on a {PLATFORMS[name]}, found a {found}"
    if any(shape.windows) and scanned:
        return "the model has windows, which it must know when it is compiled: set model.scan_layers = False"
    if shape.num_kv_heads % tensor:
        return f"config.mesh.tensor = {tensor} does not divide the model's {shape.num_kv_heads} key heads"
    if name == "cudnn" and shape.attention_softcap is not None:
        return "the model caps its scores, which cuDNN cannot"
    if name == "cudnn" and dtype not in CUDNN_DTYPES:
        return f"computes in {' or '.join(CUDNN_DTYPES)}, found config.model.dtype = {dtype!r}"
    if name == "cudnn" and (shape.head_dim % multiple or shape.head_dim > most):
        return f"wants heads of a multiple of {multiple} up to {most}, the model's have {shape.head_dim}"
    return trial(KERNELS[name], shape, dtype)


@cache
def trial(kernel: Kernel, shape: TransformerConfig, dtype: str) -> str | None:
    """What is wrong with a kernel on the first device here, None if nothing is: it is run on two small lines, forwards
    and backwards, and compared with `attend_lines`. What a driver or a library lacks is found out in no other way."""
    width, n, reach, lines = 24, 2, 40, 2
    windows = {min(window, 16) if window else None for window in shape.windows or (0,)}
    total = width + n * reach
    slot, token = jnp.arange(total)[None, :], jnp.arange(total) - width
    left, length = jnp.array([[0], [5]]), jnp.array([[reach, 7], [0, reach - 1]])
    own = (token % reach)[None, :]
    real = jnp.where(slot < width, slot >= left, own < jnp.repeat(length, reach, 1)[:, jnp.maximum(token, 0)])
    positions = jnp.maximum(jnp.where(slot < width, slot, width + own) - left, 0)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, shape.num_heads)
    keys = jax.random.split(jax.random.key(0), 4)
    drawn = (jax.random.normal(x, (lines, total, h, shape.head_dim)) for x, h in zip(keys, heads, strict=True))
    q, k, v, weight = drawn
    scale = shape.head_dim**-0.5 if shape.attention_scale is None else shape.attention_scale

    def outcome(attention: Callable[..., Array], window: int | None) -> list[Array]:
        def loss(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            how: dict[str, Any] = {"scale": scale, "window": window, "softcap": shape.attention_softcap}
            out = attention(q, k, v, positions, real.astype(jnp.int32), blocks=(width, n), **how).astype(jnp.float32)
            return (out * weight).sum(), out

        given = (x.astype(dtype) for x in (q, k, v))
        gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*given)
        return [out, *(x.astype(jnp.float32) for x in gradients)]

    try:
        with jax.default_device(jax.local_devices()[0]):
            for window in windows:
                found, expected = (outcome(f, window) for f in (partial(attend_rows, kernel=kernel), attend_lines))
                for name, a, b in zip(("output", "dq", "dk", "dv"), found, expected, strict=True):
                    # A few roundings of bfloat16; what sees too much or too little is off by more than that.
                    if not float(jnp.abs(a - b).max()) <= 0.05 * float(jnp.abs(b).max()):
                        return f"tried here, its {name} is not what xla computes (window {window})"
    except Exception as error:  # of whatever kind: by jax, by the compiler, by the driver
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"tried here, it failed ({first[:200]})"
    return None

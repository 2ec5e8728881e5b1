"""What test_sharding.py asks of eight devices about kernels for attention; a job of on_devices.py."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_llm.models.attention import attend_lines
from jaxrl_llm.models.fused_attention import attend_rows, cudnn
from jaxrl_llm.models.transformer import make_transformer
from jaxrl_llm.sharding import Layout, make_mesh, put
from jaxrl_llm.steps.scoring import score_tokens
from jaxrl_llm.types import Array, Batch, Params
from tests import tiny
from tests.cut_tokens import lines


def attention() -> dict[str, Any]:
    """Log-probs and their gradient, by a kernel on a mesh that cuts the residual stream's tokens too, and by plain
    products on one device; the rows and heads that the kernel was asked for; what is gathered with an axis of heads."""
    mesh, found = Layout(make_mesh(data=2, fsdp=2, tensor=2), sequence_parallel=True), {}
    for name, packed_width in (("blocks", None), ("packed", 54)):
        asked: set[tuple[int, int, int]] = set()

        def kernel(q: Array, k: Array, v: Array, real: Array, asked: set[Any] = asked, **how: Any) -> Array:
            asked.add((q.shape[0], q.shape[2], k.shape[2]))
            return cudnn(q, k, v, real, **how, implementation="xla")

        by_kernel = partial(attend_rows, kernel=kernel, where=mesh)
        found[name] = graded(mesh, by_kernel, packed_width) | {"asked": asked}
        found[name]["single"] = graded(Layout.single(), attend_lines, packed_width)["results"]
    return found


def graded(where: Layout, attention: Any, packed_width: int | None) -> dict[str, Any]:
    remat = "full" if packed_width else "none"
    model = make_transformer(tiny.SHAPE, constrain=where.constrain, attention=attention, remat=remat)

    def loss(params: Params, batch: Batch) -> tuple[Array, Array]:
        stats = score_tokens(model, params, batch, temperature=0.8, chunk_tokens=64, packed_width=packed_width)
        return (stats.log_probs * jax.numpy.cos(stats.log_probs)).sum(), stats.log_probs

    shardings = where.params(model.declare())
    run = jax.jit(jax.grad(loss, has_aux=True), out_shardings=(shardings, where.rows))
    given = jax.tree.map(put, tiny.params(), shardings), where.put_rows(lines(full=False))
    compiled: Any = run.lower(*given).compile()
    gradient, log_probs = jax.tree.map(np.asarray, compiled(*given))
    gathers = re.findall(r"f32\[\d+,\d+,\d+,\d+\]\S* all-gather", compiled.as_text())
    return {"results": (log_probs, gradient), "gathers": gathers}

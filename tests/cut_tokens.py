"""What test_sharding.py asks of eight devices about a residual stream that is cut along its tokens
(`model.sequence_parallel`); a job of on_devices.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.transformer import init_params, make_transformer, unstack_layers
from jaxrl_llm.sharding import Layout, make_mesh, put
from jaxrl_llm.steps.scoring import score_tokens
from jaxrl_llm.types import Batch, Model, Params
from tests import tiny

CUT = {
    "scanned, full": (True, "full"),
    "scanned, none": (True, "none"),
    "scanned, dots": (True, "dots"),
    "unrolled, full": (False, "full"),
    "unrolled, none": (False, "none"),
}


def sequence_parallel() -> dict[str, Any]:
    """How layers are run -> log-probs, loss and gradients on a mesh whose tensor axis cuts tokens, of rows that are
    full and of padded ones, in lines that it does not divide; "uncut" and "single" are without; and temporaries."""
    shape, mesh = dataclasses.replace(tiny.SHAPE, num_layers=4, num_kv_heads=4), make_mesh(data=1, fsdp=2, tensor=4)
    params = jax.tree.map(lambda x: 6 * x if x.ndim > 2 else x, init_params(make_transformer(shape), jax.random.key(0)))
    params["embed"] = 2 * params["embed"]
    found: dict[str, Any] = {}
    for name in ("single", "uncut", *CUT):
        scan, remat = CUT.get(name, (True, "full"))
        where = Layout.single() if name == "single" else Layout(mesh, sequence_parallel=name in CUT)
        model = make_transformer(shape, constrain=where.constrain, remat=remat)

        def loss(params: Params, batch: Batch, model: Model = model, scan: bool = scan) -> Any:
            entered = params if scan else unstack_layers(params)
            stats = score_tokens(model, entered, batch, temperature=0.8, chunk_tokens=64)
            assert stats.entropys is not None
            return (stats.log_probs * jnp.cos(stats.log_probs) - stats.entropys).sum(), stats

        shardings = where.params(model.declare())
        graded = jax.jit(jax.value_and_grad(loss, has_aux=True), out_shardings=((None, where.rows), shardings))
        given, rows = jax.tree.map(put, params, shardings), [where.put_rows(lines(full)) for full in (True, False)]
        compiled: Any = graded.lower(given, rows[0]).compile()
        found[name] = {
            "results": [jax.tree.map(np.asarray, compiled(given, batch)) for batch in rows],
            "temp": compiled.memory_analysis().temp_size_in_bytes,
        }
    return found


def lines(full: bool) -> Batch:
    """Four prompts of up to 12 tokens with three responses each of up to 18: a line is 12 + 3 · 17 tokens."""
    prompts, draw = tiny.prompts(4, 12), np.random.default_rng(1)
    length = np.full(12, 18) if full else draw.integers(0, 19, 12)
    evidence: dict[str, Any] = {
        "prompt_mask": np.ones((4, 12), bool) if full else prompts.prompt_mask,
        "responses": draw.integers(0, tiny.VOCAB, (12, 18), np.int32),
        "response_mask": np.arange(18)[None, :] < length[:, None],
        "response_length": length.astype(np.int32),
        "rollout_log_probs": None,
        "finish_reason": np.zeros(12, np.int32),
    }
    known = {"prompts": prompts.prompts, "prompt_valid": prompts.prompt_valid, "uid": jnp.repeat(prompts.uid, 3)}
    return Batch(**known, **evidence, record_arrays={})

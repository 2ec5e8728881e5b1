"""What a compiled program's text says: loops, matrix products, who exchanges with whom. (On real programs of several
devices: test_plan.py.)"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrl_llm import hlo

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
TEXT = """
HloModule jit_f, is_scheduled=true

%body (p.1: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p.1 = (s32[], f32[4,8]{1,0}) parameter(0)
  %g = f32[8,8]{1,0} all-gather(%x), channel_id=1, replica_groups=GROUPS, dimensions={0}, metadata={op_name="jit(f)/w"}
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%p.1)
}

%cond (p.2: (s32[], f32[4,8])) -> pred[] {
  ROOT %c = pred[] constant(true)
}

ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %d = f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %r = (f32[4,8]{1,0}, /*index=1*/bf16[2]{0}) all-reduce(%a, %a), replica_groups={{0,1},{2,3},{4,5},{6,7}}
  ROOT %w = (s32[], f32[4,8]{1,0}) while(%d), condition=%cond, body=%body, backend_config={TRIPS}
}
"""


def read(groups: str = "[4,2]<=[8]", trips: str = '"known_trip_count":{"n":"3"}') -> list[hlo.Collective]:
    return hlo.collectives(TEXT.replace("GROUPS", groups).replace("TRIPS", trips), MESH)


def test_a_loop_of_known_length_counts_its_rounds() -> None:
    reduced, gathered = read()
    assert (gathered.kind, gathered.times, gathered.per_token, gathered.op) == ("all-gather", 3, False, "jit(f)/w")
    assert (gathered.bytes, gathered.wire_bytes, gathered.shapes) == (256, 128, (("f32", (8, 8)),))
    assert (reduced.kind, reduced.times, reduced.bytes) == ("all-reduce", 1, 4 * 32 + 2 * 2)
    assert reduced.wire_bytes == reduced.bytes


def test_a_loop_of_unknown_length_is_told() -> None:
    gathered = read(trips="")[1]
    assert gathered.times == 1 and gathered.per_token


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("[4,2]<=[8]", ("tensor",)),
        ("[4,2]<=[4,2]T(1,0)", ("fsdp",)),
        ("[2,4]<=[4,2]T(1,0)", ("data", "fsdp")),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("[1,8]<=[8]", ("data", "fsdp", "tensor")),
        ("{}", ("data", "fsdp", "tensor")),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ("tensor",)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ("data", "fsdp")),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_0'}", ("tensor",)),
        ("mesh['axis_0'=8] {'axis_0':(2)2}", ("fsdp",)),
        ("something else", ("?",)),
    ],
)
def test_along_which_axes_devices_exchange(groups: str, axes: tuple[str, ...]) -> None:
    found = read(groups)[1]
    assert found.axes == axes
    assert found.devices == (0 if axes == ("?",) else 2 ** len(axes))


def test_what_one_device_does_alone_is_no_exchange() -> None:
    assert [c.kind for c in read("[8,1]<=[8]")] == ["all-reduce"]


def test_pairs_and_scatters_and_asynchronous_ones() -> None:
    lines = """
ENTRY %main (a: f32[4]) -> f32[4] {
  %p = f32[4]{0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}
  %s = f32[4]{0} reduce-scatter(%a), replica_groups=[4,2]<=[8], dimensions={0}
  %g = (f32[4]{0}, f32[8]{0}) all-gather-start(%a), replica_groups=[4,2]<=[8], dimensions={0}
  %d = f32[8]{0} all-gather-done(%g)
}
"""
    permuted, scattered, gathered = hlo.collectives(lines, MESH)
    assert (permuted.axes, permuted.bytes, permuted.wire_bytes) == (("tensor",), 16, 16)
    assert (scattered.bytes, scattered.wire_bytes) == (32, 16)
    assert (gathered.kind, gathered.bytes) == ("all-gather", 32)


def test_products_are_counted_with_their_loops() -> None:
    assert hlo.dot_flops(TEXT) == (2 * 4 * 4 * 8, 0)

    def f(x: jax.Array, w: jax.Array) -> Any:
        known = jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]
        return jax.lax.while_loop(lambda x: x.sum() < 1e3, lambda x: 2 * x @ w[0], known)

    x, w = jnp.ones((3, 16)), jnp.ones((5, 16, 16))
    text = jax.jit(f).lower(x, w).compile().as_text()
    each = 2 * 3 * 16 * 16
    assert text and hlo.dot_flops(text) == (5 * each, each)

"""Where arrays live: the mesh, the rules from logical axes to mesh axes, and the constraints that keep activations
there.

Mesh axes: `data` (rows), `fsdp` (rows, and parameters cut along their `embed` axis), `tensor` (heads, mlp, vocabulary,
experts).
Rows of a batch are spread over data and fsdp together. On one device every rule is the identity.

With `sequence_parallel` the residual stream is cut over `tensor` as well, along its tokens (Korthikanti et al. 2022,
arXiv:2205.05198): what lies between two products, and what a backward pass keeps of each layer, takes a share of the
memory. Products want all tokens; to gather them and to scatter their sums costs what the sums alone cost before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.errors import UserError
from jaxrl_llm.types import Array, Param

Tree = TypeVar("Tree")

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
RULES: dict[str, str | tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "expert": "tensor",
    "blocks": AXES,  # of tokens that go to one expert
    "length": "tensor",  # tokens of a row in the residual stream, with `Layout.sequence_parallel`
}  # any other logical axis ("layers", None) is not cut


def make_mesh(*, data: int, fsdp: int, tensor: int, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of `devices` (None: all of them), whose number is data · fsdp · tensor.

    Where a config may leave an axis open (−1), `config_devices.mesh_shape` decides on its size.

    Raises:
      ValueError: the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = (data, fsdp, tensor)
    if min(sizes) < 1 or math.prod(sizes) != len(devices):
        raise ValueError(f"a mesh of data={data}, fsdp={fsdp}, tensor={tensor} is not one of {len(devices)} device(s)")
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shardings on one mesh."""

    mesh: Mesh
    sequence_parallel: bool = False  # whether the axis "length" is cut

    @classmethod
    def single(cls) -> Layout:
        """One device, on which nothing is cut."""
        return cls(make_mesh(data=1, fsdp=1, tensor=1, devices=jax.devices()[:1]))

    @property
    def batch_shards(self) -> int:
        """Over how many parts the rows of a batch are spread."""
        return math.prod(self.mesh.shape[axis] for axis in BATCH_AXES)

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """Leading axis over data and fsdp, the rest whole."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    def named(self, axes: tuple[str | None, ...]) -> NamedSharding:
        uncut = () if self.sequence_parallel else ("length",)
        rules = (RULES.get(axis) if axis and axis not in uncut else None for axis in axes)
        return NamedSharding(self.mesh, PartitionSpec(*rules))

    def constrain(self, x: Array, axes: tuple[str | None, ...]) -> Array:
        """x, kept in the layout of its logical axes (for use under jit); blocks stay whole where the mesh does not
        divide their number, which no config decides on."""
        if self.mesh.size == 1:
            return x
        whole = [axis == "blocks" and size % self.mesh.size > 0 for size, axis in zip(x.shape, axes, strict=True)]
        axes = tuple(None if w else axis for w, axis in zip(whole, axes, strict=True))
        return jax.lax.with_sharding_constraint(x, self.named(axes))

    def on_shards(self, function: Callable[..., Array], given: Any, found: Any) -> Callable[..., Array]:
        """The function, computed by each device of its own share: for kernels, which the compiler cannot take apart.

        Args:
          given: the logical axes of each array that it is given; what they cut must divide.
          found: those of its result.
        """
        if self.mesh.size == 1:
            return function
        specs = [self.named(axes).spec for axes in (*given, found)]
        inputs, output = tuple(specs[:-1]), specs[-1]
        return jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=output, check_vma=False)

    def constrain_rows(self, tree: Any) -> Any:
        """Every leaf, kept with its leading axis over data and fsdp."""
        if self.mesh.size == 1:
            return tree
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, self.rows), tree)

    def undo_fsdp(self, params: Any, declaration: Any, only: str | None = None) -> Any:
        """Declared parameters, kept whole over fsdp (for use under jit).

        Args:
          only: a logical axis; what has no such axis stays as it is. None: nothing does.
        """
        declared = dict(jax.tree.flatten_with_path(declaration, is_leaf=lambda x: isinstance(x, Param))[0])

        def one(path: Any, x: Array) -> Array:
            if path not in declared:  # the scales of quantized kernels, which are small; layers that lie apart
                return x
            if only and only not in declared[path].axes:
                return x
            return self.constrain(x, tuple(None if RULES.get(a or "") == "fsdp" else a for a in declared[path].axes))

        return jax.tree_util.tree_map_with_path(one, params)

    def params(self, declaration: Any) -> Any:
        """The sharding of each declared parameter.

        Raises:
          UserError: naming the parameter, where a mesh axis does not divide the axis that it cuts.
        """

        def one(path: Any, leaf: Param) -> NamedSharding:
            for size, axis in zip(leaf.shape, leaf.axes, strict=True):
                rule = RULES.get(axis) if axis else None
                parts = self.mesh.shape[rule] if isinstance(rule, str) else 1
                if size % parts:
                    name = jax.tree_util.keystr(path, simple=True, separator=".")
                    raise UserError(
                        f"config.mesh.{rule} = {parts}: does not divide the axis {axis!r} ({size}) of {name} "
                        f"{list(leaf.shape)}"
                    )
            return self.named(leaf.axes)

        return jax.tree_util.tree_map_with_path(one, declaration, is_leaf=lambda x: isinstance(x, Param))

    def optimizer(self, optimizer: optax.GradientTransformation, declaration: Any) -> Any:
        """The sharding of each leaf of the optimizer's state: a parameter's moments lie where the parameter lies."""
        state = jax.eval_shape(optimizer.init, abstract(declaration))
        return optax.tree.map_params(
            optimizer,
            lambda _, sharding: sharding,
            state,
            self.params(declaration),
            transform_non_params=lambda _: self.replicated,
        )

    def put_rows(self, tree: Any) -> Any:
        """Host arrays, the same in every process, as arrays spread over the mesh along the leading axis."""
        return jax.tree.map(lambda x: put(x, self.rows), tree)

    def put_whole(self, tree: Any) -> Any:
        """Host arrays, the same in every process, as arrays that each device holds whole."""
        return jax.tree.map(lambda x: put(x, self.replicated), tree)


def put(x: Any, sharding: NamedSharding) -> Array:
    """A host array, the same in every process, with this sharding; each process puts down the parts of its devices."""
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda at: host[at])


def fetch(tree: Any) -> Any:
    """The arrays as numpy's, whole in every process. Where there are several, all of them must call it."""
    if all(
        not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated for x in jax.tree.leaves(tree)
    ):
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), tree)


def abstract(declaration: Any) -> Any:
    """The shapes and dtypes of declared parameters."""
    return jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), declaration, is_leaf=lambda x: isinstance(x, Param)
    )


def abstract_like(state: Tree) -> Tree:
    """The shapes, dtypes and shardings of `state`'s arrays, as compilation and `Checkpoints.restore` want them."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)

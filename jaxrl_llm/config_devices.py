"""The rules between a configuration and the devices that it runs on: the mesh, and how batches divide over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxrl_llm.config_roles import chosen_policy_loss, need_critic
from jaxrl_llm.errors import UserError

if TYPE_CHECKING:
    from jaxrl_llm.config import Config, Mesh


def mesh_shape(mesh: Mesh, n_devices: int) -> dict[str, int]:
    """{"data": …, "fsdp": …, "tensor": …} with the -1 filled in.

    Raises:
      UserError: the axes do not multiply to the number of devices.
    """
    sizes = {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor}
    known = 1
    for size in sizes.values():
        known *= size if size > 0 else 1
    free = [axis for axis, size in sizes.items() if size == -1]
    if n_devices % known or (not free and known != n_devices):
        axes = ", ".join(f"config.mesh.{axis} = {size}" for axis, size in sizes.items())
        raise UserError(f"{axes}: the axes must multiply to the number of devices, {n_devices}")
    return sizes | dict.fromkeys(free, n_devices // known)


def check_devices(config: Config, n_devices: int) -> dict[str, int]:
    """The mesh's shape, after checking that every batch divides over its rows' shards.

    Raises:
      UserError: listing each batch size that does not.
    """
    shape = mesh_shape(config.mesh, n_devices)
    shards = shape["data"] * shape["fsdp"]
    lines = []

    def divides(key: str, rows: int, unit: int, what: str) -> None:
        if rows % unit:
            lines.append(f"config.{key}: {what} must be a multiple of {unit}, found {rows}")

    where = f"{shards} shards (mesh {shape})"
    divides("data.train_batch_size", config.data.train_batch_size, shards, f"prompts a step, on {where},")
    parts = config.rollout.parts
    if parts > 1:
        what = f"prompts a step, in {parts} parts on {where},"
        divides("rollout.parts", config.data.train_batch_size, parts * shards, what)
    if config.data.eval:
        divides("eval.batch_size", config.eval.batch_size, shards, f"prompts at a time, on {where},")
    rows = config.data.train_batch_size * config.rollout.n
    score = config.trainer.score_micro_batch_size
    if score:
        what = f"train_batch_size x rollout.n rows, on {where} of {score} rows at a time,"
        divides("trainer.score_micro_batch_size", rows, shards * score, what)
    roles = [("actor", config.actor), *([("critic", config.critic)] if need_critic(config) else [])]
    for name, role in roles:
        micro = role.micro_batch_size or 1
        what = f"mini_batch_size x rollout.n rows, on {where} of {micro} row(s) at a time,"
        divides(f"{name}.micro_batch_size", role.mini_batch_size * config.rollout.n, shards * micro, what)
    micro, mini = config.actor.micro_batch_size, config.actor.mini_batch_size * config.rollout.n
    if micro and micro * shards != mini:
        reason = ""
        if chosen_policy_loss(config)[0].needs_whole_minibatch:
            reason = f"the loss {config.actor.policy_loss!r} selects over the whole mini-batch"
        elif config.actor.top_entropy_quantile < 1:
            reason = (
                f"actor.top_entropy_quantile = {config.actor.top_entropy_quantile} selects over the whole mini-batch"
            )
        if reason:
            lines.append(f"config.actor.micro_batch_size = {micro}: {reason}; set 0 (all {mini} rows at once)")
    if lines:
        raise UserError("\n  ".join([f"the configuration does not fit {n_devices} device(s):", *lines]))
    return shape

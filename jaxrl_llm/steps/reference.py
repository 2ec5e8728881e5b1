"""The KL reference that follows the actor: TRL's sync_ref_model; Gorbatovski et al. 2024, arXiv:2404.09656."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.types import Array, Params


def sync_reference(reference: Params, actor: Params, step: int | Array, *, every: int, alpha: float) -> Params:
    """The reference after `step` steps: alpha · actor + (1 − alpha) · reference if `every` divides `step`, else as it
    was.

    Args:
      reference, actor: trees of the same shapes; the average is computed in at least float32 and has the reference's
        dtype. With alpha 1 it is the actor, bit for bit.
      step: int [], the steps taken, with the one whose update `actor` is from.
      every: at least 1; alpha: in (0, 1].

    Under `jax.jit` no leaf of the result shares a buffer with the actor, which may be donated to the next update.
    """
    due = jnp.asarray(step) % every == 0

    def one(old: Array, new: Array) -> Array:
        if alpha == 1:
            mixed = new.astype(old.dtype)
        else:
            high = jnp.promote_types(old.dtype, jnp.float32)
            mixed = (alpha * new.astype(high) + (1 - alpha) * old.astype(high)).astype(old.dtype)
        return jnp.where(due, mixed, old)

    return jax.tree.map(one, reference, actor)

"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), its scalings as Hugging Face names them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.types import Array


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """How fast each pair of a head's entries turns with the position."""

    theta: float = 10_000.0
    kind: str = "default"  # default | linear | llama3 | yarn | longrope
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_positions: int = 8192  # llama3, yarn, longrope
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn, longrope: multiplies cosine and sine, so that scores grow by its square
    short_factors: tuple[float, ...] = ()  # longrope: what each frequency is divided by
    fraction: float = 1.0  # of each head that turns; the rest stays as it is


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per position: float32 [D / 2], theta^(−2i / D) before scaling, with D the part of the head that turns.

    linear: all divided by `factor` (arXiv:2306.15595). llama3: those that turn less than `low_freq_factor` times in the
    original length are, those that turn more than `high_freq_factor` times are not, between them a blend. yarn: the
    same with `beta_slow` and `beta_fast`, the blend linear in i (Peng et al. 2023, arXiv:2309.00071).
    longrope: each is divided by a factor of its own (Ding et al. 2024, arXiv:2402.13753).

    Raises:
      ValueError: a kind that is none of these, or a longrope whose factors are not D / 2.
    """
    size = int(head_dim * rope.fraction)
    frequencies = rope.theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_max_positions * frequencies / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        frequencies = _blend(frequencies, rope.factor, np.clip(blend, 0, 1))
    elif rope.kind == "yarn":

        def index(turns: float) -> float:
            """Of the frequency that turns so often in the original length."""
            return size * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

        low, high = index(rope.beta_fast), index(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)  # size, not its half: as the reference has it
        ramp = (np.arange(size // 2) - low) / (high - low if high != low else 0.001)
        frequencies = _blend(frequencies, rope.factor, 1 - np.clip(ramp, 0, 1))
    elif rope.kind == "longrope":
        if len(rope.short_factors) != size // 2:
            raise ValueError(f"rope.short_factors: expected {size // 2}, found {len(rope.short_factors)}")
        frequencies = frequencies / np.array(rope.short_factors)
    elif rope.kind != "default":
        raise ValueError(f"rope.kind: expected default, linear, llama3, yarn or longrope, found {rope.kind!r}")
    return frequencies.astype(np.float32)


def _blend(frequencies: np.ndarray, factor: float, kept: np.ndarray) -> np.ndarray:
    return (1 - kept) * frequencies / factor + kept * frequencies


def rope_tables(
    ropes: Sequence[RopeConfig | None], head_dim: int, positions: Array, dtype: Any, *, limit: int
) -> tuple[Array, Array]:
    """Cosine and sine of each position's angles: [B, T, 1, D / 2] of one rope, [K, B, T, 1, …] of K ropes.

    None does not turn at all: its angles are 0, and a rotation by them returns its input bit for bit.

    Args:
      positions: int32 [B, T], below `limit`; those of others are NaN.
    """

    def table(rope: RopeConfig | None) -> np.ndarray:
        frequencies = (rope_frequencies(rope, head_dim) if rope else np.zeros(head_dim // 2)).astype(dtype)
        angles = np.arange(limit, dtype=dtype)[:, None] * frequencies[None, :]
        factor = 1 if rope is None else rope.attention_factor
        return (factor * np.stack([np.cos(angles), np.sin(angles)])).astype(dtype)

    # Constants that are looked up. Computed from the positions, they were fused into each layer's rotations and so
    # computed again for every number that is turned.
    tables = jnp.asarray(np.stack([table(rope) for rope in ropes], 1))
    cos, sin = tables.at[:, :, positions].get(mode="fill", fill_value=jnp.nan)[:, :, :, :, None, :]
    return (cos[0], sin[0]) if len(ropes) == 1 else (cos, sin)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the two halves of the first D entries of each head [B, T, H, ≥ D] by the angles of its position; cos, sin
    [B, T, 1, D / 2]."""
    turning, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    first, second = jnp.split(turning.astype(cos.dtype), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
    return jnp.concatenate([turned, rest], -1) if rest.shape[-1] else turned

"""What distinguishes one decoder-only transformer from another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_llm.models.rope import RopeConfig
from jaxrl_llm.types import Array

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
}


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts in place of the MLP of every layer."""

    num_experts: int
    per_token: int
    width: int  # of each expert
    normalized: bool  # whether the weights of the chosen experts sum to 1


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Settings of the one transformer; the declaration and the forward pass read them, families.py fills them in."""

    vocab_size: int  # rows of the embedding
    real_vocab_size: int  # ids the tokenizer knows; rows past it are never sampled and never counted
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    max_positions: int
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # of attention
    mlp_bias: bool = False
    activation: str = "silu"
    embed_scale: float = 1.0  # what looked-up embeddings are multiplied by
    attention_scale: float | None = None  # of scores; None: 1/√head_dim
    attention_softcap: float | None = None  # scores become cap · tanh(score / cap)
    logit_softcap: float | None = None  # and the head's logits likewise
    norm_plus_one: bool = False  # norms multiply by 1 + weight
    pre_norms: bool = True  # attention and MLP see the normalized stream
    post_norms: bool = False  # what they give is normalized before it is added to the stream
    qk_norm: str = "none"  # none | head: queries and keys are normalized over each head | width: over all heads
    moe: MoeConfig | None = None
    # Of each layer, where layers differ; () means the same for all.
    windows: tuple[int, ...] = ()  # how many positions back a token sees, itself included; 0: all
    layer_ropes: tuple[RopeConfig | None, ...] = ()  # in place of `rope`; None: no rotation

    def __post_init__(self) -> None:
        for name in ("windows", "layer_ropes"):
            if len(getattr(self, name)) not in (0, self.num_layers):
                raise ValueError(f"{name}: expected one for each of {self.num_layers} layers, found {self!r}")

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The different ones, of which `LayerKind.rope` is an index."""
        return tuple(dict.fromkeys(self.layer_ropes)) or (self.rope,)


class LayerKind(NamedTuple):
    """In what one layer differs from another, beside its parameters; stacked like them where layers are scanned."""

    window: Array | np.ndarray | int | None = None  # None: a token sees all before it
    rope: Array | np.ndarray | int | None = None  # index into `TransformerConfig.ropes`; None where there is but one


def layer_kinds(config: TransformerConfig) -> list[LayerKind]:
    """One a layer, of Python numbers."""
    ropes = {rope: i for i, rope in enumerate(config.ropes)}
    windows = config.windows or (0,) * config.num_layers
    indices = [ropes[rope] for rope in config.layer_ropes] if len(ropes) > 1 else [None] * config.num_layers
    return [LayerKind(window or None, index) for window, index in zip(windows, indices, strict=True)]


def stack_kinds(kinds: list[LayerKind]) -> LayerKind:
    """int32 [L] each, for a scan over the layers; what no layer has stays None."""
    windows, indices = ([getattr(kind, name) for kind in kinds] for name in LayerKind._fields)
    everything = np.iinfo(np.int32).max  # a window that hides nothing
    return LayerKind(
        window=np.array([w or everything for w in windows], np.int32) if any(windows) else None,
        rope=np.array(indices, np.int32) if indices[0] is not None else None,
    )

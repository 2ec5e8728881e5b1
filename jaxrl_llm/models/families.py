"""Families of models: how each reads its Hugging Face config.json, and what its tensors are called.

A new family is one function and, where its tensors bear other names, one table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxrl_llm.errors import UserError, nearest
from jaxrl_llm.models.architecture import TransformerConfig
from jaxrl_llm.models.hf_config import HFConfig, activation, count, flag, number, read_rope, read_windows, whole


@dataclasses.dataclass(frozen=True)
class Weight:
    """One leaf of the parameters and its name in Hugging Face's files."""

    path: str  # in the tree of parameters, such as "layers/q/kernel"
    name: str  # in the files; "{layer}" where there is one tensor per layer
    transposed: bool = False  # torch keeps kernels as [outputs, inputs]


@dataclasses.dataclass(frozen=True)
class Family:
    """How one `model_type` is read and written."""

    config: Callable[[HFConfig], TransformerConfig]
    weights: tuple[Weight, ...]


def _kernel(name: str, module: str) -> Weight:
    return Weight(f"layers/{name}/kernel", f"model.layers.{{layer}}.{module}_proj.weight", transposed=True)


def _bias(name: str, module: str) -> Weight:
    return Weight(f"layers/{name}/bias", f"model.layers.{{layer}}.{module}_proj.bias")


def _norm(name: str, module: str) -> Weight:
    return Weight(f"layers/{name}", f"model.layers.{{layer}}.{module}.weight")


# Tables name every leaf that a family can have; a config decides which of them a model does have (an untied head).
QKV, OUTPUT = {name: f"self_attn.{name}" for name in "qkv"}, {"o": "self_attn.o"}
MLP = {name: f"mlp.{name}" for name in ("gate", "up", "down")}
TOP = (
    Weight("embed", "model.embed_tokens.weight"),
    Weight("final_norm", "model.norm.weight"),
    Weight("lm_head", "lm_head.weight", transposed=True),
)
PRE_NORMS = (_norm("attn_norm", "input_layernorm"), _norm("mlp_norm", "post_attention_layernorm"))
QK_NORMS = (_norm("q_norm", "self_attn.q_norm"), _norm("k_norm", "self_attn.k_norm"))
QKV_BIASES = tuple(_bias(*item) for item in QKV.items())
ATTENTION_BIASES = (*QKV_BIASES, _bias("o", "self_attn.o"))
MLP_BIASES = tuple(_bias(*item) for item in MLP.items())
PLAIN = (*TOP, *PRE_NORMS, *(_kernel(*item) for item in (QKV | OUTPUT | MLP).items()))


def _decoder(hf: HFConfig, *, theta: float = 10_000.0, **settings: Any) -> TransformerConfig:
    """What all families read alike, and `settings` beside it or in its place."""
    width, heads = count(hf, "hidden_size"), count(hf, "num_attention_heads")
    kv_heads = count(hf, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise UserError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    head_dim = count(hf, "head_dim", default=width // heads)
    if head_dim % 2:
        raise UserError(f"config.json: head_dim {head_dim} is odd, and rotary embedding turns pairs")
    read = {
        "vocab_size": count(hf, "vocab_size"),
        "real_vocab_size": count(hf, "vocab_size"),
        "num_layers": count(hf, "num_hidden_layers"),
        "width": width,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp_width": count(hf, "intermediate_size"),
        "max_positions": count(hf, "max_position_embeddings", default=2048),
        "rope": read_rope(hf, theta),
        "norm_eps": number({"rms_norm_eps": 1e-6, **hf}, "rms_norm_eps", ""),
        "tie_embeddings": flag(hf, "tie_word_embeddings"),
        "activation": activation(hf),
    }
    return TransformerConfig(**read | settings)


def _biases(hf: HFConfig) -> dict[str, bool]:
    """Of families whose attention has four biases or none."""
    return dict.fromkeys(("qkv_bias", "output_bias"), flag(hf, "attention_bias"))


def _llama(hf: HFConfig) -> TransformerConfig:
    return _decoder(hf, **_biases(hf), mlp_bias=flag(hf, "mlp_bias"))


def _mistral(hf: HFConfig) -> TransformerConfig:
    hf = {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096, **hf}
    return _decoder(hf, windows=read_windows(hf, sliding=lambda layer: True))


def _qwen2(hf: HFConfig) -> TransformerConfig:
    hf = {"max_position_embeddings": 32_768, "num_key_value_heads": 32, **hf}
    return _decoder(hf, qkv_bias=True, windows=_qwen_windows(hf))


def _qwen3(hf: HFConfig) -> TransformerConfig:
    hf = {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128, **hf}
    return _decoder(hf, **_biases(hf), qk_norm="head", windows=_qwen_windows(hf))


def _qwen_windows(hf: HFConfig) -> tuple[int, ...]:
    hf = {"sliding_window": 4096, **hf}
    if not flag(hf, "use_sliding_window"):
        hf["sliding_window"] = None
    first = 0 if hf["sliding_window"] is None else whole(hf, "max_window_layers", default=28)
    return read_windows(hf, sliding=lambda layer: layer >= first)


def _smollm3(hf: HFConfig) -> TransformerConfig:
    defaults = {"max_position_embeddings": 32_768, "num_key_value_heads": 4, "tie_word_embeddings": True}
    hf = {**defaults, **hf}
    layers, every = count(hf, "num_hidden_layers"), count(hf, "no_rope_layer_interval", default=4)
    turned = hf.get("no_rope_layers")  # 1 for a layer that has the rotation, whatever the name says
    turned = [int((i + 1) % every != 0) for i in range(layers)] if turned is None else turned
    if not isinstance(turned, list) or len(turned) < layers or any(x not in (0, 1) for x in turned):
        raise UserError(
            f"config.json: no_rope_layers: expected a list of 0 (no rotation) or 1, one for each of {layers} layers, "
            f"found {turned!r}"
        )
    if not flag(hf, "use_sliding_window"):
        hf["sliding_window"] = None
    rope = read_rope(hf, 2_000_000.0)
    return _decoder(
        hf,
        **_biases(hf),
        mlp_bias=flag(hf, "mlp_bias"),
        rope=rope,
        layer_ropes=tuple(rope if x else None for x in turned[:layers]),
        windows=read_windows(hf, sliding=lambda layer: not turned[layer]),
    )


FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, (*PLAIN, *ATTENTION_BIASES, *MLP_BIASES)),
    "mistral": Family(_mistral, PLAIN),
    "qwen2": Family(_qwen2, (*PLAIN, *QKV_BIASES)),
    "qwen3": Family(_qwen3, (*PLAIN, *ATTENTION_BIASES, *QK_NORMS)),
    "smollm3": Family(_smollm3, (*PLAIN, *ATTENTION_BIASES, *MLP_BIASES)),
}


def find_family(hf: HFConfig) -> Family:
    """The family of a config.json.

    Raises:
      UserError: its `model_type` is not supported; names those that are.
    """
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        raise UserError(f"config.json: model_type {kind!r} is not supported; {nearest(str(kind), FAMILIES)}")
    return FAMILIES[kind]


def transformer_config(hf: HFConfig) -> TransformerConfig:
    """The transformer that a config.json describes; `real_vocab_size` is its vocab_size until a tokenizer says less.

    Raises:
      UserError: a key that is missing or wrong, or something that is not supported: says which key and what is.
    """
    family = find_family(hf)
    if hf.get("quantization_config"):
        raise UserError(
            "config.json: quantization_config: quantized weights cannot be trained; give the original model"
        )
    return family.config(hf)

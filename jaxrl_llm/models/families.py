"""Families of models: how each reads its Hugging Face config.json, and what its tensors are called.

A new family is one function and, where its tensors bear other names, one table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.errors import UserError, nearest
from jaxrl_llm.models.transformer import ACTIVATIONS, RopeConfig, TransformerConfig

HFConfig = Mapping[str, Any]  # a config.json

# What each kind of rotary embedding needs beside its base, and where RopeConfig's fields bear other names.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
ROPE_FIELDS = {"rope_theta": "theta", "original_max_position_embeddings": "original_max_positions"}


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


def _projection(name: str, module: str) -> tuple[Weight, Weight]:
    prefix = f"model.layers.{{layer}}.{module}_proj"
    return (
        Weight(f"layers/{name}/kernel", f"{prefix}.weight", transposed=True),
        Weight(f"layers/{name}/bias", f"{prefix}.bias"),
    )


# Every leaf the family can have; a config decides which of them a model does have (biases, an untied head).
LLAMA_WEIGHTS = (
    Weight("embed", "model.embed_tokens.weight"),
    Weight("layers/attn_norm", "model.layers.{layer}.input_layernorm.weight"),
    *_projection("q", "self_attn.q"),
    *_projection("k", "self_attn.k"),
    *_projection("v", "self_attn.v"),
    *_projection("o", "self_attn.o"),
    Weight("layers/mlp_norm", "model.layers.{layer}.post_attention_layernorm.weight"),
    *_projection("gate", "mlp.gate"),
    *_projection("up", "mlp.up"),
    *_projection("down", "mlp.down"),
    Weight("final_norm", "model.norm.weight"),
    Weight("lm_head", "lm_head.weight", transposed=True),
)


def _llama(hf: HFConfig) -> TransformerConfig:
    width, heads = _count(hf, "hidden_size"), _count(hf, "num_attention_heads")
    kv_heads = _count(hf, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise UserError(f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    head_dim = _count(hf, "head_dim", default=width // heads)
    if head_dim % 2:
        raise UserError(f"config.json: head_dim {head_dim} is odd, and rotary embedding turns pairs")
    return TransformerConfig(
        vocab_size=_count(hf, "vocab_size"),
        real_vocab_size=_count(hf, "vocab_size"),
        num_layers=_count(hf, "num_hidden_layers"),
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=_count(hf, "intermediate_size"),
        max_positions=_count(hf, "max_position_embeddings", default=2048),
        rope=_rope(hf),
        norm_eps=_number({"rms_norm_eps": 1e-6, **hf}, "rms_norm_eps", ""),
        tie_embeddings=_flag(hf, "tie_word_embeddings"),
        attention_bias=_flag(hf, "attention_bias"),
        mlp_bias=_flag(hf, "mlp_bias"),
        activation=_activation(hf),
    )


def _mistral(hf: HFConfig) -> TransformerConfig:
    window = hf.get("sliding_window", 4096)  # a file without the key means transformers' default
    if window is not None:
        raise UserError(
            f"config.json: sliding_window {window} is not supported, only null (full attention). Of a model used on at "
            f"most {window} tokens, prompt and response together, it may be set to null: nothing changes"
        )
    # A Mistral has no biases, and its config.json does not ask for any.
    defaults = {"max_position_embeddings": 131_072, "num_key_value_heads": 8}
    return _llama({**defaults, **hf, "attention_bias": False, "mlp_bias": False})


FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, LLAMA_WEIGHTS),  # Llama 2 and 3, SmolLM2
    "mistral": Family(_mistral, LLAMA_WEIGHTS),
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


def _count(hf: HFConfig, key: str, *, default: int | None = None) -> int:
    """A positive whole number; null counts as absent, as it does in transformers."""
    value = hf.get(key)
    value = default if value is None else value
    if value is None:
        raise UserError(f"config.json: {key} is missing; {nearest(key, hf)}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"config.json: {key}: expected a positive whole number, found {value!r}")
    return value


def _flag(hf: HFConfig, key: str) -> bool:
    value = hf.get(key, False)
    if not isinstance(value, bool):
        raise UserError(f"config.json: {key}: expected true or false, found {value!r}")
    return value


def _activation(hf: HFConfig) -> str:
    name = hf.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise UserError(f"config.json: hidden_act {name!r} is not supported; valid: {', '.join(sorted(ACTIVATIONS))}")
    return name


def _number(found: Mapping[str, Any], key: str, where: str) -> float:
    value = found[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise UserError(f"config.json: {where}{key}: expected a positive number, found {value!r}")
    return value


def _rope(hf: HFConfig) -> RopeConfig:
    """`rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of the versions before.

    Where a file has several, precedence is transformers': `rope_scaling`, then `rope_parameters`, then the top level.
    """
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    top = {k: hf[k] for k in ("rope_theta", "partial_rotary_factor") if hf.get(k) is not None}
    found = {"rope_theta": 10_000.0, **top, **(hf.get(key) or {})}
    kind = found.pop("rope_type", found.pop("type", "default"))
    if found.pop("partial_rotary_factor", 1.0) != 1:
        raise UserError("config.json: partial_rotary_factor is not supported; valid: 1")
    if kind not in ROPE_KEYS:
        raise UserError(f"config.json: {key}: rope type {kind!r} is not supported; valid: {', '.join(ROPE_KEYS)}")
    if kind == "llama3":
        found.setdefault("original_max_position_embeddings", hf.get("max_position_embeddings"))
    takes = ("rope_theta", *ROPE_KEYS[kind])
    wrong = [f"{k!r} is missing" for k in takes if k not in found]
    wrong += [f"{k!r} is not known" for k in found if k not in (*takes, "original_max_position_embeddings")]
    if wrong:
        raise UserError(f"config.json: {key}: {wrong[0]}; type {kind!r} takes {', '.join(takes)}")
    numbers = {k: _number(found, k, f"{key}.") for k in takes}
    fields = {ROPE_FIELDS.get(k, k): value for k, value in numbers.items()}
    return RopeConfig(kind=kind, **fields)  # pyright: ignore[reportArgumentType]

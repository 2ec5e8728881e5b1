"""Families of models: how each reads its Hugging Face config.json, and what its tensors are called.

A family is one function, which says in what it differs from a plain decoder, and one table of names. docs/models.md
lists families, differences and what is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.architecture import MoeConfig, TransformerConfig
from jaxrl_llm.models.hf_config import (
    HFConfig,
    activation,
    count,
    flag,
    number,
    one_of,
    optional_number,
    read_local_and_global_rope,
    read_phi3_rope,
    read_rope,
    read_windows,
    whole,
)


@dataclasses.dataclass(frozen=True)
class Weight:
    """One leaf of the parameters and its name in Hugging Face's files.

    Several leaves of one name lie one after another along the first axis of one tensor, in the order of their parts.
    """

    path: str  # in the tree of parameters, such as "layers/q/kernel"
    name: str  # in the files; "{layer}" where there is one tensor per layer, "{expert}" where per expert of it
    transposed: bool = False  # torch keeps kernels as [outputs, inputs]
    part: int = 0


@dataclasses.dataclass(frozen=True)
class Family:
    """How one `model_type` is read and written."""

    config: Callable[[HFConfig], TransformerConfig]
    weights: tuple[Weight, ...]


def _kernel(name: str, module: str, part: int = 0) -> Weight:
    return Weight(f"layers/{name}/kernel", f"model.layers.{{layer}}.{module}_proj.weight", transposed=True, part=part)


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
    Weight("score", "score.weight"),  # of a reward model
)
PRE_NORMS = (_norm("attn_norm", "input_layernorm"), _norm("mlp_norm", "post_attention_layernorm"))
POST_NORMS = (
    _norm("attn_post_norm", "post_attention_layernorm"),
    _norm("mlp_post_norm", "post_feedforward_layernorm"),
)
GEMMA_NORMS = (
    _norm("attn_norm", "input_layernorm"),
    _norm("mlp_norm", "pre_feedforward_layernorm"),
    *POST_NORMS,
)
QK_NORMS = (_norm("q_norm", "self_attn.q_norm"), _norm("k_norm", "self_attn.k_norm"))
QKV_BIASES = tuple(_bias(*item) for item in QKV.items())
ATTENTION_BIASES = (*QKV_BIASES, _bias("o", "self_attn.o"))
MLP_BIASES = tuple(_bias(*item) for item in MLP.items())
FUSED = (
    *(_kernel(name, "self_attn.qkv", part) for part, name in enumerate("qkv")),
    *(_kernel(name, "mlp.gate_up", part) for part, name in enumerate(("gate", "up"))),
    _kernel("o", "self_attn.o"),
    _kernel("down", "mlp.down"),
)
ATTENTION = tuple(_kernel(*item) for item in (QKV | OUTPUT).items())
BARE = (*TOP, *ATTENTION, *(_kernel(*item) for item in MLP.items()))
EXPERTS = (
    Weight("layers/router/kernel", "model.layers.{layer}.mlp.gate.weight", transposed=True),
    *(
        Weight(f"layers/experts/{name}", f"model.layers.{{layer}}.mlp.experts.{{expert}}.{name}_proj.weight", True)
        for name in MLP
    ),
)
PLAIN = (*BARE, *PRE_NORMS)


def _decoder(hf: HFConfig, **settings: Any) -> TransformerConfig:
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
        "mlp_width": settings.get("mlp_width") or count(hf, "intermediate_size"),
        "max_positions": count(hf, "max_position_embeddings", default=2048),
        "rope": settings["rope"] if "rope" in settings else read_rope(hf, 10_000.0),
        "norm_eps": number({"rms_norm_eps": 1e-6, **hf}, "rms_norm_eps", ""),
        "tie_embeddings": flag(hf, "tie_word_embeddings"),
        "activation": settings.get("activation") or activation(hf),
    }
    return TransformerConfig(**read | settings)


def _biases(hf: HFConfig) -> dict[str, bool]:
    """Of families whose attention has four biases or none."""
    return dict.fromkeys(("qkv_bias", "output_bias"), flag(hf, "attention_bias"))


def _llama(hf: HFConfig) -> TransformerConfig:
    return _decoder(hf, **_biases(hf), mlp_bias=flag(hf, "mlp_bias"))


def _mistral(hf: HFConfig) -> TransformerConfig:
    hf = {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096, **hf}
    return _decoder(hf, windows=read_windows(hf))


def _qwen2(hf: HFConfig) -> TransformerConfig:
    hf = {"max_position_embeddings": 32_768, "num_key_value_heads": 32, **hf}
    return _decoder(hf, qkv_bias=True, windows=_qwen_windows(hf))


def _qwen3(hf: HFConfig) -> TransformerConfig:
    hf = {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "head_dim": 128, **hf}
    return _decoder(hf, **_biases(hf), qk_norm="head", windows=_qwen_windows(hf))


def _qwen3_moe(hf: HFConfig) -> TransformerConfig:
    hf = {"max_position_embeddings": 32_768, "num_key_value_heads": 4, "sliding_window": 4096, **hf}
    if hf.get("mlp_only_layers") or count(hf, "decoder_sparse_step", default=1) != 1:
        raise UserError(
            "config.json: mlp_only_layers and decoder_sparse_step: layers without experts among layers with them are "
            "not supported; valid: [] and 1"
        )
    if not flag(hf, "use_sliding_window"):
        hf["sliding_window"] = None
    experts, chosen = count(hf, "num_experts", default=128), count(hf, "num_experts_per_tok", default=8)
    if chosen > experts:
        raise UserError(f"config.json: num_experts_per_tok {chosen} is more than num_experts {experts}")
    width = count(hf, "moe_intermediate_size", default=768)
    return _decoder(
        hf,
        **_biases(hf),
        qk_norm="head",
        windows=read_windows(hf),
        mlp_width=width,
        moe=MoeConfig(experts, chosen, width, normalized=flag(hf, "norm_topk_prob")),
    )


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


def _gemma(hf: HFConfig, defaults: dict[str, Any], every: int, **settings: Any) -> TransformerConfig:
    """What both Gemmas have; every `every`-th layer sees all, the others `sliding_window` tokens."""
    common = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256}
    hf = {"sliding_window": 4096, **common, **defaults, **{k: v for k, v in hf.items() if v is not None}}
    if flag(hf, "use_bidirectional_attention"):
        raise UserError("config.json: use_bidirectional_attention is not supported; valid: false")
    return _decoder(
        hf,
        **_biases(hf),
        activation=activation(hf, "hidden_activation", "gelu_pytorch_tanh"),
        norm_plus_one=True,
        post_norms=True,
        embed_scale=math.sqrt(count(hf, "hidden_size")),
        attention_scale=number(hf, "query_pre_attn_scalar") ** -0.5,
        windows=read_windows(hf, sliding=lambda layer: (layer + 1) % every != 0),
        **settings,
    )


def _gemma2(hf: HFConfig) -> TransformerConfig:
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **hf}  # null: none
    return _gemma(
        hf,
        {"max_position_embeddings": 8192},
        every=2,
        attention_softcap=optional_number(caps, "attn_logit_softcapping"),
        logit_softcap=optional_number(caps, "final_logit_softcapping"),
    )


def _gemma3(hf: HFConfig) -> TransformerConfig:
    if hf.get("attn_logit_softcapping") is not None:
        raise UserError("config.json: attn_logit_softcapping is not supported of gemma3_text, only of gemma2")
    every = count(hf, "sliding_window_pattern", default=6)
    local_rope, global_rope = read_local_and_global_rope(hf, 10_000.0, 1_000_000.0)
    config = _gemma(
        hf,
        {"max_position_embeddings": 131_072},
        every=every,
        qk_norm="head",
        rope=global_rope,
        logit_softcap=optional_number(hf, "final_logit_softcapping"),
    )
    windows = config.windows or (0,) * config.num_layers
    return dataclasses.replace(config, layer_ropes=tuple(local_rope if w else global_rope for w in windows))


def _olmo2(hf: HFConfig) -> TransformerConfig:
    return _decoder({"rms_norm_eps": 1e-5, **hf}, **_biases(hf), pre_norms=False, post_norms=True, qk_norm="width")


def _phi3(hf: HFConfig) -> TransformerConfig:
    hf = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, **hf}
    rope = read_phi3_rope(hf)
    config = _decoder(hf, rope=rope, windows=read_windows(hf))
    turning = int(config.head_dim * rope.fraction)
    if turning % 2:
        raise UserError(
            f"config.json: partial_rotary_factor {rope.fraction}: turns an odd number of the {config.head_dim} entries "
            "of a head, and rotary embedding turns pairs"
        )
    if rope.kind == "longrope":
        if len(rope.short_factors) != turning // 2:
            raise UserError(
                f"config.json: rope_scaling.short_factor: expected {turning // 2} numbers, "
                f"found {len(rope.short_factors)}"
            )
        config = dataclasses.replace(config, max_positions=min(config.max_positions, rope.original_max_positions))
    return config


FAMILIES: dict[str, Family] = {
    "gemma2": Family(_gemma2, (*BARE, *GEMMA_NORMS, *ATTENTION_BIASES)),
    "gemma3_text": Family(_gemma3, (*BARE, *GEMMA_NORMS, *QK_NORMS, *ATTENTION_BIASES)),
    "llama": Family(_llama, (*PLAIN, *ATTENTION_BIASES, *MLP_BIASES)),
    "mistral": Family(_mistral, PLAIN),
    "olmo2": Family(_olmo2, (*BARE, *POST_NORMS, *QK_NORMS, *ATTENTION_BIASES)),
    "phi3": Family(_phi3, (*TOP, *FUSED, *PRE_NORMS)),
    "qwen2": Family(_qwen2, (*PLAIN, *QKV_BIASES)),
    "qwen3": Family(_qwen3, (*PLAIN, *ATTENTION_BIASES, *QK_NORMS)),
    "qwen3_moe": Family(_qwen3_moe, (*TOP, *PRE_NORMS, *QK_NORMS, *ATTENTION, *ATTENTION_BIASES, *EXPERTS)),
    "smollm3": Family(_smollm3, (*PLAIN, *ATTENTION_BIASES, *MLP_BIASES)),
}


def find_family(hf: HFConfig) -> Family:
    """The family of a config.json.

    Raises:
      UserError: its `model_type` is not supported; names those that are.
    """
    kind = hf.get("model_type")
    return FAMILIES[one_of(kind, sorted(FAMILIES), "model_type")]


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

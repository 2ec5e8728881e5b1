"""config.json -> TransformerConfig."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.errors import UserError
from jaxrl_llm.models.families import FAMILIES, transformer_config
from jaxrl_llm.models.rope import rope_frequencies
from jaxrl_llm.models.transformer import RopeConfig, make_transformer
from jaxrl_llm.types import Param

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
LLAMA3_ROPE = RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def config_of(**changes: Any):
    return transformer_config({**LLAMA, **changes})


def test_defaults_are_those_of_transformers() -> None:
    config = config_of()
    assert (config.num_kv_heads, config.head_dim, config.max_positions, config.norm_eps) == (4, 8, 2048, 1e-6)
    assert config.rope == RopeConfig(10_000.0, "default")
    assert not (config.tie_embeddings or config.qkv_bias or config.output_bias or config.mlp_bias)
    assert config.real_vocab_size == config.vocab_size == 97


def test_null_counts_as_absent() -> None:
    keys = ("num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters", "attention_bias", "hidden_act")
    assert config_of(**dict.fromkeys(keys)) == config_of()


def test_what_a_file_says_counts() -> None:
    config = config_of(head_dim=16, num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=True, mlp_bias=True)
    assert (config.head_dim, config.num_kv_heads, config.norm_eps) == (16, 2, 1e-5)
    assert config.tie_embeddings and config.mlp_bias and not config.qkv_bias


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"rope_theta": 500.0}, RopeConfig(500.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, RopeConfig(500.0)),
        ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4}}, RopeConfig(500.0, "linear", 4.0)),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
            RopeConfig(500.0, "linear", 4.0),
        ),
        ({"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}}, LLAMA3_ROPE),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3_SCALING}}, LLAMA3_ROPE),
        # Where a llama3 scaling does not say how far the original model went, max_position_embeddings does.
        (
            {
                "max_position_embeddings": 8192,
                "rope_theta": 500_000.0,
                "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            },
            LLAMA3_ROPE,
        ),
        # Both at once: what a writer of many versions' files leaves.
        ({"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, RopeConfig(500.0)),
    ],
)
def test_old_and_new_spellings_of_rope(found: dict[str, Any], expected: RopeConfig) -> None:
    assert config_of(**found).rope == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "lama"}, ["model_type 'lama'", "llama"]),
        ({"model_type": "gpt2"}, ["model_type 'gpt2'", "llama", "mistral"]),
        ({"model_type": None}, ["model_type None", "llama", "mistral"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'", "silu"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["'dynamic'", "default, linear, llama3, yarn"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["rope_parameters", "'factor' is missing"]),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, ["rope_scaling.factor", "-1.0", "positive"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["'full_attention' is not known"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["rope_scaling", "'factor' is missing", "beta_fast"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["'original_max_position_embeddings' is missing"]),
        ({"rope_scaling": YARN | {"finetuned": True}}, ["'finetuned' is not known"]),
        ({"rope_scaling": YARN | {"truncate": 1}}, ["truncate", "true or false", "1"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ({"head_dim": 7}, ["head_dim 7"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"num_hidden_layers": "2"}, ["num_hidden_layers", "'2'"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps", "0"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings", "'false'"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, ["use_bidirectional_attention", "false"]),
        ({"model_type": "gemma2", "hidden_activation": "silu2"}, ["hidden_activation 'silu2'", "gelu_pytorch_tanh"]),
        ({"model_type": "gemma2", "final_logit_softcapping": 0.0}, ["final_logit_softcapping", "0.0"]),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "gemma2"]),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default", "rope_theta": 1.0}},
            ["rope_parameters", "'rope_type' is not known", "full_attention, sliding_attention"],
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            ["rope_parameters.full_attention", "'dynamic'", "yarn"],
        ),
        ({"model_type": "gemma3"}, ["model_type 'gemma3'", "gemma3_text"]),
        ({"model_type": "mistral", "sliding_window": 0}, ["sliding_window", "positive", "0"]),
        (
            {"model_type": "mistral", "layer_types": ["full_attention"] * 2, "num_key_value_heads": 4},
            ["layer_types is not supported of model_type 'mistral'"],
        ),
        ({"model_type": "phi3", "rope_scaling": YARN}, ["'yarn' is not supported of phi3", "default, longrope"]),
        ({"model_type": "phi3", "partial_rotary_factor": 1.5}, ["partial_rotary_factor", "1.5"]),
        (
            {"model_type": "phi3", "partial_rotary_factor": 0.4},
            ["partial_rotary_factor 0.4", "odd number", "8 entries"],
        ),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": "1"}}, ["short_factor", "'1'"]),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0]}}, ["short_factor", "4", "1"]),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": -1}, ["max_window_layers", "-1"]),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, ["layer_types", "each of 2 layers"]),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]}, ["sliding_attention"]),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
            ["layer_types", "no sliding_window is in use"],
        ),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, ["mlp_only_layers", "decoder_sparse_step", "[] and 1"]),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, ["mlp_only_layers", "decoder_sparse_step"]),
        ({"model_type": "qwen3_moe", "num_experts": 4}, ["num_experts_per_tok 8", "num_experts 4"]),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, ["no_rope_layers", "each of 2 layers", "[1]"]),
        ({"model_type": "smollm3", "no_rope_layers": [1, 2]}, ["no_rope_layers", "[1, 2]"]),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, ["no_rope_layer_interval", "0"]),
    ],
)
def test_what_is_not_supported_says_what_is(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        config_of(**changes)
    for word in words:
        assert word in str(error.value)


STRANGE: tuple[Any, ...] = (
    *(None, 0, -1, 3, 1.5, 2**31, 10**30, math.nan, math.inf, True, "", "x", [], [1], ["x"], [None] * 2, {}, {"a": 1}),
    *({"rope_type": ["linear"]}, {"rope_type": None, "factor": 2}, {"full_attention": 5}, {"full_attention": [1]}),
    {"rope_type": "longrope", "short_factor": [True] * 4},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "attention_factor": "x"},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "factor": [4]},
    {"rope_type": "longrope", "short_factor": [math.inf] * 4},
    {"rope_type": "llama3", **LLAMA3_SCALING, "factor": math.inf},
    {"rope_type": "llama3", **LLAMA3_SCALING, "high_freq_factor": 1.0},
    YARN | {"rope_theta": 1},
    YARN | {"factor": math.nan},
)
KEYS = (
    *LLAMA,
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act", "hidden_activation"),
    *("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor", "layer_types"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "no_rope_layers"),
    *("no_rope_layer_interval", "attention_bias", "mlp_bias", "tie_word_embeddings", "quantization_config"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers"),
    *("decoder_sparse_step", "original_max_position_embeddings", "architectures", "id2label", "num_labels"),
)


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_whatever_stands_at_a_key_makes_a_model_or_is_refused_by_name(kind: str) -> None:
    """And no model whose frequencies are no numbers."""
    whole = {**LLAMA, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64, "num_experts": 8}
    made = 0
    for key in KEYS:
        for value in STRANGE:
            if key == "num_hidden_layers" and value == 3:
                continue
            try:
                config = transformer_config({**whole, "model_type": kind, key: value})
            except UserError as error:
                assert str(error).startswith("config.json: "), (key, value)
                continue
            make_transformer(config).declare()
            for rope in filter(None, config.ropes):
                assert np.isfinite(rope_frequencies(rope, config.head_dim)).all(), (key, value)
                assert math.isfinite(rope.attention_factor)
            made += 1
    assert made > 100


def test_layer_types_that_say_what_holds_anyway() -> None:
    full, sliding = ["full_attention"] * 2, ["sliding_attention"] * 2
    for kind, rest in (("mistral", {}), ("qwen3_moe", {"use_sliding_window": True, "num_experts": 8})):
        plain = {**LLAMA, "model_type": kind, "num_key_value_heads": 4, "head_dim": 8, **rest}
        for window, types in ((None, full), (3, sliding)):
            given = {**plain, "sliding_window": window}
            assert transformer_config({**given, "layer_types": types}) == transformer_config(given)
        with pytest.raises(UserError, match="all of whose layers are sliding_attention by its sliding_window"):
            transformer_config({**plain, "sliding_window": 3, "layer_types": full})


def test_mistral_without_a_window_is_a_llama() -> None:
    mistral = config_of(model_type="mistral", sliding_window=None, num_key_value_heads=2, max_position_embeddings=64)
    assert mistral == config_of(num_key_value_heads=2, max_position_embeddings=64)


FOUR = {"num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 8}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral"}, (4096,) * 4),  # transformers' default where the key is absent
        ({"model_type": "mistral", "sliding_window": 9}, (9,) * 4),
        ({"model_type": "qwen2"}, ()),
        ({"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 1}, ()),
        ({"model_type": "qwen2", "use_sliding_window": True}, ()),  # the first 28 layers have none
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3},
            (0, 0, 0, 9),
        ),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "max_window_layers": 3,
            },
            (4096, 0, 4096, 0),
        ),
        ({"model_type": "gemma2"}, (4096, 0, 4096, 0)),
        ({"model_type": "gemma2", "layer_types": ["full_attention"] * 4}, ()),
        ({"model_type": "gemma3_text"}, (4096,) * 4),  # every sixth layer sees all
        ({"model_type": "gemma3_text", "sliding_window": 9, "sliding_window_pattern": 3}, (9, 9, 0, 9)),
        ({"model_type": "smollm3", "sliding_window": 9}, ()),
        ({"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 9}, (0, 0, 0, 9)),
    ],
)
def test_which_layers_have_a_window(changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert config_of(**FOUR, **changes).windows == windows


def test_which_layers_have_no_rotation() -> None:
    config = config_of(**FOUR, model_type="smollm3")
    assert config.layer_ropes == (config.rope,) * 3 + (None,) and config.rope.theta == 2_000_000.0
    assert config.tie_embeddings
    config = config_of(**FOUR, model_type="smollm3", no_rope_layers=[0, 1, 1, 1, 0], rope_theta=5.0)
    assert config.layer_ropes == (None, *(RopeConfig(5.0),) * 3)
    assert len(config_of(**FOUR, model_type="smollm3", no_rope_layers=[1] * 4).ropes) == 1


LOCAL, GLOBAL = RopeConfig(10_000.0), RopeConfig(1_000_000.0)


@pytest.mark.parametrize(
    ("changes", "ropes"),
    [
        ({}, (LOCAL, GLOBAL)),
        ({"rope_local_base_freq": 7.0, "rope_theta": 70.0}, (RopeConfig(7.0), RopeConfig(70.0))),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            (LOCAL, RopeConfig(1_000_000.0, "linear", 8.0)),
        ),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                }
            },
            (RopeConfig(7.0), RopeConfig(1_000_000.0, "linear", 8.0)),
        ),
    ],
)
def test_layers_with_and_without_a_window_turn_at_their_own_speed(changes: Any, ropes: Any) -> None:
    config = config_of(**FOUR, model_type="gemma3_text", sliding_window_pattern=2, **changes)
    assert config.layer_ropes == ropes * 2


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"factor": 4.0}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
        ({"factor": 4.0, "attention_factor": 1.5, "mscale": 2.0, "mscale_all_dim": 1.0}, 1.5),
        ({"factor": 4.0, "mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"factor": 4.0, "mscale": 2.0, "attention_factor": None}, 0.1 * math.log(4) + 1),
    ],
)
def test_what_yarn_multiplies_cosine_and_sine_by(found: dict[str, Any], expected: float) -> None:
    rope = config_of(rope_scaling={"type": "yarn", **found}, max_position_embeddings=64).rope
    assert rope.attention_factor == pytest.approx(expected, rel=1e-12)
    assert (rope.original_max_positions, rope.beta_fast, rope.beta_slow, rope.truncate) == (64, 32.0, 1.0, True)


def test_longrope_goes_as_far_as_its_short_factors_do() -> None:
    scaling = {"type": "longrope", "short_factor": [1, 2, 3, 4], "long_factor": [9, 9, 9, 9]}
    lengths = {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096}
    config = config_of(model_type="phi3", rope_scaling=scaling, **lengths)
    assert config.max_positions == 4096
    assert config.rope.short_factors == (1, 2, 3, 4)
    assert config.rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)), rel=1e-12)
    config = config_of(model_type="phi3", rope_scaling={**scaling, "attention_factor": 1.25}, **lengths)
    assert config.rope.attention_factor == 1.25


def test_gemma2_has_caps_unless_told_otherwise() -> None:
    config = config_of(model_type="gemma2", num_key_value_heads=4)
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert (config.embed_scale, config.attention_scale) == (math.sqrt(32), 1 / 16)
    assert config.tie_embeddings and config.activation == "gelu_pytorch_tanh"
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = config_of(model_type="gemma2", num_key_value_heads=4, **caps)
    assert config.attention_softcap is None and config.logit_softcap is None


def test_settings_for_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"windows: .* each of 2 layers"):
        dataclasses.replace(config_of(), windows=(1, 2, 3))


# What a family's config.json must say for all that its table names to exist.
EVERYTHING: dict[str, dict[str, Any]] = {
    "gemma2": {"attention_bias": True, "tie_word_embeddings": False},
    "gemma3_text": {"attention_bias": True, "tie_word_embeddings": False},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "olmo2": {"attention_bias": True},
    "phi3": {},
    "qwen2": {},
    "qwen3": {"attention_bias": True},
    "qwen3_moe": {"attention_bias": True},
    "smollm3": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
}


def test_every_family_is_tested_in_whole() -> None:
    assert EVERYTHING.keys() == FAMILIES.keys()


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_table_names_all_that_a_model_can_have_and_no_more(kind: str) -> None:
    config = config_of(num_key_value_heads=4, model_type=kind, **EVERYTHING[kind])

    def paths(tree: Any, prefix: str = "") -> set[str]:
        if isinstance(tree, Param):
            return {prefix}
        return {path for name, child in tree.items() for path in paths(child, f"{prefix}/{name}".strip("/"))}

    table = [weight.path for weight in FAMILIES[kind].weights]
    assert len(table) == len(set(table))
    scorer = make_transformer(config, score_head=True).declare()  # with a reward model's head
    assert set(table) == paths(make_transformer(config).declare()) | paths(scorer)

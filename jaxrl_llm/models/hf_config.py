"""Reading a Hugging Face config.json: one value at a time, every error names the key and says what is supported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.errors import UserError, nearest
from jaxrl_llm.models.architecture import ACTIVATIONS
from jaxrl_llm.models.rope import RopeConfig

HFConfig = Mapping[str, Any]  # a config.json

# What each kind of rotary embedding needs beside its base, and where RopeConfig's fields bear other names.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
ROPE_FIELDS = {"rope_theta": "theta", "original_max_position_embeddings": "original_max_positions"}


def count(hf: HFConfig, key: str, *, default: int | None = None) -> int:
    """A positive whole number; null counts as absent, as it does in transformers."""
    value = hf.get(key)
    value = default if value is None else value
    if value is None:
        raise UserError(f"config.json: {key} is missing; {nearest(key, hf)}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"config.json: {key}: expected a positive whole number, found {value!r}")
    return value


def whole(hf: HFConfig, key: str, *, default: int) -> int:
    """A whole number of 0 or more."""
    return 0 if hf.get(key) == 0 and hf[key] is not False else count(hf, key, default=default)


def flag(hf: HFConfig, key: str) -> bool:
    value = hf.get(key, False)
    if not isinstance(value, bool):
        raise UserError(f"config.json: {key}: expected true or false, found {value!r}")
    return value


def activation(hf: HFConfig) -> str:
    name = hf.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise UserError(f"config.json: hidden_act {name!r} is not supported; valid: {', '.join(sorted(ACTIVATIONS))}")
    return name


LAYER_TYPES = ("full_attention", "sliding_attention")


def read_windows(hf: HFConfig, *, sliding: Callable[[int], bool]) -> tuple[int, ...]:
    """Of each layer, 0 for all; () if no layer has one. `layer_types` decides, where it is missing `sliding(layer)`."""
    layers, types = count(hf, "num_hidden_layers"), read_layer_types(hf)
    window = None if hf.get("sliding_window") is None else count(hf, "sliding_window")
    if types and window is None and "sliding_attention" in types:
        raise UserError("config.json: layer_types has 'sliding_attention', but no sliding_window is in use")
    slides = [kind == "sliding_attention" for kind in types] or [sliding(i) for i in range(layers)]
    return tuple(window if s else 0 for s in slides) if window is not None and any(slides) else ()


def read_layer_types(hf: HFConfig) -> list[str]:
    """One for each layer; empty if the file says nothing of them."""
    types = hf.get("layer_types")
    if types is None:
        return []
    layers = count(hf, "num_hidden_layers")
    if not isinstance(types, list) or len(types) != layers or any(kind not in LAYER_TYPES for kind in types):
        raise UserError(
            f"config.json: layer_types: expected one of {', '.join(LAYER_TYPES)} for each of {layers} layers, "
            f"found {types!r}"
        )
    return types


def number(found: Mapping[str, Any], key: str, where: str) -> float:
    value = found[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise UserError(f"config.json: {where}{key}: expected a positive number, found {value!r}")
    return value


def read_rope(hf: HFConfig, theta: float) -> RopeConfig:
    """`rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of the versions before.

    Where a file has several, precedence is transformers': `rope_scaling`, then `rope_parameters`, then the top level.
    """
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    top = {k: hf[k] for k in ("rope_theta", "partial_rotary_factor") if hf.get(k) is not None}
    found = {"rope_theta": theta, **top, **(hf.get(key) or {})}
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
    numbers = {k: number(found, k, f"{key}.") for k in takes}
    fields = {ROPE_FIELDS.get(k, k): value for k, value in numbers.items()}
    return RopeConfig(kind=kind, **fields)  # pyright: ignore[reportArgumentType]

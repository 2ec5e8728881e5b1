"""Reading a Hugging Face config.json: one value at a time, every error names the key and says what is supported."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxrl_llm.errors import UserError, nearest
from jaxrl_llm.models.architecture import ACTIVATIONS
from jaxrl_llm.models.rope import RopeConfig

HFConfig = Mapping[str, Any]  # a config.json

LARGEST = 2**31 - 1  # of whole numbers: what an int32 on a device holds
LAYER_TYPES = ("full_attention", "sliding_attention")

# What each kind of rotary embedding needs beside its base, what it may have, and where RopeConfig's fields bear other
# names. yarn's mscale and mscale_all_dim only stand for an attention_factor.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
ROPE_OPTIONS = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")}
ROPE_FIELDS = {"rope_theta": "theta", "original_max_position_embeddings": "original_max_positions"}


def count(hf: HFConfig, key: str, *, default: int | None = None) -> int:
    """A positive whole number; null counts as absent, as it does in transformers."""
    value = hf.get(key)
    value = default if value is None else value
    if value is None:
        raise UserError(f"config.json: {key} is missing; {nearest(key, hf)}")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
        raise UserError(f"config.json: {key}: expected a positive whole number (of 31 bits), found {value!r:.80}")
    return value


def whole(hf: HFConfig, key: str, *, default: int) -> int:
    """A whole number of 0 or more."""
    return 0 if hf.get(key) == 0 and hf[key] is not False else count(hf, key, default=default)


def flag(hf: HFConfig, key: str) -> bool:
    """True or false; what is absent or null is false."""
    value = False if hf.get(key) is None else hf[key]
    if not isinstance(value, bool):
        raise UserError(f"config.json: {key}: expected true or false, found {value!r}")
    return value


def activation(hf: HFConfig, key: str = "hidden_act", default: str = "silu") -> str:
    return one_of(hf.get(key) or default, ACTIVATIONS, key)


def one_of(name: Any, valid: Iterable[str], key: str, *, of: str = "") -> str:
    """The name itself, if it is a valid one; anything may stand where a name is expected."""
    valid = tuple(valid)
    if not isinstance(name, str) or name not in valid:
        raise UserError(f"config.json: {key} {name!r:.80} is not supported{of}; valid: {', '.join(valid)}")
    return name


def entry(found: Any, key: str) -> Mapping[str, Any]:
    """An object of the file; null is an empty one."""
    if found is not None and not isinstance(found, Mapping):
        raise UserError(f"config.json: {key}: expected an object or null, found {found!r:.80}")
    return found or {}


def optional_number(hf: HFConfig, key: str) -> float | None:
    return None if hf.get(key) is None else number(hf, key)


def read_windows(hf: HFConfig, *, sliding: Callable[[int], bool] | None = None) -> tuple[int, ...]:
    """Of each layer, 0 for all; () if no layer has one. `layer_types` decides, where it is missing `sliding(layer)`;
    without `sliding` all layers have the window, and `layer_types` may say no more than that."""
    layers, types = count(hf, "num_hidden_layers"), read_layer_types(hf)
    window = None if hf.get("sliding_window") is None else count(hf, "sliding_window")
    if types and sliding is None and set(types) != {LAYER_TYPES[window is not None]}:
        raise UserError(
            f"config.json: layer_types is not supported of model_type {hf['model_type']!r}, all of whose layers are "
            f"{LAYER_TYPES[window is not None]} by its sliding_window"
        )
    if types and window is None and "sliding_attention" in types:
        raise UserError("config.json: layer_types has 'sliding_attention', but no sliding_window is in use")
    slides = [kind == "sliding_attention" for kind in types] or [not sliding or sliding(i) for i in range(layers)]
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


def number(found: Mapping[str, Any], key: str, where: str = "") -> float:
    value = found[key]
    if not is_positive(value):
        raise UserError(f"config.json: {where}{key}: expected a positive number, found {value!r:.80}")
    return value


def is_positive(value: Any) -> bool:
    """Whether it is a number above 0, which JSON's NaN and Infinity are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def read_rope(hf: HFConfig, theta: float) -> RopeConfig:
    """`rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of the versions before.

    Where a file has several, precedence is transformers': `rope_scaling`, then `rope_parameters`, then the top level.
    """
    return _rope_of(hf, *_flat_rope(hf, theta))


def _flat_rope(hf: HFConfig, theta: float) -> tuple[str, dict[str, Any]]:
    key = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    top = {k: hf[k] for k in ("rope_theta", "partial_rotary_factor") if hf.get(k) is not None}
    return key, {"rope_theta": theta, **top, **entry(hf.get(key), key)}


def read_local_and_global_rope(hf: HFConfig, local_theta: float, global_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """Of layers with a window, and of those without: `rope_parameters` holds one for each layer type; or
    `rope_local_base_freq`, and `rope_theta` and `rope_scaling` for the layers without."""
    by_type = entry(hf.get("rope_parameters"), "rope_parameters")
    if unknown := [kind for kind in by_type if kind not in LAYER_TYPES]:
        raise UserError(
            f"config.json: rope_parameters: {unknown[0]!r} is not known; it takes one entry for each of "
            f"{', '.join(LAYER_TYPES)}"
        )

    def read(kind: str, base_key: str, theta: float, scaling: Mapping[str, Any]) -> RopeConfig:
        top = {"rope_theta": hf[base_key]} if hf.get(base_key) is not None else {}
        own = entry(by_type.get(kind), f"rope_parameters.{kind}")
        return _rope_of(hf, f"rope_parameters.{kind}", {"rope_theta": theta, **top, **own, **scaling})

    return (
        read("sliding_attention", "rope_local_base_freq", local_theta, {}),
        read("full_attention", "rope_theta", global_theta, entry(hf.get("rope_scaling"), "rope_scaling")),
    )


def read_phi3_rope(hf: HFConfig) -> RopeConfig:
    """Of Phi-3 and Phi-4: part of each head may stay as it is, and the one scaling is longrope, also called su.

    A longrope has factors for texts up to `original_max_position_embeddings` tokens and others for longer ones; only
    the first are read, since which of them holds would change in the middle of a response.
    """
    key, found = _flat_rope(hf, 10_000.0)
    kind = found.pop("type", "default")
    kind = found.pop("rope_type", kind)
    fraction = number(found, "partial_rotary_factor", f"{key}.") if "partial_rotary_factor" in found else 1.0
    found["partial_rotary_factor"] = 1.0
    if fraction > 1:
        raise UserError(f"config.json: partial_rotary_factor: expected at most 1, found {fraction!r}")
    if kind == "default":
        return dataclasses.replace(_rope_of(hf, key, found), fraction=fraction)
    if kind != "su":
        one_of(kind, ("default", "longrope"), f"{key}: rope type", of=" of phi3")
    factors, factor, attention = (found.pop(k, None) for k in ("short_factor", "factor", "attention_factor"))
    found.pop("long_factor", None)
    original = count(hf, "original_max_position_embeddings", default=4096)
    if not isinstance(factors, list) or not all(map(is_positive, factors)):
        raise UserError(f"config.json: {key}.short_factor: expected a list of positive numbers, found {factors!r:.80}")
    for name, value in (("factor", factor), ("attention_factor", attention)):
        if value is not None:
            number({name: value}, name, f"{key}.")
    if attention is None:
        factor = count(hf, "max_position_embeddings") / original if factor is None else factor
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return dataclasses.replace(
        _rope_of(hf, key, found),
        kind="longrope",
        fraction=fraction,
        short_factors=tuple(factors),
        attention_factor=attention,
        original_max_positions=original,
    )


def _rope_of(hf: HFConfig, key: str, entry: Mapping[str, Any]) -> RopeConfig:
    found = {k: value for k, value in entry.items() if value is not None}
    kind = found.pop("type", "default")
    kind = found.pop("rope_type", kind)
    if found.pop("partial_rotary_factor", 1.0) != 1:
        raise UserError("config.json: partial_rotary_factor is not supported; valid: 1")
    one_of(kind, ROPE_KEYS, f"{key}: rope type")
    if kind in ("llama3", "yarn"):
        found.setdefault("original_max_position_embeddings", hf.get("max_position_embeddings"))
    takes, options = ("rope_theta", *ROPE_KEYS[kind]), ROPE_OPTIONS.get(kind, ())
    wrong = [f"{k!r} is missing" for k in takes if found.get(k) is None]
    wrong += [f"{k!r} is not known" for k in found if k not in (*takes, *options, "original_max_position_embeddings")]
    if wrong:
        raise UserError(f"config.json: {key}: {wrong[0]}; type {kind!r} takes {', '.join((*takes, *options))}")
    flags = {k: flag(found, k) for k in options if k == "truncate" and k in found}
    numbers = {k: number(found, k, f"{key}.") for k in (*takes, *options) if k in found and k not in flags}
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise UserError(
            f"config.json: {key}: low_freq_factor {numbers['low_freq_factor']} must be below high_freq_factor "
            f"{numbers['high_freq_factor']}"
        )
    if kind == "yarn" and numbers["rope_theta"] <= 1:  # no frequency is lower than another
        raise UserError(f"config.json: {key}: type 'yarn' needs a rope_theta above 1, found {numbers['rope_theta']}")
    if kind == "yarn":
        numbers["attention_factor"] = _yarn_attention_factor(numbers)
    fields = {ROPE_FIELDS.get(k, k): value for k, value in (numbers | flags).items()}
    return RopeConfig(kind=kind, **fields)  # pyright: ignore[reportArgumentType]


def _yarn_attention_factor(found: dict[str, float]) -> float:
    """The given one, else 0.1 · ln(factor) + 1 (arXiv:2309.00071, section 3.4), or the quotient of two such with
    `mscale` and `mscale_all_dim` before the logarithm."""
    scales = [found.pop(k, None) for k in ("mscale", "mscale_all_dim")]

    def grown(scale: float) -> float:
        return 0.1 * scale * math.log(found["factor"]) + 1 if found["factor"] > 1 else 1.0

    first, second = scales
    computed = grown(1.0) if first is None or second is None else grown(first) / grown(second)
    return found.get("attention_factor", computed)

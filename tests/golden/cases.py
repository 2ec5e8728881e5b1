"""Reading cases, running them in their dtype, comparing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCES = {"float64": {"rtol": 1e-6, "atol": 1e-8}, "float32": {"rtol": 1e-4, "atol": 1e-6}}
INTEGER_INPUTS = ("index", "labels", "responses")
MASKS = ("mask", "response_mask", "attention_mask")


@dataclass(frozen=True)
class Case:
    """One case of an index, its arrays read."""

    id: str
    fn: str
    kwargs: dict[str, Any]
    dtype: str
    compare: str
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    raises: str | None = None
    quirk: str = ""
    scalar_names: list[str] = field(default_factory=list)

    @property
    def tolerance(self) -> dict[str, Any]:
        """Statistics that were computed in float32 agree to float32's tolerance."""
        return TOLERANCES["float32" if "in float32" in self.quirk else self.dtype]

    @property
    def mask(self) -> np.ndarray:
        return self.inputs["mask"] > 0


class Verdict(Enum):
    PASSED = "passed"
    BY_DESIGN = "differs by design"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    case: Case
    verdict: Verdict
    why: str = ""


Outputs = dict[str, np.ndarray]
Adapter = Callable[[Case, dict[str, jax.Array]], dict[str, Any]]


def read_cases(folder: Path) -> Iterator[Case]:
    """The cases of `folder/index.json`.

    Raises:
      ValueError: the index has another schema.
    """
    index = json.loads((folder / "index.json").read_text())
    if index["schema"] != 1:
        raise ValueError(f"{folder / 'index.json'}: schema {index['schema']!r}, expected 1")
    files: dict[str, Any] = {}
    for entry in index["cases"]:
        name = entry["file"]
        if name not in files:
            with np.load(folder / name, allow_pickle=False) as archive:
                files[name] = {key: archive[key] for key in archive.files}
        arrays = files[name]
        yield Case(
            id=entry["id"],
            fn=entry["fn"],
            kwargs=entry["kwargs"],
            dtype=entry["dtype"],
            compare=entry["compare"],
            inputs={argument: arrays[key] for argument, key in entry["inputs"].items()},
            outputs={output: arrays[key] for output, key in entry.get("outputs", {}).items()},
            raises=entry.get("raises"),
            quirk=entry.get("quirk") or "",
            scalar_names=entry.get("scalar_names") or [],
        )


def compute(case: Case, adapter: Adapter) -> Outputs:
    """What jaxrl_llm answers, in the case's dtype."""
    with jax.enable_x64(case.dtype == "float64"):
        found = adapter(case, {name: _cast(name, value, case.dtype) for name, value in case.inputs.items()})
        return {
            name: _scalars(case, value) if name == "scalars" else np.asarray(value) for name, value in found.items()
        }


def difference(
    case: Case, found: Outputs, compared: np.ndarray | None = None, skipped: frozenset[str] = frozenset()
) -> str:
    """What of the expected outputs is not found, in words; empty if all is.

    Args:
      compared: bool [B, R] or [B, 1], the entries that are compared; None for all. `compare: masked` narrows it to the
        mask.
      skipped: outputs and scalars that are not compared.
    """
    for name, expected in case.outputs.items():
        if name in skipped:
            continue
        if name not in found:
            return f"output {name!r} is missing"
        actual = found[name]
        if actual.shape != expected.shape:
            return f"{name}: shape {actual.shape}, expected {expected.shape}"
        part = np.ones(expected.shape, bool)
        if name == "scalars":
            part &= np.array([label not in skipped for label in case.scalar_names])
        elif expected.ndim == 2:
            part &= case.mask if case.compare == "masked" else True
            part &= True if compared is None else compared
        wrong = part & ~np.isclose(actual, expected, equal_nan=True, **case.tolerance)
        if name == "scalars":
            wrong &= ~_same_variance(case, actual, expected)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            label = f"{name}[{case.scalar_names[at[0]]}]" if name == "scalars" else f"{name}{list(at)}"
            return f"{label}: {actual[at]!r}, expected {expected[at]!r} ({wrong.sum()} of {part.sum()} differ)"
    return ""


def _same_variance(case: Case, actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Standard deviations are compared as variances: theirs are differences of squares, whose rounding the root blows
    up."""
    deviations = np.array([label.endswith("std") for label in case.scalar_names])
    return deviations & np.isclose(np.square(actual), np.square(expected), **case.tolerance)


def _cast(name: str, value: np.ndarray, dtype: str) -> jax.Array:
    if name in MASKS:
        return jnp.asarray(value > 0)
    if name not in INTEGER_INPUTS:
        return jnp.asarray(value.astype(dtype))
    return jnp.asarray(value if dtype == "float64" else value.astype(np.int32))


def _scalars(case: Case, found: dict[str, Any]) -> np.ndarray:
    missing = [name for name in case.scalar_names if name not in found]
    if missing:
        raise KeyError(f"scalars {missing} are missing; found {sorted(found)}")
    return np.asarray([float(found[name]) for name in case.scalar_names])

"""Prompts that come twice: within the training prompts, within a held-out set, and in both, which is leakage."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from jaxrl_llm.data import PromptData


def repeat_notices(train: PromptData | None, held_out: PromptData | None) -> list[str]:
    """What to tell of prompts whose token ids are equal; nothing where there are none.

    Found by 128-bit hashes of the ids, which takes some microseconds a prompt.
    """
    found = []
    trained = _first_of_each(train, range(len(train))) if train else {}
    if train:
        found += _repeats(train, range(len(train)), trained, "training prompts")
    if held_out is None:
        return found
    sets: dict[str, list[int]] = {}
    for index in range(len(held_out)):
        sets.setdefault(held_out.set_of(index), []).append(index)
    for name, indices in sets.items():
        found += _repeats(held_out, indices, _first_of_each(held_out, indices), f"held-out prompts of {name}")
        leaked = [index for index in indices if _digest(held_out, index) in trained]
        if leaked and train:
            first, known = held_out.where(leaked[0]), train.where(trained[_digest(held_out, leaked[0])])
            found.append(
                f"{len(leaked)} of {len(indices)} held-out prompts of {name} are also training prompts; "
                f"first: {first}, in training {known}"
            )
    return found


def _repeats(data: PromptData, indices: Iterable[int], first: dict[bytes, int], what: str) -> list[str]:
    indices = list(indices)
    again = [index for index in indices if first[_digest(data, index)] != index]
    if not again:
        return []
    earlier = data.where(first[_digest(data, again[0])])
    return [
        f"{len(again)} of {len(indices)} {what} repeat an earlier one; first: {data.where(again[0])} repeats {earlier}"
    ]


def _first_of_each(data: PromptData, indices: Iterable[int]) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    for index in indices:
        found.setdefault(_digest(data, index), index)
    return found


def _digest(data: PromptData, index: int) -> bytes:
    return hashlib.blake2b(data.ids(index).tobytes(), digest_size=16).digest()

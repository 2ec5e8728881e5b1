"""Prompts as texts, the same for every program."""

from __future__ import annotations

import numpy as np

DIGITS = "0123456789"


def records(count: int, length: int) -> list[dict[str, str]]:
    """Prompts of `length` digits: as many tokens for tokenizers that part digits, as the presets' and SmolLM2's do."""
    rng = np.random.default_rng(0)
    return [{"prompt": "".join(rng.choice(list(DIGITS), length))} for _ in range(count)]

"""Accelerators by their makers' data sheets, and sizes of models to plan with. docs/scaling.md names the pages."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jaxrl_llm.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator; G and T are 10^9 and 10^12."""

    name: str
    tflops: float  # TFLOP/s, dense, bfloat16
    memory: float  # GB
    bandwidth: float  # GB/s of that memory
    link: float  # GB/s that it sends to its neighbours over all of its links, one direction
    pod: int = 8  # chips that such links connect
    network: float = 0.0  # GB/s that it sends to other pods; 0: not known

    def speed(self, stride: int, count: int) -> float:
        """GB/s that a chip sends in a ring of `count` chips that lie `stride` apart; those within a pod share its
        network.

        >>> chip = Chip("", 1, 1, 1, link=450, pod=8, network=50)
        >>> chip.speed(1, 8), chip.speed(8, 4), chip.speed(2, 16)
        (450, 50, 200)
        """
        if stride * count <= self.pod:
            return self.link
        return min(self.link, self.network * max(self.pod // stride, 1))


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 197, 16, 819, 200, pod=256, network=3.1),
        Chip("v5p", 459, 95, 2765, 600, pod=8960, network=6.2),
        Chip("v6e", 918, 32, 1638, 400, pod=256),
        Chip("a100", 312, 80, 2039, 300, pod=8, network=25),
        Chip("h100", 989, 80, 3350, 450, pod=8, network=50),
        Chip("h200", 989, 141, 4800, 450, pod=8, network=50),
    )
}


# What jax calls a chip whose data sheet is above. (H100 and H200 as cards, PCIe and NVL, are slower ones.)
KINDS = {
    r"TPU v5( ?lite|e)": "v5e",
    r"TPU v5p?": "v5p",
    r"TPU v6( ?lite|e)": "v6e",
    r"NVIDIA A100\b.*": "a100",
    r"NVIDIA H100\b(?!.*(PCIe|NVL)).*": "h100",
    r"NVIDIA H200\b(?!.*NVL).*": "h200",
}


def chip_of(kind: str) -> Chip | None:
    """The data sheet of a device, by what jax calls its kind; None where there is none here.

    >>> chip_of("NVIDIA H100 80GB HBM3").name, chip_of("TPU v5 lite").name, chip_of("NVIDIA H100 PCIe"), chip_of("cpu")
    ('h100', 'v5e', None, None)
    """
    return next((CHIPS[name] for pattern, name in KINDS.items() if re.fullmatch(pattern, kind, re.I)), None)


def find_chip(text: str) -> Chip:
    """A chip by its name, or of numbers: TFLOP/s,GB,GB/s,link GB/s and perhaps pod,network GB/s.

    Raises:
      UserError: neither.

    >>> find_chip("100,24,900,50").memory
    24.0
    """
    if text.lower() in CHIPS:
        return CHIPS[text.lower()]
    parts = text.split(",")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if not 4 <= len(numbers) <= 6 or min(numbers) <= 0:
        raise UserError(
            f"--device {text}: expected a chip, or its TFLOP/s,GB,GB/s,link GB/s[,chips of a pod,network GB/s], all "
            f"above 0; {nearest(text.lower(), CHIPS)}"
        )
    pod = int(numbers[4]) if len(numbers) > 4 else 8
    return Chip(text, *numbers[:4], pod=pod, network=numbers[5] if len(numbers) > 5 else 0.0)


# The config.json of Qwen2.5-0.5B, Qwen2.5-7B and Llama-3.1-70B, as far as sizes go.
MODELS: dict[str, dict[str, Any]] = {
    "0.5b": {
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "max_position_embeddings": 32_768, "tie_word_embeddings": True,
    },
    "7b": {
        "model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 131_072, "tie_word_embeddings": False,
    },
    "70b": {
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "max_position_embeddings": 131_072, "tie_word_embeddings": False,
    },
}  # fmt: skip

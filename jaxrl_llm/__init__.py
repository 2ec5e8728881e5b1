"""PPO and GRPO for language models in JAX, purely functional.

import jaxrl_llm

config = jaxrl_llm.load_config("configs/smollm2_addition.py", {"trainer.steps": 40})
for metrics, batch in jaxrl_llm.fit(config):
    print(metrics["critic/score/mean"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_llm.command_line import load_config
    from jaxrl_llm.trainer import Run, fit

__all__ = ["Run", "fit", "load_config"]
_HOME = {"load_config": "jaxrl_llm.command_line", "fit": "jaxrl_llm.trainer", "Run": "jaxrl_llm.trainer"}


def __getattr__(name: str) -> Any:
    # Lazy: a reward worker that imports jaxrl_llm.rewards must not pull in jax.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)

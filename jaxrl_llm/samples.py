"""A batch as rows of plain values, for sample tables and rollout dumps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.data import PromptBatch
from jaxrl_llm.rewards import Scores
from jaxrl_llm.types import FINISH_STOP, Batch

# The per-token evidence of a row; what a batch does not have is left out.
PER_TOKEN = (
    "responses",
    "response_mask",
    "loss_mask",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "entropys",
    "values",
    "token_level_scores",
    "token_level_rewards",
    "rollout_is_weights",
    "advantages",
    "returns",
)


def rollout_rows(batch: Batch, given: PromptBatch, texts: Sequence[str], scored: Scores) -> list[dict[str, Any]]:
    """One dict a response: its texts, scores and all of its per-token evidence, cut to the response's length."""
    host: Batch = jax.device_get(batch)
    rows = []
    for row, text in enumerate(texts):
        length, prompt = int(host.response_length[row]), row // host.n
        valid = bool(host.row_valid[row]) if host.row_valid is not None else True
        scores = np.zeros(0) if host.scores is None else np.asarray(host.scores[row])
        found: dict[str, Any] = {
            "uid": int(host.uid[row]),
            "prompt": given.texts[prompt],
            "response": text,
            "valid": valid,
            "score": float(np.sum(host.token_level_scores[row])) if host.token_level_scores is not None else None,
            "scores": scores,
            "extras": scored.extras[row],
            "finish_reason": "stop" if host.finish_reason[row] == FINISH_STOP else "length",
            "length": length,
            "prompt_ids": host.prompts[prompt][host.prompt_mask[prompt]],
        }
        evidence = {name: getattr(host, name) for name in PER_TOKEN}
        found |= {name: value[row, :length] for name, value in evidence.items() if value is not None}
        own = found["response_mask"]
        if "advantages" in found:
            found["advantage"] = float(found["advantages"][own].mean()) if own.any() else 0.0
        rows.append(found)
    return rows


def sample_rows(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """A few rows to look at, from best to worst score, without their per-token evidence."""
    ranked = sorted(rows, key=lambda row: -(row["score"] or 0.0))
    picked = [ranked[i] for i in np.unique(np.linspace(0, len(ranked) - 1, count).round().astype(int))]
    left_out = {*PER_TOKEN, "prompt_ids", "scores"}
    return [{name: value for name, value in row.items() if name not in left_out} for row in picked]

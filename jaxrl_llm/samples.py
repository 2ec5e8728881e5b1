"""A batch as rows of plain values, for sample tables and rollout dumps."""

from __future__ import annotations

import codecs
import functools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.data import PromptBatch
from jaxrl_llm.rewards import Scores
from jaxrl_llm.sharding import fetch
from jaxrl_llm.tokenizer import token_bytes
from jaxrl_llm.types import FINISH_STOP, Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
# Tokens of a sample that are kept: so many from its start and its end.
TOKENS_AT_START, TOKENS_AT_END = 1500, 500


def rollout_rows(batch: Batch, given: PromptBatch, texts: Sequence[str], scored: Scores) -> list[dict[str, Any]]:
    """One dict a response: its texts, scores and all of its per-token evidence, cut to the response's length."""
    host: Batch = fetch(batch)
    rows = []
    for row, text in enumerate(texts):
        token_scores = host.token_level_scores
        length, prompt = int(host.response_length[row]), row // host.n
        valid = bool(host.row_valid[row]) if host.row_valid is not None else True
        scores = np.zeros(0) if host.scores is None else np.asarray(host.scores[row])
        found: dict[str, Any] = {
            "uid": int(host.uid[row]),
            "prompt": given.texts[prompt],
            "response": text,
            "valid": valid,
            "score": float(np.sum(token_scores[row])) if valid and token_scores is not None else None,
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


def sample_rows(rows: Sequence[dict[str, Any]], count: int, tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """A few rows to look at, best score first and failed ones last, with what a report shows of their tokens.

    `tokens` are texts, and beside each token stands its number in `advantages`, `log_probs` (old_log_probs, or the
    sampler's where no pass made them) and `ref_log_prob` where there is a reference; tool output, which is not the
    policy's, has its place in `not_own`. Of a very long response the middle is missing: `tokens_left_out` says after
    how many, and how many.
    """
    ranked = sorted(rows, key=lambda row: -row["score"] if row["score"] is not None else math.inf)
    picked = [ranked[i] for i in np.unique(np.linspace(0, len(ranked) - 1, count).round().astype(int))]
    left_out = {*PER_TOKEN, "prompt_ids", "scores"}
    return [
        {name: value for name, value in row.items() if name not in left_out} | _token_columns(row, tokenizer)
        for row in picked
    ]


def token_texts(tokenizer: PreTrainedTokenizerFast, ids: Iterable[int]) -> list[str]:
    """What each token adds to the text; control tokens by their names.

    A character that several tokens spell stands with the last of them and the others are empty, so that the texts
    joined are the text; bytes that never become a character are U+FFFD.
    """
    by_id, names = _vocabulary(tokenizer, len(tokenizer))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = []
    for i in ids:
        if name := names.get(int(i)):
            texts.append(decoder.decode(b"", final=True) + name)
        else:
            texts.append(decoder.decode(by_id[i] if i < len(by_id) else b""))
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


@functools.lru_cache(maxsize=4)
def _vocabulary(tokenizer: PreTrainedTokenizerFast, size: int) -> tuple[list[bytes], dict[int, str]]:
    """The bytes of each token by id, and the names of control tokens, of a tokenizer that has `size` of both."""
    names = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return token_bytes(tokenizer), names


def _token_columns(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    length = row["length"]
    middle = range(TOKENS_AT_START, max(TOKENS_AT_START, length - TOKENS_AT_END))
    kept = np.array([t for t in range(length) if t not in middle], int)
    log_probs = row.get("old_log_probs", row.get("rollout_log_probs"))
    columns = {"advantages": row.get("advantages"), "log_probs": log_probs, "ref_log_prob": row.get("ref_log_prob")}
    texts = token_texts(tokenizer, row["responses"].tolist())
    found: dict[str, Any] = {"tokens": [texts[t] for t in kept]}
    # Four digits, since the numbers are there to be coloured by; rollouts/ has them whole.
    for name, column in columns.items():
        if column is not None:
            found[name] = [float(f"{value:.4g}") for value in column[kept].tolist()]
    if not row["response_mask"].all():
        found["not_own"] = np.flatnonzero(~row["response_mask"][kept]).tolist()
    if len(middle):
        found["tokens_left_out"] = {"after": TOKENS_AT_START, "count": len(middle)}
    return found

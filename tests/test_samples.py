"""A batch as rows: tokens as texts, and the few rows that are shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from jaxrl_llm import samples
from jaxrl_llm.samples import sample_rows, token_texts
from jaxrl_llm.tokenizer import decode_response
from tests import tokenizers_for_tests

TOKENIZERS = [tokenizers_for_tests.byte_level, tokenizers_for_tests.sentence_pieces, tokenizers_for_tests.characters]
TEXT = "What is 3+4? naïve 日本 🎉 é\n\nthe answer"


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    return list(ids)


@pytest.mark.parametrize("make", TOKENIZERS)
def test_the_texts_joined_are_the_text(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    tokenizer = make()
    ids = encode(tokenizer, TEXT)
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    whole = "".join(texts).replace("<unk>", "")
    # A decoder of pieces drops the space that the first one begins with; the token has it nevertheless.
    assert whole.strip(" ") == decode_response(tokenizer, ids).strip(" ")


def test_a_character_of_several_tokens_stands_with_the_last() -> None:
    tokenizer = tokenizers_for_tests.byte_level()
    ids = encode(tokenizer, "🎉!")
    assert token_texts(tokenizer, ids) == ["", "", "", "🎉", "!"]
    assert token_texts(tokenizer, ids[:2]) == ["", "\ufffd"], "bytes that never become one"
    assert token_texts(tokenizer, [ids[0], ids[4]]) == ["", "\ufffd!"]
    end: Any = tokenizer.eos_token_id
    assert token_texts(tokenizer, [ids[0], end]) == ["", "\ufffd<|im_end|>"]
    assert token_texts(tokenizer, [10**6, ids[4]]) == ["", "!"], "a row of padding in the embedding"
    assert token_texts(tokenizer, []) == []


def row(tokenizer: PreTrainedTokenizerFast, text: str, score: float, **more: Any) -> dict[str, Any]:
    ids = np.array(encode(tokenizer, text))
    evidence = np.arange(len(ids)) / 3
    return {
        "response": text,
        "score": score,
        "scores": np.zeros(1),
        "length": len(ids),
        "responses": ids,
        "response_mask": np.ones(len(ids), bool),
        "rollout_log_probs": -evidence.astype(np.float32),
        "advantages": evidence.astype(np.float32),
        "prompt_ids": np.arange(3),
        **more,
    }


def test_what_a_sample_holds() -> None:
    """Beside each token its numbers; the sampler's log-probs only where no pass made others."""
    tokenizer = tokenizers_for_tests.characters()
    first = row(tokenizer, "abcd", 1.0)
    second = row(
        tokenizer, "ab", 0.0, old_log_probs=np.array([-0.123456789, -2.0]), ref_log_prob=np.array([-1.0, -3.0])
    )
    second["response_mask"] = np.array([True, False])
    best, worst = sample_rows([second, first], 2, tokenizer)
    assert best == {
        "response": "abcd",
        "score": 1.0,
        "length": 4,
        "tokens": ["a", "b", "c", "d"],
        "advantages": [0.0, 0.3333, 0.6667, 1.0],
        "log_probs": [0.0, -0.3333, -0.6667, -1.0],
    }
    assert worst["log_probs"] == [-0.1235, -2.0] and worst["ref_log_prob"] == [-1.0, -3.0] and worst["not_own"] == [1]
    json.dumps([best, worst])


def test_the_middle_of_a_long_response_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "TOKENS_AT_START", 3)
    monkeypatch.setattr(samples, "TOKENS_AT_END", 2)
    tokenizer = tokenizers_for_tests.characters()
    for text, tokens, left_out in (("abcdefgh", "abcgh", 3), ("abcde", "abcde", 0), ("ab", "ab", 0), ("", "", 0)):
        (found,) = sample_rows([row(tokenizer, text, 1.0)], 1, tokenizer)
        assert "".join(found["tokens"]) == tokens and len(found["advantages"]) == len(tokens)
        assert found.get("tokens_left_out") == ({"after": 3, "count": left_out} if left_out else None)


def test_from_best_to_worst() -> None:
    tokenizer = tokenizers_for_tests.characters()
    rows = [row(tokenizer, "a", score) for score in (0.0, 3.0, 1.0, 4.0, 2.0)] + [
        row(tokenizer, "a", 0.0) | {"score": None}
    ]
    assert [found["score"] for found in sample_rows(rows, 3, tokenizer)] == [4.0, 2.0, None]
    assert len(sample_rows(rows, 20, tokenizer)) == 6

"""Text as token ids that never become a control token, whatever it spells."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


class Control(NamedTuple):
    """A tokenizer's control tokens: those it calls special. (`<think>` of many models is not one of them.)"""

    ids: dict[str, int]
    forbidden: frozenset[int]  # what plain text may not become: these ids but for the one of unknown characters
    pattern: re.Pattern[str]
    bos: list[int]  # what the tokenizer puts before plain text: its BOS, or nothing
    strips_left: frozenset[str]  # those that swallow the white space before them
    strips_right: frozenset[str]  # and behind them


def encode_plain(
    tokenizer: PreTrainedTokenizerFast, text: str, control: Control, *, follows: bool = False
) -> list[int]:
    """The ids of `text` with no control token among them, whatever it spells; `follows`: it stands behind one."""
    check_characters(text)
    if follows and _starts_anew(tokenizer):
        return _guarded(_backend(tokenizer, "behind a control token"), text, tokenizer, control)
    ids: Any = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    if control.forbidden.isdisjoint(ids):
        return list(ids)
    return _guarded(_backend(tokenizer, "first"), text, tokenizer, control)


def _guarded(backend: Tokenizer, text: str, tokenizer: PreTrainedTokenizerFast, control: Control) -> list[int]:
    """The ids of `text`, cut wherever it became a control token: a unigram model has them among its ordinary pieces,
    and a normalizer makes them of other characters. No spelling is left whole."""
    encoded = backend.encode(text, add_special_tokens=False)
    if control.forbidden.isdisjoint(encoded.ids):
        return list(encoded.ids)
    if len(text) < 2:  # one character that is normalized to a control token; no tokenizer is known to have such
        return [tokenizer.unk_token_id] if isinstance(tokenizer.unk_token_id, int) else []
    cuts = {0, len(text)}
    for i, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
        if i in control.forbidden:
            cuts |= {start + 1} if end - start > 1 else {start, end}
    inside = _backend(tokenizer, "inside a text")
    pieces = [text[start:end] for start, end in itertools.pairwise(sorted(cuts))]
    return [
        i for at, piece in enumerate(pieces) for i in _guarded(inside if at else backend, piece, tokenizer, control)
    ]


def _starts_anew(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether the tokenizer treats the beginning of a text apart from what stands behind a control token."""
    return any(part.get("prepend_scheme") == "first" for part in _parts(_pieces_of(tokenizer)["pre_tokenizer"]))


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """The components of a tokenizer's normalizer or pre-tokenizer, which may be a sequence of them."""
    if isinstance(component, dict):
        yield component
        for key in ("normalizers", "pretokenizers"):
            for part in component.get(key) or ():
                yield from _parts(part)


@functools.lru_cache(maxsize=8)
def _pieces_of(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    backend = tokenizer.backend_tokenizer
    states = {name: getattr(backend, name) for name in ("normalizer", "pre_tokenizer")}
    return {name: None if part is None else json.loads(part.__getstate__()) for name, part in states.items()}


@functools.lru_cache(maxsize=8)
def _backend(tokenizer: PreTrainedTokenizerFast, place: str) -> Tokenizer:
    """A copy of the tokenizer that reads control tokens as text, and puts no space before a text that does not begin
    there: `place` is "first", "behind a control token" (where some put one, and some do not) or "inside a text"."""
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for part in _parts(state["pre_tokenizer"]):
        if place == "inside a text" or (place != "first" and part.get("prepend_scheme") == "first"):
            part |= {
                key: value for key, value in (("prepend_scheme", "never"), ("add_prefix_space", False)) if key in part
            }
    if place == "inside a text":
        for part in _parts({"normalizers": [state["normalizer"]]}):
            if "normalizers" in part:
                part["normalizers"] = [x for x in part["normalizers"] if not x or x["type"] != "Prepend"]
        if (state["normalizer"] or {}).get("type") == "Prepend":
            state["normalizer"] = None
    copy = Tokenizer.from_str(json.dumps(state))
    copy.encode_special_tokens = True
    return copy


def check_characters(text: str) -> None:
    """
    Raises:
      UserError: half of a character, which no tokenizer takes: the text was cut, or read in a wrong encoding.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(text[error.start]):04X}"
        raise UserError(f"character {error.start} of the text is half of one (a lone surrogate, {code})") from error


def control_tokens(tokenizer: PreTrainedTokenizerFast) -> Control:
    return _cached_control_tokens(tokenizer, len(tokenizer))


@functools.lru_cache(maxsize=8)
def _cached_control_tokens(tokenizer: PreTrainedTokenizerFast, size: int) -> Control:
    tokens = {token.content: (i, token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    pattern = "|".join(re.escape(content) for content in sorted(tokens, key=len, reverse=True))
    start = list(tokenizer("a", verbose=False)["input_ids"])[:1]
    return Control(
        ids={content: i for content, (i, _) in tokens.items()},
        forbidden=frozenset(i for i, _ in tokens.values() if i != tokenizer.unk_token_id),
        pattern=re.compile(pattern or r"(?!)"),
        bos=start if start == [tokenizer.bos_token_id] else [],
        strips_left=frozenset(content for content, (_, token) in tokens.items() if token.lstrip),
        strips_right=frozenset(content for content, (_, token) in tokens.items() if token.rstrip),
    )


def control_token_in(tokenizer: PreTrainedTokenizerFast, text: str) -> str | None:
    """The first control token that `text` spells, if any."""
    found = control_tokens(tokenizer).pattern.search(text)
    return found[0] if found else None

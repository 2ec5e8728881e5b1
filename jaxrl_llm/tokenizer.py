"""Hugging Face tokenizers, what their tokens spell, and stop strings. Without jax and torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_llm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(path_or_id: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a Hugging Face folder, or of a hub id. Without a pad token it pads with its end token.

    Raises:
      UserError: no such folder, nothing in it that can be read, or a hub that cannot be reached.
    """
    folder = Path(path_or_id).expanduser()
    is_folder = folder.is_dir()
    if not is_folder and (str(path_or_id).startswith(("/", ".", "~")) or len(folder.parts) > 2 or folder.exists()):
        raise UserError(f"tokenizer: {str(path_or_id)!r} is not a folder")
    if is_folder and not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        found = ", ".join(sorted(file.name for file in folder.iterdir())[:10]) or "nothing"
        if (folder / "adapter_config.json").exists():
            found += "; a LoRA adapter is no model: jaxrl_llm.export without --adapter writes the two merged"
        elif (folder / "checkpoints").is_dir():
            found += "; a run is no model: jaxrl_llm.export writes one of it"
        raise UserError(f"tokenizer: no tokenizer.json in {str(folder)!r} (found: {found})")
    # transformers' advice to install PyTorch would be the first line that a user sees, and it is wrong here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder if is_folder else path_or_id), local_files_only=is_folder)
    except Exception as error:  # every kind of damage raises another type, the tokenizers library's is a bare Exception
        where = "folder" if is_folder else "hub id (and there is no folder of that name)"
        raise UserError(f"tokenizer: cannot load {where} {str(path_or_id)!r}: {error}") from error
    if not tokenizer.is_fast:
        raise UserError(f"tokenizer: {str(path_or_id)!r} has no tokenizer.json, which is needed")
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token  # masks say what is padding, so no id need be set apart for it
    return tokenizer


def unknown_in(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    """The characters of a text that the tokenizer has no token for, and reads as its unknown token.

    Empty for a tokenizer that knows every byte, as most do.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None:
        return []
    ids = tokenizer(sorted(set(text)), add_special_tokens=False)["input_ids"] if text else []
    return [char for char, found in zip(sorted(set(text)), ids, strict=True) if unknown in found]


def decode_response(tokenizer: PreTrainedTokenizerFast, ids: Iterable[int]) -> str:
    """The text of a response without special tokens. Ids past the vocabulary (padding rows) give nothing."""
    known = [int(i) for i in ids if i < len(tokenizer)]
    text = tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> list[bytes]:
    """The bytes that each token adds to a text, by id; b"" for special tokens and for ids without a token."""
    backend = tokenizer.backend_tokenizer
    decoder = set(re.findall(r'"type": ?"(\w+)"', json.dumps(json.loads(backend.to_str())["decoder"])))
    vocabulary = {i: token for token, i in tokenizer.get_vocab().items()}
    result = [b""] * (max(vocabulary) + 1)
    added = tokenizer.added_tokens_decoder
    for i, token in added.items():
        result[i] = b"" if token.special else token.content.encode()
    plain = {i: token for i, token in vocabulary.items() if i not in added}
    if "ByteLevel" in decoder:
        alphabet = _byte_alphabet()
        for i, token in plain.items():
            result[i] = bytes(alphabet[c] for c in token) if set(token) <= alphabet.keys() else token.encode()
        return result
    # Other decoders treat the first token apart (leading spaces), so each is decoded behind a token that has a text.
    anchor = next(i for i in sorted(plain) if backend.decode([i]).isalnum())
    start = len(backend.decode([anchor]))
    texts = backend.decode_batch([[anchor, i] for i in plain], skip_special_tokens=False)
    for (i, token), text in zip(plain.items(), texts, strict=True):
        byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token) if "ByteFallback" in decoder else None
        result[i] = bytes.fromhex(byte[1]) if byte else text[start:].encode()
    return result


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character (Radford et al. 2019); this maps them back."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def stop_automaton(token_bytes: Sequence[bytes], stop_strings: Sequence[str], vocab_size: int) -> np.ndarray:
    """A table that finds stop strings across token borders: Aho & Corasick 1975 over bytes, then over tokens.

    Returns: int32 [S, vocab_size], next state by state and token. State 0 is the start, S - 1 means matched and is
    never left by itself; S >= 2 always (without stop strings no other state leads there). Tokens without bytes keep the
    state.

    Raises:
      UserError: a stop string is empty.

    >>> table = stop_automaton([b"a", b"ab", b"b"], ["abb"], 3)
    >>> state = 0
    >>> for token in [0, 1, 2]:
    ...     state = table[state, token]
    >>> bool(state == len(table) - 1)
    True
    """
    if any(not stop for stop in stop_strings):
        raise UserError(f"rollout.stop: a stop string may not be empty, found {list(stop_strings)!r}")
    by_byte = _byte_automaton([stop.encode() for stop in stop_strings])
    pieces = [*token_bytes[:vocab_size], *[b""] * (vocab_size - len(token_bytes))]
    lengths = np.array([len(piece) for piece in pieces])
    padded = np.zeros((vocab_size, max(lengths, default=0)), np.uint8)
    for i, piece in enumerate(pieces):
        padded[i, : len(piece)] = np.frombuffer(piece, np.uint8)
    table = np.repeat(np.arange(len(by_byte), dtype=np.int32)[:, None], vocab_size, axis=1)
    for position in range(padded.shape[1]):
        (live,) = np.nonzero(lengths > position)
        table[:, live] = by_byte[table[:, live], padded[live, position]]
    return table


def _byte_automaton(patterns: list[bytes]) -> np.ndarray:
    """int32 [S, 256]: a state for each proper prefix of a pattern, the empty one first, and `matched` last."""
    # A pattern that contains another is never the first to match; without such ones only whole patterns match.
    patterns = [p for p in patterns if not any(q in p and q != p for q in patterns)]
    prefixes = sorted({b""} | {p[:i] for p in patterns for i in range(len(p))}, key=len)
    number = {prefix: state for state, prefix in enumerate(prefixes)}
    matched = len(prefixes)
    table = np.zeros((matched + 1, 256), np.int32)
    table[matched] = matched
    for prefix, state in number.items():
        if prefix:  # where the longest proper suffix that is a state goes, unless the pattern continues
            table[state] = table[next(number[prefix[i:]] for i in range(1, len(prefix) + 1) if prefix[i:] in number)]
        for pattern in patterns:
            if pattern.startswith(prefix):
                table[state, pattern[len(prefix)]] = number.get(pattern[: len(prefix) + 1], matched)
    return table


def cut_at_stop(text: str, stop_strings: Iterable[str], *, after: int = 0) -> str:
    """The text before the first of the stop strings in it that ends beyond its first `after` characters.

    >>> cut_at_stop("7\\n\\nWhat is", ["\\n\\n", "What"])
    '7'
    >>> cut_at_stop("a.b.c", ["."], after=2)
    'a.b'
    """
    found = (text.find(stop, max(after - len(stop) + 1, 0)) for stop in stop_strings)
    return text[: min((at for at in found if at >= 0), default=len(text))]


def response_text(
    tokenizer: PreTrainedTokenizerFast,
    tokens: Sequence[int],
    stopped: bool,
    stop_ids: Iterable[int],
    stop: Iterable[str],
    min_new_tokens: int,
) -> str:
    """A response as people and rewards see it: no special tokens, cut before the stop token or string that ended it.

    Args:
      tokens: the response's own.
      stopped: whether it ended by itself.
      stop_ids, stop, min_new_tokens: what could end it, and after how many tokens at the earliest.
    """
    ids = list(tokens)
    if stopped and ids[-1] in stop_ids:
        ids.pop()
    # A stop string that was complete before it could end the response is part of it.
    held = decode_response(tokenizer, ids[: max(min_new_tokens - 1, 0)])
    return cut_at_stop(decode_response(tokenizer, ids), stop, after=len(held))

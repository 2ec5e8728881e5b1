"""The tokenizer of a GGUF file, from its metadata. (transformers can do that too, but only where torch is installed,
and it cuts text wrongly where it does not know the pre-tokenizer.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm.errors import UserError, nearest
from jaxrl_llm.models.gguf_fields import Fields
from jaxrl_llm.models.tensor_files import write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
WHOLES = "a list of whole numbers"
NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' names -> GGUF's
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # GGUF's types of tokens

# How text is cut before bytes are merged, by `tokenizer.ggml.pre`: a regular expression, or the steps that make it.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, str] = {
    "gpt-2": "",  # the byte-level pre-tokenizer's own
    "smollm": "digits",  # single digits, then as gpt-2
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": _TEKKEN,
}
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word that is a token is not cut and merged again
BEGINS = ("llama-bpe", "llama3", "llama-v3")  # put BOS before text unless the file says otherwise


def write_tokenizer(path: Path, folder: Path, fields: Fields, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template, if there is one.

    Args:
      path: of the GGUF file, for messages.
      fields: its metadata.

    Raises:
      UserError: something in them is missing or not supported.
    """
    tokens, kinds = _needed(fields, "tokens", "a list of texts"), _needed(fields, "token_type", WHOLES)
    if len(kinds) != len(tokens):
        raise UserError(
            f"{path}: tokenizer.ggml.token_type: expected one for each of {len(tokens)} tokens, found {len(kinds)}"
        )
    while tokens and kinds[len(tokens) - 1] == UNUSED:  # rows of the embedding that no text leads to
        tokens = tokens[:-1]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise UserError(f"{path}: tokenizer.ggml.tokens: {twice!r} stands there twice")
    named = {name: tokens[i] for name, key in NAMED.items() if (i := _token_id(fields, key, len(tokens))) is not None}
    for key in ("eot", "eom"):  # which end a response too
        _token_id(fields, key, len(tokens))
    model, pre = _needed(fields, "model", "one text"), fields.get("tokenizer.ggml.pre", "one text", None)
    if model == "gpt2":
        tokenizer, begins = _byte_level(path, fields, vocabulary), pre in BEGINS
    elif model == "llama":
        tokenizer, begins = _sentencepiece(path, fields, vocabulary, kinds, named.get("unk")), True
    else:
        raise UserError(f"{path}: tokenizer.ggml.model {model!r} is not supported; valid: 'gpt2', 'llama'")
    _add_special(tokenizer, tokens, kinds)
    if "bos" in named and fields.get("tokenizer.ggml.add_bos_token", "true or false", begins):
        _begin_with(tokenizer, named["bos"], vocabulary[named["bos"]])
    tokenizer.save(str(folder / TOKENIZER))
    if template := fields.get("tokenizer.chat_template", "one text", ""):
        (folder / TEMPLATE).write_text(template, encoding="utf-8")
    write_json(
        folder / TOKENIZER_CONFIG,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": token for name, token in named.items()},
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
        },
    )


def _needed(fields: Fields, name: str, kind: str) -> Any:
    return fields.get(f"tokenizer.ggml.{name}", kind)


def _token_id(fields: Fields, name: str, tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    found = fields.get(key, "one whole number", None)
    if found is not None and found >= tokens:
        raise UserError(f"{fields.path}: {key} = {found}: there are {tokens} tokens")
    return found


def _bpe(path: Path, merges: Any, **options: Any) -> Any:
    """
    Raises:
      UserError: a merge of tokens that there are not.
    """
    from tokenizers import models

    try:
        return models.BPE(merges=merges, **options)
    except Exception as error:  # the tokenizers library knows no other
        raise UserError(f"{path}: tokenizer.ggml.tokens and merges make no tokenizer: {error}") from error


def _byte_level(path: Path, fields: Fields, vocabulary: dict[str, int]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

    pre = _needed(fields, "pre", "one text")
    if pre not in SPLITS:
        raise UserError(
            f"{path}: tokenizer.ggml.pre {pre!r}: it is not known how this one cuts text; {nearest(pre, SPLITS)}"
        )
    merges = [tuple(merge.split(" ")) for merge in _needed(fields, "merges", "a list of texts")]
    if wrong := [i for i, pair in enumerate(merges) if len(pair) != 2]:
        text = " ".join(merges[wrong[0]])
        raise UserError(f"{path}: tokenizer.ggml.merges: expected two tokens and a space, found {text!r:.40}")
    tokenizer = Tokenizer(_bpe(path, merges, vocab=vocabulary, ignore_merges=pre in WHOLE_WORDS))
    space, split = fields.get("tokenizer.ggml.add_space_prefix", "true or false", False), SPLITS[pre]
    if split in ("", "digits"):
        digits = [pre_tokenizers.Digits(individual_digits=True)] if split else []
        steps = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=True)]
    else:
        cut = pre_tokenizers.Split(Regex(split), behavior="isolated")
        steps = [cut, pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    path: Path, fields: Fields, vocabulary: dict[str, int], kinds: Sequence[int], unknown: str | None
) -> Tokenizer:
    """BPE over characters, unknown ones as bytes: the tokenizer of Llama 2 and the first Mistrals."""
    from tokenizers import Tokenizer, decoders, normalizers

    scores = _needed(fields, "scores", "a list of numbers")
    if len(scores) < len(vocabulary):
        raise UserError(
            f"{path}: tokenizer.ggml.scores: expected one for each of {len(vocabulary)} tokens, found {len(scores)}"
        )
    merges = _merges(vocabulary, scores, kinds)
    options = {"vocab": vocabulary, "unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer(_bpe(path, merges, **options))
    space = fields.get("tokenizer.ggml.add_space_prefix", "true or false", True)
    underline = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), underline] if space else [underline])
    text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)] if space else text)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """The pairs that sentencepiece would merge, best first: a piece's score is that of the merge that makes it."""
    found = []
    for piece, i in vocabulary.items():
        if kinds[i] == NORMAL:
            pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
            known = ((vocabulary[a], vocabulary[b]) for a, b in pairs if a in vocabulary and b in vocabulary)
            found += [(-scores[i], i, *pair) for pair in known]
    pieces = list(vocabulary)
    return [(pieces[a], pieces[b]) for _, _, a, b in sorted(found)]


def _add_special(tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    from tokenizers import AddedToken

    def of_kind(*wanted: int) -> list[AddedToken]:
        chosen = (token for token, kind in zip(tokens, kinds, strict=False) if kind in wanted)
        return [AddedToken(token, special=UNKNOWN in wanted, normalized=False) for token in chosen]

    tokenizer.add_special_tokens(of_kind(UNKNOWN, CONTROL))
    tokenizer.add_tokens(of_kind(USER_DEFINED))  # such as <think>: never cut, but part of the text


def _begin_with(tokenizer: Tokenizer, bos: str, bos_id: int) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B:1"], special_tokens=[(bos, bos_id)]
    )

"""The tokenizer of a GGUF file, from its metadata. (transformers can do that too, but only where torch is installed,
and it cuts text wrongly where it does not know the pre-tokenizer.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_llm.errors import UserError, nearest
from jaxrl_llm.models.tensor_files import write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
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


def write_tokenizer(path: Path, folder: Path, fields: Mapping[str, Any], max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template, if there is one.

    Args:
      path: of the GGUF file, for messages.
      fields: its metadata.

    Raises:
      UserError: something in them is missing or not supported.
    """
    tokens, kinds = _needed(path, fields, "tokens"), _needed(path, fields, "token_type")
    while tokens and kinds[len(tokens) - 1] == UNUSED:  # rows of the embedding that no text leads to
        tokens = tokens[:-1]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise UserError(f"{path}: tokenizer.ggml.tokens: {twice!r} stands there twice")
    model, pre = _needed(path, fields, "model"), fields.get("tokenizer.ggml.pre")
    if model == "gpt2":
        tokenizer, begins = _byte_level(path, fields, vocabulary), pre in BEGINS
    elif model == "llama":
        tokenizer, begins = _sentencepiece(path, fields, vocabulary, kinds), True
    else:
        raise UserError(f"{path}: tokenizer.ggml.model {model!r} is not supported; valid: 'gpt2', 'llama'")
    _add_special(tokenizer, tokens, kinds)
    named = {
        name: tokens[i]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (i := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    if "bos" in named and fields.get("tokenizer.ggml.add_bos_token", begins):
        _begin_with(tokenizer, named["bos"], vocabulary[named["bos"]])
    tokenizer.save(str(folder / TOKENIZER))
    if template := fields.get("tokenizer.chat_template"):
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


def _needed(path: Path, fields: Mapping[str, Any], name: str) -> Any:
    if (found := fields.get(f"tokenizer.ggml.{name}")) is None:
        raise UserError(f"{path}: tokenizer.ggml.{name} is missing: the tokenizer cannot be made without it")
    return found


def _byte_level(path: Path, fields: Mapping[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = _needed(path, fields, "pre")
    if pre not in SPLITS:
        raise UserError(
            f"{path}: tokenizer.ggml.pre {pre!r}: it is not known how this one cuts text; {nearest(pre, SPLITS)}"
        )
    merges: list[tuple[str, str]] = [tuple(m.split(" ")) for m in _needed(path, fields, "merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in WHOLE_WORDS))
    space, split = bool(fields.get("tokenizer.ggml.add_space_prefix", False)), SPLITS[pre]
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
    path: Path, fields: Mapping[str, Any], vocabulary: dict[str, int], kinds: Sequence[int]
) -> Tokenizer:
    """BPE over characters, unknown ones as bytes: the tokenizer of Llama 2 and the first Mistrals."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(vocabulary, _needed(path, fields, "scores"), kinds),
            unk_token=None if unknown is None else list(vocabulary)[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = fields.get("tokenizer.ggml.add_space_prefix", True)
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

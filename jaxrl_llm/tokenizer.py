"""From text to token ids and back: Hugging Face tokenizers, chat templates, stop strings. Without jax and torch."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import UserError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Chat = Sequence[Mapping[str, Any]]  # messages: {"role": "user", "content": "…"}

# Some templates build a control token out of the role ("<|" + role + "|>"), so a role may not be just any string.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "model", "observation")
TEMPLATE_OPTIONS = ("tools", "documents", "add_generation_prompt", "continue_final_message")
PRIVATE_USE = range(0xE000, 0xF900)  # characters that belong to no alphabet


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


class _Control(NamedTuple):
    """A tokenizer's control tokens: those it calls special. (`<think>` of many models is not one of them.)"""

    ids: dict[str, int]
    forbidden: frozenset[int]  # what plain text may not become: these ids but for the one of unknown characters
    pattern: re.Pattern[str]
    bos: list[int]  # what the tokenizer puts before plain text: its BOS, or nothing


def unknown_in(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    """The characters of a text that the tokenizer has no token for, and reads as its unknown token.

    Empty for a tokenizer that knows every byte, as most do.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None:
        return []
    ids = tokenizer(sorted(set(text)), add_special_tokens=False)["input_ids"] if text else []
    return [char for char, found in zip(sorted(set(text)), ids, strict=True) if unknown in found]


def render_prompt(
    tokenizer: PreTrainedTokenizerFast,
    prompt: str | Chat,
    *,
    chat_template: bool = True,
    system_prompt: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids of a prompt, begun by exactly one BOS if the tokenizer begins text with one.

    With `chat_template` a string becomes one user message, `system_prompt` the first message unless the chat brings a
    system message, and `template_kwargs` variables of the template. Only the template writes control tokens: where the
    text itself spells one, it is encoded as the characters it is made of.

    Raises:
      UserError: no template, a template that fails (with its message), a malformed chat, an unknown template variable.
    """
    control = _control_tokens(tokenizer)
    if chat_template:
        messages = _messages(prompt, system_prompt)
        ids = _render_chat(tokenizer, messages, template_kwargs or {}, control)
    elif not isinstance(prompt, str):
        raise UserError("the prompt is a list of chat messages, which needs data.chat_template=True")
    elif system_prompt:
        raise UserError("data.system_prompt needs data.chat_template=True")
    else:
        ids = _encode_plain(tokenizer, prompt, control)
    return _begun(ids, control)


def _begun(ids: list[int], control: _Control) -> list[int]:
    """The ids behind exactly one BOS, if the tokenizer begins text with one."""
    if control.bos:
        while ids[:1] == control.bos:  # the template's own
            ids = ids[1:]
    return control.bos + ids


def render_exchange(
    tokenizer: PreTrainedTokenizerFast,
    prompt: str | Chat,
    response: str | Chat,
    *,
    eos_id: int,
    chat_template: bool = True,
    system_prompt: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids of a prompt and the response to it, as a reward model reads them.

    With `chat_template` the response is the assistant's turn (or given as the messages that follow the prompt's), and
    the template ends it; without, both are plain text and `eos_id` ends them. Neither text ever becomes a control
    token. The other arguments and BOS are as in `render_prompt`.

    Raises:
      UserError: as `render_prompt`; or a response that is neither text nor messages.
    """
    control = _control_tokens(tokenizer)
    if chat_template:
        answer = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
        if not isinstance(answer, Sequence) or not answer:
            raise UserError(f"a response is a string or a list of chat messages, found {response!r:.80}")
        question = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = _messages([*question, *answer], system_prompt)
        kwargs = {**(template_kwargs or {}), "add_generation_prompt": False}
        ids = _render_chat(tokenizer, messages, kwargs, control)
    elif not isinstance(prompt, str) or not isinstance(response, str):
        raise UserError("prompt or response is a list of chat messages, which needs the chat template")
    else:
        ids = [*(i for text in (prompt, response) for i in _encode_plain(tokenizer, text, control)), eos_id]
    return _begun(ids, control)


def render_observation(
    tokenizer: PreTrainedTokenizerFast,
    prompt: str | Chat,
    message: Mapping[str, Any],
    *,
    end_ids: Collection[int],
    turn_ended: bool,
    chat_template: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids that stand between a turn that was sampled and the next one: the end of that turn, if it has not got one,
    the message in between, and what begins the next turn. The sampled ids themselves are never encoded again.

    With `chat_template` they are what the template writes behind an assistant's turn; without, the message's text.

    Args:
      prompt: what the conversation began with.
      message: of the environment, {"role": "tool", "content": "7"}.
      end_ids: the model's end tokens.
      turn_ended: whether the sampled turn ended with one of them.

    Raises:
      UserError: the template refuses the message, leaves out the turn before it, or ends that without an end token.
    """
    control = _control_tokens(tokenizer)
    if not chat_template:
        return _encode_plain(tokenizer, str(message["content"]), control)
    opening = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    unused = next(chr(code) for code in reversed(PRIVATE_USE) if chr(code) not in str((opening, message)))
    messages = _messages([*opening, {"role": "assistant", "content": unused}, message], None)
    text, spelled = _chat_text(tokenizer, messages, template_kwargs or {}, control)
    _, found, behind = text.partition(unused)
    if not found:
        raise UserError("the chat template leaves out an assistant's turn that a message follows")
    ids = _encode_chat(tokenizer, behind, spelled, control)
    end = next((at for at, i in enumerate(ids) if i in end_ids), None)
    if end is None:
        raise UserError(
            "the chat template ends an assistant's turn without an end token of the model, so that no message can "
            f"follow it (end tokens: {sorted(end_ids)})"
        )
    return ids[end + turn_ended :]


def encode_response(tokenizer: PreTrainedTokenizerFast, text: str, eos_id: int) -> list[int]:
    """The ids of a response to be learned: plain text, which never becomes a control token, and the end."""
    return [*_encode_plain(tokenizer, text, _control_tokens(tokenizer)), eos_id]


def _messages(prompt: str | Chat, system_prompt: str | None) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not prompt:
        raise UserError(f"a prompt is a string or a list of chat messages, found {prompt!r:.80}")
    for i, message in enumerate(prompt):
        if not isinstance(message, Mapping) or "role" not in message or not {"content", "tool_calls"} & set(message):
            raise UserError(f"message {i} of the prompt needs 'role' and 'content', found {message!r:.80}")
        if message["role"] not in ROLES:
            raise UserError(f"message {i} of the prompt has role {message['role']!r:.40}; valid: {', '.join(ROLES)}")
    messages = [dict(message) for message in prompt]
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _render_chat(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict], template_kwargs: Mapping[str, Any], control: _Control
) -> list[int]:
    return _encode_chat(tokenizer, *_chat_text(tokenizer, messages, template_kwargs, control), control)


def _chat_text(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict], template_kwargs: Mapping[str, Any], control: _Control
) -> tuple[str, dict[str, str]]:
    """What the template writes, with control tokens that the messages spell swapped for marks, and those marks."""
    import jinja2

    try:
        template = tokenizer.get_chat_template()
        _check_template_kwargs(template, template_kwargs)
        spelled, marked = _mark_control_tokens(messages, control.pattern)
        options: dict[str, Any] = {"add_generation_prompt": not template_kwargs.get("continue_final_message", False)}
        text = tokenizer.apply_chat_template(marked, **{**options, **template_kwargs, "tokenize": False})
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template refuses the prompt: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if tokenizer.chat_template is None:
            raise UserError("the tokenizer has no chat template; set data.chat_template=False") from error
        raise UserError(f"the chat template fails: {type(error).__name__}: {error}") from error
    assert isinstance(text, str)
    return text, spelled


def _encode_chat(
    tokenizer: PreTrainedTokenizerFast, text: str, spelled: Mapping[str, str], control: _Control
) -> list[int]:
    """The ids of (a part of) what a template wrote; what marks stand for comes back as plain text."""
    if not spelled:  # the usual case, and token for token what transformers does
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        written = [control.ids[match[0]] for match in control.pattern.finditer(text)]
        # They differ where the tokenizer's own normalization makes a control token of other characters.
        if [i for i in ids if i in control.forbidden] == [i for i in written if i in control.forbidden]:
            return ids
    ids, end = [], 0
    for match in control.pattern.finditer(text):
        ids += _encode_plain(tokenizer, _unmark(text[end : match.start()], spelled), control)
        ids.append(control.ids[match[0]])
        end = match.end()
    return ids + _encode_plain(tokenizer, _unmark(text[end:], spelled), control)


def _check_template_kwargs(template: str, template_kwargs: Mapping[str, Any]) -> None:
    """A template ignores a variable it does not know, so a misspelt `enable_thinking` would go unnoticed."""
    known = {*re.findall(r"[A-Za-z_]\w*", template), *TEMPLATE_OPTIONS}
    for name in template_kwargs:
        if name not in known:
            raise UserError(f"data.template_kwargs: the chat template does not use {name!r}; {nearest(name, known)}")


def _mark_control_tokens(messages: list[dict], pattern: re.Pattern[str]) -> tuple[dict[str, str], list[dict]]:
    """(mark -> the control token it stands for, the messages with marks). A mark is a number in unused brackets."""
    everything = json.dumps(messages, ensure_ascii=False, default=str)
    unused = (chr(code) for code in PRIVATE_USE if chr(code) not in everything)
    opening, closing = next(unused), next(unused)
    marks: dict[str, str] = {}

    def mark(match: re.Match[str]) -> str:
        return marks.setdefault(match[0], f"{opening}{len(marks)}{closing}")

    def mark_message(message: dict) -> dict:
        marked = _map_strings(message, lambda text: pattern.sub(mark, text))
        return marked | {"role": message["role"]}

    marked = [mark_message(message) for message in messages]
    return {name: spelling for spelling, name in marks.items()}, marked


def _map_strings(value: Any, function: Callable[[str], str]) -> Any:
    match value:
        case str():
            return function(value)
        case Mapping():
            return {key: _map_strings(item, function) for key, item in value.items()}
        case list() | tuple():
            return [_map_strings(item, function) for item in value]
        case _:
            return value


def _unmark(text: str, spelled: Mapping[str, str]) -> str:
    for mark, spelling in spelled.items():
        text = text.replace(mark, spelling)
    return text


def _encode_plain(tokenizer: PreTrainedTokenizerFast, text: str, control: _Control) -> list[int]:
    """The ids of `text` with no control token among them, whatever it spells."""
    ids = list(tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"])
    if control.forbidden.isdisjoint(ids):
        return ids
    # A unigram model has its control tokens among the ordinary pieces: leave it no spelling that is whole.
    cuts = [0, *(match.start() + 1 for match in control.pattern.finditer(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
    encoded = tokenizer(pieces, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    return [i for piece in encoded for i in piece if i not in control.forbidden]


def _control_tokens(tokenizer: PreTrainedTokenizerFast) -> _Control:
    return _cached_control_tokens(tokenizer, len(tokenizer))


@functools.lru_cache(maxsize=8)
def _cached_control_tokens(tokenizer: PreTrainedTokenizerFast, size: int) -> _Control:
    ids = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    pattern = "|".join(re.escape(content) for content in sorted(ids, key=len, reverse=True))
    start = list(tokenizer("a", verbose=False)["input_ids"])[:1]
    bos = start if start == [tokenizer.bos_token_id] else []
    forbidden = frozenset(i for i in ids.values() if i != tokenizer.unk_token_id)
    return _Control(ids, forbidden, re.compile(pattern or r"(?!)"), bos)


def control_token_in(tokenizer: PreTrainedTokenizerFast, text: str) -> str | None:
    """The first control token that `text` spells, if any."""
    found = _control_tokens(tokenizer).pattern.search(text)
    return found[0] if found else None


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

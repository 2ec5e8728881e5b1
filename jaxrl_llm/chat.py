"""Prompts and responses as token ids: chat templates, exactly one BOS, and text that never becomes a control token."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm.errors import UserError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Chat = Sequence[Mapping[str, Any]]  # messages: {"role": "user", "content": "…"}

# Some templates build a control token out of the role ("<|" + role + "|>"), so a role may not be just any string.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "model", "observation")
TEMPLATE_OPTIONS = ("tools", "documents", "add_generation_prompt", "continue_final_message")
PRIVATE_USE = range(0xE000, 0xF900)  # characters that belong to no alphabet


class _Control(NamedTuple):
    """A tokenizer's control tokens: those it calls special. (`<think>` of many models is not one of them.)"""

    ids: dict[str, int]
    forbidden: frozenset[int]  # what plain text may not become: these ids but for the one of unknown characters
    pattern: re.Pattern[str]
    bos: list[int]  # what the tokenizer puts before plain text: its BOS, or nothing


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
    """Control tokens in the messages are swapped for marks while the template renders, and come back as plain text."""
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

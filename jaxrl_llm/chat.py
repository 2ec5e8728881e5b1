"""Prompts and responses as token ids: chat templates, exactly one BOS, and text that never becomes a control token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl_llm.control_tokens import Control, check_characters, control_tokens, encode_plain
from jaxrl_llm.errors import UserError, nearest, of_kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Chat = Sequence[Mapping[str, Any]]  # messages: {"role": "user", "content": "…"}

# Some templates build a control token out of the role ("<|" + role + "|>"), so a role may not be just any string.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "model", "observation")
TEMPLATE_OPTIONS = ("tools", "documents", "add_generation_prompt", "continue_final_message")
PRIVATE_USE = range(0xE000, 0xF900)  # characters that belong to no alphabet


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
    control = control_tokens(tokenizer)
    if chat_template:
        with of_kind("malformed chat"):
            messages = _messages(prompt, system_prompt)
        with of_kind("template error"):
            ids = _render_chat(tokenizer, messages, template_kwargs or {}, control)
    elif not isinstance(prompt, str):
        raise UserError("the prompt is a list of chat messages, which needs data.chat_template=True")
    elif system_prompt:
        raise UserError("data.system_prompt needs data.chat_template=True")
    else:
        ids = encode_plain(tokenizer, prompt, control)
    return _begun(ids, control)


def _begun(ids: list[int], control: Control) -> list[int]:
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
    control = control_tokens(tokenizer)
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
        ids = [*(i for text in (prompt, response) for i in encode_plain(tokenizer, text, control)), eos_id]
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
    control = control_tokens(tokenizer)
    if not chat_template:
        return encode_plain(tokenizer, str(message["content"]), control)
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
    return [*encode_plain(tokenizer, text, control_tokens(tokenizer)), eos_id]


def _messages(prompt: str | Chat, system_prompt: str | None) -> list[dict[str, Any]]:
    """The messages as dicts, without the fields that are None: Parquet gives every message the fields of them all."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes) or not prompt:
        raise UserError(f"a prompt is a string or a list of chat messages, found {prompt!r:.80}")
    messages = []
    for i, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            raise UserError(f"message {i} of the prompt needs 'role' and 'content', found {message!r:.80}")
        given = {key: value for key, value in message.items() if value is not None}
        content = given.get("content")
        if "role" not in given or (content is None and not given.get("tool_calls")):
            raise UserError(f"message {i} of the prompt needs 'role' and 'content', found {dict(message)!r:.80}")
        if given["role"] not in ROLES:
            raise UserError(f"message {i} of the prompt has role {given['role']!r:.40}; valid: {', '.join(ROLES)}")
        parts = list(content) if isinstance(content, list | tuple) else None
        if not (content is None or isinstance(content, str) or (parts and all(isinstance(x, Mapping) for x in parts))):
            expected = 'text, or a list of parts such as {"type": "text", "text": "…"}'
            raise UserError(f"message {i} of the prompt: its content is {expected}; found {content!r:.40}")
        if parts is not None:
            given["content"] = [{k: v for k, v in part.items() if v is not None} for part in parts]
        messages.append(given if content is not None or "content" not in message else {**given, "content": None})
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _render_chat(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict], template_kwargs: Mapping[str, Any], control: Control
) -> list[int]:
    return _encode_chat(tokenizer, *_chat_text(tokenizer, messages, template_kwargs, control), control)


def _chat_text(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict], template_kwargs: Mapping[str, Any], control: Control
) -> tuple[str, dict[str, str]]:
    """What the template writes, with control tokens that the messages spell swapped for marks, and those marks."""
    spelled, marked = _mark_control_tokens(messages, control.pattern)
    text = _rendered(tokenizer, marked, template_kwargs)
    for i, message in enumerate(marked):
        if isinstance(message.get("content"), list) and str(message["content"]) in text:
            raise UserError(
                f"message {i} of the prompt: its content is a list of parts, and the chat template takes text alone"
            )
    check_characters(text)
    return text, spelled


def _encode_chat(
    tokenizer: PreTrainedTokenizerFast, text: str, spelled: Mapping[str, str], control: Control
) -> list[int]:
    """The ids of (a part of) what a template wrote; what marks stand for comes back as plain text."""
    if not spelled:  # the usual case, and token for token what transformers does
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        written = [control.ids[match[0]] for match in control.pattern.finditer(text)]
        # They differ where the tokenizer's own normalization makes a control token of other characters.
        if [i for i in ids if i in control.forbidden] == [i for i in written if i in control.forbidden]:
            return ids
    ids: list[int] = []
    end, strip = 0, False
    for match in [*control.pattern.finditer(text), None]:
        piece = text[end : match.start() if match else None]
        piece = piece.lstrip() if strip else piece  # some control tokens swallow the white space beside them
        piece = piece.rstrip() if match and match[0] in control.strips_left else piece
        ids += encode_plain(tokenizer, _unmark(piece, spelled), control, follows=bool(ids))
        if match:
            ids.append(control.ids[match[0]])
            end, strip = match.end(), match[0] in control.strips_right
    return ids


def _rendered(tokenizer: PreTrainedTokenizerFast, messages: list[dict], template_kwargs: Mapping[str, Any]) -> str:
    """The template's text.

    Raises:
      UserError: there is no template, it does not know a variable, it refuses the messages or it fails.
    """
    import jinja2

    try:
        template = tokenizer.get_chat_template()
        _check_template_kwargs(template, template_kwargs)
        options: dict[str, Any] = {"add_generation_prompt": not template_kwargs.get("continue_final_message", False)}
        text = tokenizer.apply_chat_template(messages, **{**options, **template_kwargs, "tokenize": False})
    except UserError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the tokenizer's chat template is broken: line {error.lineno}: {error}") from error
    except jinja2.UndefinedError as error:
        raise UserError(f"the chat template fails: it needs what the prompt does not have: {error}") from error
    except jinja2.TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        hint = f" (the messages' roles: {roles}"
        if messages[0]["role"] == "system":
            hint += "; a template without a system role wants what is said there in the first user message"
        raise UserError(f"the chat template refuses the prompt: {error}{hint})") from error
    except Exception as error:  # a template is a program, and may fail as any
        if tokenizer.chat_template is None:
            raise UserError("the tokenizer has no chat template; set data.chat_template=False") from error
        raise UserError(f"the chat template fails: {type(error).__name__}: {error}") from error
    assert isinstance(text, str)
    return text


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
            return {_map_strings(key, function): _map_strings(item, function) for key, item in value.items()}
        case list() | tuple():
            return [_map_strings(item, function) for item in value]
        case _:
            return value


def _unmark(text: str, spelled: Mapping[str, str]) -> str:
    for mark, spelling in spelled.items():
        text = text.replace(mark, spelling)
    return text

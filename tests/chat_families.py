"""Stand-ins for the chat templates and tokenizers of model families: each has what is peculiar to the family, in few
words."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

# Llama 3: BOS is written into the first message, contents are trimmed, a system message is there in any case.
LLAMA3 = """{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif -%}
{{ bos_token }}<|start_header_id|>system<|end_header_id|>

Cutting Knowledge Date: {{ date_string or '26 Jul 2024' }}

{{ system }}<|eot_id|>{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}
{{- m['content'] | trim }}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
# Qwen 3: no BOS, thoughts of earlier turns are cut out, thinking is switched off by an empty thought.
QWEN3 = """{%- for m in messages %}{% set content = m.content %}
{%- if m.role == 'assistant' and '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""
# Qwen 2.5: a system message of its own where there is none; tools as JSON.
QWEN25 = """{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role }}{% if m.content %}{{ '\n' + m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '\n' }}{{ call | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Gemma 2: refuses a system role, wants turns to alternate, and calls the assistant "model".
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}
{%- endif %}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}{{ '<start_of_turn>' + role + '\n' }}
{{- m['content'] | trim }}{{ '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
# Mistral: [INST] is a control token, the system message goes into the last user message, no generation prompt.
MISTRAL = """{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}
{%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}{{ bos_token }}
{%- for m in messages %}{% if m['role'] == 'user' %}{{ '[INST]' + (system if loop.last else '') + m['content'] }}
{{- '[/INST]' }}{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"""
# Phi 3: control tokens swallow the white space behind them.
PHI = """{%- for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
# SmolLM3: thinking is a line of the system message, switched by a variable or by /no_think in the user's system prompt.
SMOLLM3 = """{%- set think = 'no_think' if enable_thinking is defined and not enable_thinking else 'think' %}
{%- set custom = '' %}{% if messages[0].role == 'system' %}{% set custom = messages[0].content %}
{%- if '/no_think' in custom %}{% set think = 'no_think' %}{% endif %}{% set messages = messages[1:] %}{% endif -%}
<|im_start|>system
Reasoning Mode: /{{ think }}
{{ custom.replace('/no_think', '').rstrip() }}<|im_end|>
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if think == 'no_think' %}{{ '<think>\n\n</think>\n' }}{% endif %}{% endif %}"""

IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def families() -> dict[str, Any]:
    """Tokenizers by family."""
    phi = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")
    llama = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    return {
        "llama3": _byte_level(LLAMA3, llama, bos="<|begin_of_text|>", eos="<|eot_id|>", adds_bos=True),
        "qwen3": _byte_level(QWEN3, IM, eos="<|im_end|>", plain=("<think>", "</think>")),
        "qwen25": _byte_level(QWEN25, IM, eos="<|im_end|>"),
        "gemma": _pieces(GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), scheme="never"),
        "mistral": _pieces(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), scheme="first"),
        "mistral_legacy": _pieces(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), scheme="always"),
        "phi": _byte_level(PHI, phi, eos="<|end|>", rstrip=True),
        "phi_left": _byte_level(PHI, phi, eos="<|end|>", lstrip=True),
        "smollm3": _byte_level(SMOLLM3, IM, eos="<|im_end|>", plain=("<think>", "</think>")),
        "unigram": _unigram(GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")),
    }


CORPUS = ["What is 3+4? The answer is 7.", "user system assistant\n\n", "Question: how many? Answer: 42\n\n"]


def _byte_level(
    template: str,
    special: tuple[str, ...],
    *,
    eos: str,
    bos: str | None = None,
    adds_bos: bool = False,
    plain: tuple[str, ...] = (),
    lstrip: bool = False,
    rstrip: bool = False,
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS * 9, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    added = [AddedToken(x, normalized=False, special=True, lstrip=lstrip, rstrip=rstrip) for x in special]
    tokenizer.add_special_tokens(added)
    tokenizer.add_tokens([AddedToken(x, normalized=False, special=False) for x in plain])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{bos} $A", special_tokens=[(str(bos), tokenizer.token_to_id(str(bos)))]
        )
    names = {"bos_token": bos, "eos_token": eos} if bos else {"eos_token": eos}
    return _wrap(tokenizer, template, added, names)


def _pieces(template: str, special: tuple[str, ...], scheme: str) -> PreTrainedTokenizerFast:
    """BPE with byte fallback behind ▁, as Llama 2, Mistral and Gemma have; BOS before every text."""
    pieces = ["<unk>", *special, *(f"<0x{b:02X}>" for b in range(256)), "▁", *string.printable[:94], "▁h", "▁hi", "hi"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, [("▁", "h"), ("▁h", "i"), ("h", "i")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _with_bos(tokenizer, template, special)


def _unigram(template: str, special: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Unigram behind NFKC, with its control tokens among the pieces: nearly everything can become one."""
    pieces = [("<unk>", 0.0), *((x, 0.0) for x in special), *((f"<0x{b:02X}>", -9.0) for b in range(256))]
    pieces += [(c, -5.0) for c in string.printable[:94]] + [("▁", -3.0), ("▁hi", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _with_bos(tokenizer, template, special)


def _with_bos(tokenizer: Tokenizer, template: str, special: tuple[str, ...]) -> PreTrainedTokenizerFast:
    added = [AddedToken(x, normalized=False, special=True) for x in special]
    tokenizer.add_special_tokens(added)
    bos, eos = special[:2]
    tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, 1)])
    return _wrap(tokenizer, template, added, {"bos_token": bos, "eos_token": eos, "unk_token": "<unk>"})


def _wrap(
    tokenizer: Tokenizer, template: str, added: list[AddedToken], names: dict[str, str]
) -> PreTrainedTokenizerFast:
    extra: Any = [token for token in added if token.content not in names.values()]
    named: Any = {name: next((t for t in added if t.content == x), x) for name, x in names.items()}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=extra, **named)
    wrapped.chat_template = template
    return wrapped

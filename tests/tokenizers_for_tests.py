"""Small tokenizers of the kinds that models come with, made in the process."""

from __future__ import annotations

import string

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Llama's way: the template writes BOS itself, contents are trimmed, and there is no system message.
LLAMA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('there is no system role') }}{% endif %}"
    "[{{ message['role'] }}] {{ message['content'] | trim }}{% if enable_thinking %} think{% endif %}</s>{% endfor %}"
)
CORPUS = [
    "What is 3+4? The answer is 7.",
    "user system assistant\n",
    "Question: how many? Answer: 42\n\n",
    "naïve 日本 é",
]


def characters() -> PreTrainedTokenizerFast:
    """One token a character; ChatML, no BOS, its end token pads."""
    vocabulary = {c: i for i, c in enumerate([*SPECIAL, "<unk>", *string.printable, "é"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _wrap(tokenizer, chat_template=CHATML, eos_token="<|im_end|>", pad_token="<|im_end|>", unk_token="<unk>")


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE as of GPT-2, Qwen and SmolLM2; `<think>` is an added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS * 9, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return _wrap(tokenizer, chat_template=CHATML, bos_token="<|im_start|>", eos_token="<|im_end|>")


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Unigram with byte fallback, as sentencepiece makes: BOS before every text, and `<s>` among the pieces."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"<0x{b:02X}>", -9.0) for b in range(256))]
    pieces += [(c, -5.0) for c in string.ascii_letters + string.digits + string.punctuation] + [("▁", -3.0)]
    pieces += [("▁the", -4.0), ("▁answer", -4.0), ("user", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return _wrap(tokenizer, chat_template=LLAMA, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _wrap(tokenizer: Tokenizer, *, chat_template: str, **tokens: str) -> PreTrainedTokenizerFast:
    extra = [token for token in SPECIAL if "im" in token and tokens["eos_token"] == "<|im_end|>"]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=extra, **tokens)
    wrapped.chat_template = chat_template
    return wrapped

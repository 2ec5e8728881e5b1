"""What a reward model is shown: a record's prompt and a response to it, as token ids. Without jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl_llm.chat import Chat, render_exchange
from jaxrl_llm.errors import UserError
from jaxrl_llm.records import prompt_of
from jaxrl_llm.sources import Record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclasses.dataclass(frozen=True)
class Exchanges:
    """How prompts and responses become the ids that a reward model reads; the same in its training and in its use."""

    tokenizer: PreTrainedTokenizerFast  # the reward model's own
    vocab_size: int  # rows of the reward model's embedding
    eos_id: int  # ends an exchange that no template ends
    # What transformers takes for padding wherever it stands, so that at an exchange's end it is not the last token
    # where the score is read; None: there is none.
    pad_id: int | None
    chat_template: bool
    template_kwargs: Mapping[str, Any]
    system_prompt: str | None
    prompt_key: str
    prompt_template: str

    def check(self, key: str) -> None:
        """
        Raises:
          UserError: a template is to be used and there is none; `key` is the knob that says so.
        """
        if self.chat_template and self.tokenizer.chat_template is None:
            raise UserError(f"{key} = True: the reward model's tokenizer has no chat template; set it to False")

    def ids(self, record: Record, response: str | Chat) -> list[int]:
        """At least one.

        Raises:
          UserError: see `render_exchange`; or there is no id, or one that the model does not have.
        """
        ids = render_exchange(
            self.tokenizer,
            prompt_of(record, self.prompt_key, self.prompt_template),
            response,
            eos_id=self.eos_id,
            chat_template=self.chat_template,
            system_prompt=self.system_prompt,
            template_kwargs=self.template_kwargs,
        )
        if not ids:
            raise UserError("prompt and response together are no tokens: there is nothing to score")
        check_ids(ids, self.vocab_size)
        return self.cut(ids, len(ids))

    def cut(self, ids: list[int], length: int, *, least: int = 1) -> list[int]:
        """The first `length` of the ids, but for padding at their end as long as more than `least` are left."""
        kept = ids[:length]
        while len(kept) > least and kept[-1] == self.pad_id:
            kept.pop()
        return kept


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """
    Raises:
      UserError: one of the ids has no row in an embedding of so many; on a device it would be read as the last one.
    """
    if (largest := max(ids, default=0)) >= vocab_size:
        raise UserError(f"token id {largest}: the embedding has {vocab_size} rows")

"""Supervised fine-tuning: cross-entropy on given responses, with the trainer's updates, checkpoints and evaluation.

python -m jaxrl_llm.sft --config configs/quickstart_sft.py --workdir runs/quickstart_sft

Records hold a prompt (`data.prompt_key` or `data.prompt_template`) and the response to learn (`data.response_key`).
What comes out is a run's folder as any other: evaluate it, export it, or train the exported model further.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.chat import encode_response
from jaxrl_llm.config import Config
from jaxrl_llm.control_tokens import check_characters
from jaxrl_llm.data import PromptBatch
from jaxrl_llm.errors import UserError, leave, naming, of_kind
from jaxrl_llm.exchanges import check_ids
from jaxrl_llm.huge_pages import in_huge_pages
from jaxrl_llm.models import hf
from jaxrl_llm.records import field
from jaxrl_llm.steps.phases import Program
from jaxrl_llm.steps.training import make_sft
from jaxrl_llm.supervised import SupervisedRun, command
from jaxrl_llm.types import FINISH_LENGTH, FINISH_STOP, Batch


class SftRun(SupervisedRun):
    """A run like that of `fit`, whose step reads its responses instead of sampling and scoring them."""

    def _make_program(self) -> Program:
        program = super()._make_program()
        training = make_sft(self.config, program.actor_model, self._layout, self.total_steps)
        self._eos_id = hf.read_eos_ids(self._inputs.folder)[0]
        return dataclasses.replace(program, actor=training, critic=None, critic_model=None, ref=None)

    def _check_record(self, role: str, record: Mapping[str, Any]) -> None:
        if role == "train":
            with of_kind("no response"):
                check_characters(self._response(record))

    def _response(self, record: Mapping[str, Any]) -> str:
        key = self.config.data.response_key
        with naming("data.response_key"):
            text = field(record, key)
        if not isinstance(text, str):
            raise UserError(f"data.response_key {key!r}: a response is a string, found {text!r:.40}")
        return text

    def _batch(self, given: PromptBatch) -> Batch:
        """The prompts with their responses, cut at the frame's width, as one finished batch on the host."""
        rows, width = len(given.records), self.config.rollout.response_length
        responses, mask = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.bool_)
        for row, record in enumerate(given.records):
            text = self._response(record)
            ids = encode_response(self._inputs.tokenizer, text, self._eos_id)[:width]
            with naming(f"data.response_key: {text!r:.40}"):
                check_ids(ids, self._program.actor_model.vocab_size)
            responses[row, : len(ids)], mask[row, : len(ids)] = ids, True
        length = mask.sum(1, dtype=np.int32)
        ended = responses[np.arange(rows), np.maximum(length - 1, 0)] == self._eos_id
        found: dict = {
            "prompts": given.prompts.prompts,
            "prompt_mask": given.prompts.prompt_mask,
            "prompt_valid": given.prompts.prompt_valid,
            "record_arrays": {},
            "uid": given.prompts.uid,
            "responses": responses,
            "response_mask": mask,
            "response_length": length,
            "rollout_log_probs": None,
            "finish_reason": np.where(ended, FINISH_STOP, FINISH_LENGTH).astype(np.int32),
            "loss_mask": mask,
        }
        return Batch(**found)


def sft(config: Config, workdir: str | Path | None = None, **how: Any) -> SftRun:
    """A supervised run of `config`: iterate over it for (metrics, batch) of each step, as over `fit`'s.

    Args:
      how: `strict_resume`, `guard`: see `fit`.

    Raises:
      UserError: something in the config, the data, a model or the folder is wrong; before the first step.
    """
    return SftRun(config, workdir, **how)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code, see `errors.exit_code`."""
    return command("sft", "Fine-tunes a language model on given responses.", sft, argv)


if __name__ == "__main__":
    in_huge_pages()
    leave(main())

"""What the models of a run must have in common with its actor."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import hf
from jaxrl_llm.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def check_vocabulary(folder: Path, actor: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """
    Args:
      actor, tokenizer: the actor's folder and its tokenizer.

    Raises:
      UserError: a folder's tokens are not the actor's, so that the ids of one would be nonsense to the other.
    """
    if not (folder / "tokenizer.json").is_file():
        return  # nothing to compare; the size of the embedding is checked in any case
    own, theirs = tokenizer.get_vocab(), load_tokenizer(folder).get_vocab()
    if different := sorted((token for token in own if own[token] != theirs.get(token)), key=lambda token: own[token]):
        first = different[0]
        raise UserError(
            f"{folder}: its tokenizer differs from the actor's ({actor}) in {len(different)} tokens; "
            f"{first!r} is {own[first]} for the actor, here {theirs.get(first, 'not there')}"
        )


def check_same_computation(folder: Path, actor: Path) -> None:
    """
    Raises:
      UserError: a folder's config.json describes another computation than the actor's. Its tensors may fit all the
        same: a rope's base or a window changes no shape.
    """
    own, theirs = hf.read_shape(actor), hf.read_shape(folder)
    names = {field.name for field in dataclasses.fields(own)} - {"max_positions"}  # how far it may go, not how
    if different := sorted(name for name in names if getattr(own, name) != getattr(theirs, name)):
        first = different[0]
        raise UserError(
            f"{folder}: config.json describes another model than the actor's ({actor}): {first} is "
            f"{getattr(theirs, first)!r:.120}, the actor's {getattr(own, first)!r:.120}"
        )

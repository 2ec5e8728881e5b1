"""What a run says of its inputs before the first step."""

from __future__ import annotations

from jaxrl_llm.config import Config, notices
from jaxrl_llm.data import PromptData
from jaxrl_llm.loading import Inputs
from jaxrl_llm.models.lora import count
from jaxrl_llm.repeats import repeat_notices
from jaxrl_llm.steps.phases import Program
from jaxrl_llm.types import RunState


def input_notes(config: Config, inputs: Inputs, program: Program, state: RunState) -> tuple[list[str], list[str]]:
    """What should be known even where nobody reads notes, and what else there is to say."""
    train, held_out = inputs.train, inputs.held_out
    assert train is not None
    sources = [data for data in (train, held_out) if data]
    warned = [*notices(config), *(notice for data in sources for notice in data.skip_notices())]
    found = [notice for data in sources for notice in data.notices()]
    told = [f"notice: {notice}" for notice in [*found, *repeat_notices(train, held_out)]]
    if program.actor.frozen:
        trained, whole = count(state.actor.params), count(state.base)
        told.append(f"LoRA: {trained:,} parameters are trained, {whole:,} are frozen")
    evaluated = f", {_size(held_out)} to evaluate on" if held_out else ""
    told.append(f"{_size(train)} prompts of at most {train.longest} tokens{evaluated}")
    return warned, told


def _size(data: PromptData) -> str:
    return f"{len(data)}" + (f" ({data.dropped} more dropped as too long)" if data.dropped else "")

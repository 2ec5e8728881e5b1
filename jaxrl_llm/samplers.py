"""The phase `gen` as the trainer and evaluation run it: from prompts to a batch and its responses as texts, in one turn
or in several with an environment (environments.py) that answers between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.chat import render_observation
from jaxrl_llm.compiled import AnySampler, CompiledTurns
from jaxrl_llm.config import Config
from jaxrl_llm.data import PromptBatch
from jaxrl_llm.environments import Asker, Message, as_message
from jaxrl_llm.errors import UserError, naming
from jaxrl_llm.loading import Inputs
from jaxrl_llm.models import hf
from jaxrl_llm.records import prompt_of
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rewards.forms import Result, call
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.sharding import Layout, fetch
from jaxrl_llm.steps.rollout import StopRules
from jaxrl_llm.tokenizer import response_text
from jaxrl_llm.types import FINISH_STOP, Batch, Params

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


CHARACTERS = 64  # of a token; no token is longer, so that an observation of megabytes is not encoded whole


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A freshly sampled batch, and what the host reads of it."""

    batch: Batch
    # B, what rewards read: the policy's own tokens but special ones, cut before a stop token or string; of a
    # conversation its last turn.
    texts: list[str]
    conversations: list[list[Message]] | None = (
        None  # B, where there is an environment: every message, the prompt's too
    )
    openings: list[int] | None = None  # B, how many messages of each are the prompt's
    failures: dict[int, str] = dataclasses.field(default_factory=dict)  # row -> why its environment failed

    def num_turns(self, row: int) -> int:
        """Turns of the policy."""
        if self.conversations is None or self.openings is None:
            return 1
        return sum(message["role"] == "assistant" for message in self.conversations[row][self.openings[row] :])

    @property
    def shown(self) -> list[str]:
        """The responses as people see them: of a conversation everything behind the prompt."""
        if self.conversations is None or self.openings is None:
            return self.texts
        return [_shown(talk[opening:]) for talk, opening in zip(self.conversations, self.openings, strict=True)]


def response_texts(
    batch: Batch, tokenizer: PreTrainedTokenizerFast, stops: StopRules, stop: Sequence[str]
) -> list[str]:
    """The responses [B] as rewards see them: their own tokens but special ones, cut before a stop token or string."""
    host = fetch((batch.responses, batch.response_mask, batch.finish_reason, stops.ids, stops.min_new_tokens))
    responses, mask, reasons, stop_ids, least = (np.asarray(x) for x in host)
    return [
        response_text(tokenizer, ids[own].tolist(), reason == FINISH_STOP, stop_ids, stop, int(least))
        for ids, own, reason in zip(responses, mask, reasons, strict=True)
    ]


def _shown(messages: Sequence[Message]) -> str:
    return "\n".join(m["content"] if m["role"] == "assistant" else f"[{m['role']}: {m['content']}]" for m in messages)


class Sampler:
    """`start(view, given, step)` begins to sample on the devices; what it returns, called, waits and gives a `Sampled`.

    So one part can be scored while the next is being sampled. (Of conversations all is done when the result is asked
    for: the host takes part in them.)
    """

    def __init__(
        self,
        compiled: AnySampler,
        config: Config,
        *,
        layout: Layout,
        tokenizer: PreTrainedTokenizerFast,
        stops: StopRules,
        conversation: Conversation | None = None,
    ) -> None:
        """
        Args:
          compiled: see `compiled.compile_sampler`; of several turns if and only if `conversation` is given.
        """
        self._compiled, self._layout, self._stops = compiled, layout, stops
        self._tokenizer, self._stop, self._conversation = tokenizer, config.rollout.stop, conversation

    def start(self, view: Params, given: PromptBatch, step: int) -> Callable[[], Sampled]:
        prompts, number = self._layout.put_rows(given.prompts), np.int32(step)
        if isinstance(self._compiled, CompiledTurns):
            return lambda: self._converse(view, given, prompts, number)
        batch = self._compiled(view, prompts, self._stops, number)
        return lambda: self.read(batch)

    def read(self, batch: Batch) -> Sampled:
        """A sampled batch, of one turn, with its responses as texts."""
        return Sampled(batch, response_texts(batch, self._tokenizer, self._stops, self._stop))

    def __call__(self, view: Params, given: PromptBatch, step: int) -> Sampled:
        return self.start(view, given, step)()

    def _converse(self, view: Params, given: PromptBatch, prompts: Any, step: np.int32) -> Sampled:
        assert isinstance(self._compiled, CompiledTurns) and self._conversation is not None
        talk, compiled = self._conversation, self._compiled
        cache, state = compiled.begin(view, prompts, self._stops, step)
        stop_ids, least = fetch((self._stops.ids, self._stops.min_new_tokens))
        rows = state.length.shape[0]
        n = rows // len(given.records)
        limits = np.repeat(np.asarray(given.prompts.max_new_tokens), n)
        records = [record for record in given.records for _ in range(n)]
        conversations = [talk.opening(record) if record else [] for record in records]
        openings, least = [len(messages) for messages in conversations], int(least)
        texts, failures = [""] * rows, {}
        begun, active = np.zeros(rows, np.int32), limits > 0
        truncated = np.zeros(rows, np.bool_)
        for turn in range(talk.max_turns):
            responses, lengths, reasons = fetch((state.responses, state.length, state.finish_reason))
            tokens = np.zeros((rows, talk.width), np.int32)
            mask = np.zeros(tokens.shape, np.bool_)
            waiting = []
            for row in np.flatnonzero(active).tolist():
                own, stopped = responses[row, begun[row] : lengths[row]].tolist(), bool(reasons[row] == FINISH_STOP)
                held = least if turn == 0 else 0  # the least length is of the response, not of a turn
                texts[row] = response_text(self._tokenizer, own, stopped, stop_ids, self._stop, held)
                conversations[row].append({"role": "assistant", "content": texts[row]})
                active[row] = False
                if stopped and turn + 1 < talk.max_turns:
                    waiting.append(row)
            answers = talk.ask([conversations[row] for row in waiting], [records[row] for row in waiting])
            for row, answer in zip(waiting, answers, strict=True):
                if answer.failure is not None:
                    failures[row] = f"row {row}, {answer.failure}"
                    continue
                message = as_message(answer.extras["observation"], f"the environment {talk.name!r}")
                if message is None:
                    continue
                message, ids = talk.fit(records[row], message, int(responses[row, lengths[row] - 1]))
                if lengths[row] + len(ids) >= limits[row]:  # no room for it and a token more
                    truncated[row] = True
                    continue
                conversations[row].append(message)
                tokens[row, : len(ids)], mask[row, : len(ids)] = ids, True
                begun[row], active[row] = lengths[row] + len(ids), True
            if not active.any():
                break
            put = self._layout.put_rows((tokens, mask))
            cache, state = compiled.go_on(view, cache, state, *put, self._stops)
        del cache
        batch = compiled.finish(prompts, state, self._layout.put_rows(truncated))
        return Sampled(batch, texts, conversations, openings, failures)


class Conversation:
    """The config's environment, and how its observations become tokens.

    Args:
      pool: whose workers the environment runs in; None, or one that does not have it: this process.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerFast,
        end_ids: Sequence[int],
        pool: RewardPool | None = None,
    ) -> None:
        settings = config.rollout.multi_turn
        self.name, self._asked, self._pool = settings.environment, environment_of(config), pool
        self.max_turns, self.width = settings.max_assistant_turns, settings.max_observation_length
        self._data, self._tokenizer, self._end_ids = config.data, tokenizer, set(end_ids)

    def ask(self, conversations: Sequence[Sequence[Message]], records: Sequence[Any]) -> list[Result]:
        """What the environment says to each, beside a score that means nothing, or why it failed."""
        given = [{"messages": list(c), "record": record} for c, record in zip(conversations, records, strict=True)]
        nothing, asked = [""] * len(given), self._asked
        if self._pool is not None and asked.name in self._pool.names:
            return self._pool.start(asked.name, nothing, nothing, given)()
        return call(asked.function, asked.form, asked.name, nothing, nothing, given)

    def opening(self, record: Any) -> list[Message]:
        """The messages of a record's prompt."""
        prompt = prompt_of(record, self._data.prompt_key, self._data.prompt_template)
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]

    def fit(self, record: Any, message: Message, last: int) -> tuple[Message, list[int]]:
        """The message, its text cut at the end until its tokens are at most `max_observation_length`, and those tokens.

        Args:
          last: the token that ended the turn before it.

        Raises:
          UserError: the chat template refuses it, or takes more tokens than that for a message without a text.
        """

        def ids(characters: int) -> list[int]:
            with naming(f"a message of the environment {self.name!r} behind a turn"):
                return render_observation(
                    self._tokenizer,
                    prompt_of(record, self._data.prompt_key, self._data.prompt_template),
                    {**message, "content": message["content"][:characters]},
                    end_ids=self._end_ids,
                    turn_ended=last in self._end_ids,
                    chat_template=self._data.chat_template,
                    template_kwargs=self._data.template_kwargs,
                )

        high = min(len(message["content"]), CHARACTERS * self.width)
        if len(found := ids(high)) <= self.width:
            return {**message, "content": message["content"][:high]}, found
        low = 0
        while low < high:  # the longest beginning that fits
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(ids(middle)) <= self.width else (low, middle - 1)
        if len(found := ids(low)) > self.width:
            raise UserError(
                f"config.rollout.multi_turn.max_observation_length = {self.width}: what the chat template writes "
                f"around an observation takes {len(found)} tokens by itself"
            )
        return {**message, "content": message["content"][:low]}, found


def make_conversation(config: Config, inputs: Inputs) -> Conversation | None:
    """The config's conversation, tried out on the first prompt; None where there is no environment.

    Raises:
      UserError: there is no such environment, it does not return a text, a message or None, or no message can follow a
        turn in the chat template.
    """
    if not config.rollout.multi_turn.environment:
        return None
    end_ids = hf.read_eos_ids(inputs.folder)
    conversation = Conversation(config, inputs.tokenizer, end_ids, inputs.rewards.pool)
    data = inputs.train or inputs.held_out
    assert data is not None
    _, record = data.first()
    opening: list[Message] = [*conversation.opening(record), {"role": "assistant", "content": ""}]
    (answer,) = conversation.ask([opening], [record])
    # That it fails on an empty turn proves nothing.
    message = as_message(answer.extras.get("observation"), f"the environment {conversation.name!r}")
    conversation.fit(record, message or {"role": "user", "content": "0"}, end_ids[0])
    return conversation


def environment_of(config: Config) -> Reward:
    """The config's environment, to be called where rewards are."""
    settings = config.rollout.multi_turn
    return Asker(settings.environment, CHARACTERS * settings.max_observation_length).reward


def make_sampler(config: Config, inputs: Inputs, layout: Layout, stops: StopRules, compiled: AnySampler) -> Sampler:
    """The sampler of a config, from what is compiled of it."""
    return Sampler(
        compiled,
        config,
        layout=layout,
        tokenizer=inputs.tokenizer,
        stops=stops,
        conversation=make_conversation(config, inputs),
    )

"""From sources to `Prompts`: which prompts a step gets is a pure function of (seed, cursor).

The cursor counts the prompts that a run has drawn. Position p of a run always holds the same record with the same uid,
p, so that a run can go on at any cursor without having walked there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from jaxrl_llm.chat import control_token_in, render_prompt
from jaxrl_llm.errors import UserError, naming
from jaxrl_llm.order import draw_order
from jaxrl_llm.records import field, prompt_of, prompt_text
from jaxrl_llm.sources import Record, open_source
from jaxrl_llm.types import Prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# What a JAX reward reads of a record: a key that holds a number (or array of one shape), or a function of the record.
RecordArray = str | Callable[[Record], Any]


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """G prompts as arrays (numpy's, still on the host) and what belongs to them."""

    prompts: Prompts
    records: list[dict[str, Any]]  # G; empty dicts for fillers
    texts: list[str]  # G; the prompts as rewards and logs see them, see `prompt_text`
    cursor: int  # where the next batch begins
    indices: list[int]  # G; of the prompts in their data; -1 for fillers

    def split(self, parts: int) -> list[PromptBatch]:
        """The same prompts in so many equal parts, one after the other."""
        size = len(self.records) // parts
        assert size * parts == len(self.records)

        def cut(at: slice) -> PromptBatch:
            prompts = jax.tree.map(lambda x: x[at], self.prompts)
            return PromptBatch(prompts, self.records[at], self.texts[at], self.cursor, self.indices[at])

        return [self] if parts == 1 else [cut(slice(i * size, (i + 1) * size)) for i in range(parts)]


class PromptData:
    """The prompts of one or several sources, tokenized and checked once, before any step.

    Example: `PromptData("jaxrl_llm.tasks:addition", tokenizer, prompt_length=64, response_length=24).batch(0, 8)`

    Args:
      sources: what `sources.open_source` takes, one or several.
      prompt_length, response_length: P and R in tokens.
      weights: share of each source; none: all records once an epoch.
      shuffle: a new order each epoch, from seed and epoch.
      prompt_key: the field that holds the prompt, a string or a list of chat messages ("a.b" reaches inside).
      prompt_template: text with {field}s of the record, instead of prompt_key.
      chat_template, system_prompt, template_kwargs: see `tokenizer.render_prompt`.
      too_long: "error", or "drop" (counted in `dropped`) for prompts of more than P tokens.
      source_kwargs: see `sources.open_source`.
      record_arrays: name -> what of each record becomes an array, int32, float32 or bool [G, …], for JAX rewards.
      limit: only so many records of each source, the first ones; 0: all.
      config_key: what an error about a source calls the place where it was named.

    Raises:
      UserError: naming the record's place for whatever is wrong with it.
    """

    def __init__(
        self,
        sources: Any,
        tokenizer: PreTrainedTokenizerFast,
        *,
        prompt_length: int,
        response_length: int,
        seed: int = 0,
        shuffle: bool = True,
        weights: Sequence[float] = (),
        prompt_key: str = "prompt",
        prompt_template: str = "",
        chat_template: bool = True,
        system_prompt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        too_long: Literal["error", "drop"] = "error",
        source_kwargs: Mapping[str, Any] | None = None,
        record_arrays: Mapping[str, RecordArray] | None = None,
        limit: int = 0,
        config_key: str = "data",
    ) -> None:
        several = isinstance(sources, Sequence) and bool(sources) and not isinstance(sources[0], Mapping)
        specs = list(sources) if several and not isinstance(sources, str) else [sources]
        if weights and len(weights) != len(specs):
            raise UserError(f"data.weights: {len(weights)} weights for {len(specs)} sources")
        for key, text in (("prompt_template", prompt_template), ("system_prompt", system_prompt or "")):
            if token := control_token_in(tokenizer, text):
                raise UserError(
                    f"data.{key} spells {token!r}, which would be plain text; only a chat template writes it"
                )
        self._sources = []
        for spec in specs:
            with naming(config_key):
                self._sources.append(open_source(spec, source_kwargs))
        self._prompt_of = functools.partial(prompt_of, prompt_key=prompt_key, prompt_template=prompt_template)
        self._prompt_length, self._response_length = prompt_length, response_length
        pad = tokenizer.pad_token_id
        self._pad = pad if isinstance(pad, int) else 0  # masks say where padding is, so any id will do
        self._places = [(s, i) for s, source in enumerate(self._sources) for i in range(len(source))[: limit or None]]

        def tokenize(place: tuple[int, int]) -> np.ndarray:
            ids = render_prompt(
                tokenizer,
                self._prompt_of(self._record(place)),
                chat_template=chat_template,
                system_prompt=system_prompt,
                template_kwargs=template_kwargs,
            )
            if not ids:
                raise UserError("the prompt is empty")
            return np.array(ids, np.int32)

        self._ids = [self._at(place, tokenize) for place in self._places]
        self.dropped = self._drop_too_long(too_long)  # prompts left out because they are too long
        self.longest = max(map(len, self._ids), default=0)  # tokens of the longest prompt that is left
        unknown = tokenizer.unk_token_id
        self.with_unknown = sum(unknown in ids for ids in self._ids) if isinstance(unknown, int) else 0
        self.largest_id = max((int(ids.max()) for ids in self._ids), default=0)
        self._record_arrays = {name: self._extract(name, get) for name, get in (record_arrays or {}).items()}
        counts = [sum(s == source for s, _ in self._places) for source in range(len(specs))]
        for spec, source, count in zip(specs, self._sources, counts, strict=True):
            if not count:
                reason = f"all {len(source)} are longer than {prompt_length} tokens" if len(source) else "it is empty"
                raise UserError(f"{spec!s:.80}: no prompts to draw; {reason}")
        self._order = draw_order(counts, weights, seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self._places)

    @property
    def records(self) -> Iterator[Record]:
        """Every record once, in the sources' order."""
        return map(self._record, self._places)

    def first(self) -> tuple[str, Record]:
        """The first prompt, as rewards see it, and its record."""
        record = self._record(self._places[0])
        return prompt_text(self._prompt_of(record)), record

    def batch(self, cursor: int, num_prompts: int) -> PromptBatch:
        """The prompts at positions cursor … cursor + num_prompts - 1 of the run; their uids are these positions."""
        return self.take([int(self._order[cursor + i]) for i in range(num_prompts)], cursor)

    def take(self, indices: Sequence[int], cursor: int) -> PromptBatch:
        """The prompts at these indices of the data, drawn at positions cursor … of the run."""
        return self._build(list(indices), cursor, len(indices))

    def eval_batches(self, num_prompts: int) -> Iterator[PromptBatch]:
        """Every prompt once, in order. The last batch is filled up with invalid prompts that get no tokens."""
        for start in range(0, len(self), num_prompts):
            yield self._build(list(range(start, min(start + num_prompts, len(self)))), start, num_prompts)

    def _build(self, indices: list[int], cursor: int, num_prompts: int) -> PromptBatch:
        real, fillers = len(indices), num_prompts - len(indices)
        shape = (num_prompts, self._prompt_length)
        prompts, mask = np.full(shape, self._pad, np.int32), np.zeros(shape, np.bool_)
        for row, index in enumerate(indices + [0] * fillers):
            ids = self._ids[index]
            prompts[row, -len(ids) :] = ids
            mask[row, -len(ids) :] = True
        valid = np.arange(num_prompts) < real
        arrays: dict[str, Any] = {
            "prompts": prompts,
            "prompt_mask": mask,
            "uid": np.arange(cursor, cursor + num_prompts, dtype=np.int32),
            "prompt_valid": valid,
            "max_new_tokens": np.where(valid, self._response_length, 0).astype(np.int32),
            "record_arrays": {name: a[indices + [0] * fillers] for name, a in self._record_arrays.items()},
        }
        records = [dict(self._record(self._places[index])) for index in indices]
        texts = [prompt_text(self._prompt_of(record)) for record in records]
        return PromptBatch(
            Prompts(**arrays),
            records + [{}] * fillers,
            texts + [""] * fillers,
            cursor + num_prompts,
            indices + [-1] * fillers,
        )

    def _record(self, place: tuple[int, int]) -> Record:
        source, index = place
        return self._sources[source][index]

    def _where(self, place: tuple[int, int]) -> str:
        source, index = place
        return self._sources[source].where(index)

    def _at(self, place: tuple[int, int], function: Callable[[tuple[int, int]], Any]) -> Any:
        """function(place), with the place in front of a user error's text, unless it stands there already."""
        try:
            return function(place)
        except UserError as error:
            where = self._where(place)
            raise UserError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error

    def _drop_too_long(self, too_long: str) -> int:
        over = [i for i, ids in enumerate(self._ids) if len(ids) > self._prompt_length]
        if over and too_long == "error":
            shown = {"first": over[0], "longest": max(over, key=lambda i: len(self._ids[i]))}
            where = [
                f"the {name}: {self._where(self._places[i])} with {len(self._ids[i])}" for name, i in shown.items()
            ]
            raise UserError(
                f"{len(over)} of {len(self._ids)} prompts are longer than rollout.prompt_length = "
                f"{self._prompt_length} tokens; {', '.join(where)}. Raise rollout.prompt_length, or set "
                "data.too_long = 'drop' to leave them out"
            )
        kept = [i for i, ids in enumerate(self._ids) if len(ids) <= self._prompt_length]
        self._ids, self._places = [self._ids[i] for i in kept], [self._places[i] for i in kept]
        return len(over)

    def _extract(self, name: str, get: RecordArray) -> np.ndarray:
        """[N, …]: one value of each record, whole numbers as int32, others as float32, truth values as bool."""

        def value(place: tuple[int, int]) -> np.ndarray:
            record = self._record(place)
            try:
                found = np.asarray(field(record, get) if isinstance(get, str) else get(record))
            except (LookupError, TypeError, ValueError) as error:
                raise UserError(f"record array {name!r}: {type(error).__name__}: {error}") from error
            if found.dtype.kind not in "biuf":
                raise UserError(f"record array {name!r}: expected a number, found {found.tolist()!r:.40}")
            return found

        values = [self._at(place, value) for place in self._places]
        shapes = {v.shape for v in values}
        if len(shapes) > 1:
            raise UserError(f"record array {name!r}: the records hold arrays of several shapes: {sorted(shapes)}")
        stacked = np.stack(values) if values else np.zeros(0, np.float32)
        dtype = {"b": np.bool_, "f": np.float32}.get(stacked.dtype.kind, np.int32)
        if dtype == np.int32 and stacked.size and np.abs(stacked).max() > np.iinfo(np.int32).max:
            raise UserError(f"record array {name!r}: {np.abs(stacked).max()} does not fit into 32 bits")
        return stacked.astype(dtype)

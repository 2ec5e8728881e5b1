"""From sources to `Prompts`: which prompts a step gets is a pure function of (seed, cursor).

The cursor counts the prompts that a run has drawn. Position p of a run always holds the same record with the same uid,
p, so that a run can go on at any cursor without having walked there.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from jaxrl_llm.bad_records import BadRecords
from jaxrl_llm.chat import render_prompt
from jaxrl_llm.control_tokens import control_token_in
from jaxrl_llm.dotted import split_name
from jaxrl_llm.errors import UserError, naming, of_kind
from jaxrl_llm.order import draw_order
from jaxrl_llm.records import RecordArray, prompt_of, prompt_text, record_array, stacked
from jaxrl_llm.sources import Record, open_source
from jaxrl_llm.types import Prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """G prompts as arrays (numpy's, still on the host) and what belongs to them."""

    prompts: Prompts
    records: list[dict[str, Any]]  # G; empty dicts for fillers
    texts: list[str]  # G; the prompts as rewards and logs see them, see `prompt_text`
    cursor: int  # where the next batch begins
    indices: list[int]  # G; of the prompts in their data; -1 for fillers
    sets: list[str]  # G; the set each belongs to, see `PromptData.set_of`

    def split(self, parts: int) -> list[PromptBatch]:
        """The same prompts in so many equal parts, one after the other."""
        size = len(self.records) // parts
        assert size * parts == len(self.records)

        def cut(at: slice) -> PromptBatch:
            prompts = jax.tree.map(lambda x: x[at], self.prompts)
            lists = self.records[at], self.texts[at], self.cursor, self.indices[at], self.sets[at]
            return PromptBatch(prompts, *lists)

        return [self] if parts == 1 else [cut(slice(i * size, (i + 1) * size)) for i in range(parts)]


@dataclasses.dataclass(frozen=True)
class _Read:
    """What was made of a record before any step."""

    ids: np.ndarray  # of its prompt
    arrays: dict[str, np.ndarray]
    set_name: str


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
      chat_template, system_prompt, template_kwargs: see `chat.render_prompt`.
      too_long: "error", or "drop" (counted in `dropped`) for prompts of more than P tokens.
      on_bad_record: "error", or "skip" (counted in `skipped`) for records without a prompt that can be used.
      source_kwargs: see `sources.open_source`.
      record_arrays: name -> what of each record becomes an array, int32, float32 or bool [G, …], for JAX rewards.
      limit: only so many records of each source, the first ones; 0: all.
      named: a source may have a name before it, "sums=train.jsonl", which is that of its set.
      check: told of every record; one that it raises a UserError on is a bad one.
      config_key: what an error about a source calls the place where it was named.

    Raises:
      UserError: naming the record's place for whatever is wrong with it; or all records of a source are bad.
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
        on_bad_record: Literal["error", "skip"] = "error",
        source_kwargs: Mapping[str, Any] | None = None,
        record_arrays: Mapping[str, RecordArray] | None = None,
        limit: int = 0,
        named: bool = False,
        check: Callable[[Record], object] | None = None,
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
        self._sources, self._names, self._key = [], [], config_key
        for spec in specs:
            with naming(config_key):
                name, source = split_name(spec) if named and isinstance(spec, str) else ("", spec)
                self._sources.append(open_source(source, source_kwargs))
                self._names.append(name)
        self._prompt_of = functools.partial(prompt_of, prompt_key=prompt_key, prompt_template=prompt_template)
        self._prompt_length, self._response_length = prompt_length, response_length
        pad = tokenizer.pad_token_id
        self._pad = pad if isinstance(pad, int) else 0  # masks say where padding is, so any id will do
        self._places = [(s, i) for s, source in enumerate(self._sources) for i in range(len(source))[: limit or None]]
        self._arrays, self._check = dict(record_arrays or {}), check
        self._render = functools.partial(
            render_prompt,
            tokenizer,
            chat_template=chat_template,
            system_prompt=system_prompt,
            template_kwargs=template_kwargs,
        )
        self.skipped = [BadRecords() for _ in specs]  # of each source, those left out because they are bad
        self._read = self._read_all(on_bad_record)
        self.dropped = self._drop_too_long(too_long)  # prompts left out because they are too long
        self.longest = max((len(x.ids) for x in self._read), default=0)  # tokens of the longest prompt that is left
        unknown = tokenizer.unk_token_id
        self.with_unknown = sum(unknown in x.ids for x in self._read) if isinstance(unknown, int) else 0
        self.largest_id = max((int(x.ids.max()) for x in self._read), default=0)
        self._record_arrays = {name: stacked(name, [x.arrays[name] for x in self._read]) for name in self._arrays}
        counts = [sum(s == source for s, _ in self._places) for source in range(len(specs))]
        for spec, source, count, skipped in zip(specs, self._sources, counts, self.skipped, strict=True):
            if not count:
                raise UserError(f"{spec!s:.80}: no prompts to draw; {self._why_none(len(source), skipped)}")
        self._check_sets(specs)
        self._order = draw_order(counts, weights, seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self._places)

    @property
    def records(self) -> Iterator[Record]:
        """Every record once, in the sources' order."""
        return map(self._record, self._places)

    def each(self, function: Callable[[Record], object]) -> None:
        """Calls it with every record, and puts the record's place in front of a user error's text."""
        for place in self._places:
            self._at(place, lambda place: function(self._record(place)))

    def where(self, index: int) -> str:
        """How an error names the record of a prompt, by its number in the sources' order: "train.jsonl:17"."""
        return self._where(self._places[index])

    def set_of(self, index: int) -> str:
        """What the metrics of the set that a prompt belongs to are named by: the name its source has in the config,
        or else its record's data_source, or "all"."""
        return self._read[index].set_name

    def ids(self, index: int) -> np.ndarray:
        """A prompt's token ids."""
        return self._read[index].ids

    @property
    def fingerprint(self) -> dict[str, Any]:
        """By which a resumed run knows its prompts again: how many, and SHA-256 of their token ids, in order."""
        found = hashlib.sha256()
        for read in self._read:
            found.update(len(read.ids).to_bytes(8, "little") + read.ids.tobytes())
        return {"prompts": len(self), "sha256": found.hexdigest()}

    def skip_notices(self) -> list[str]:
        """What was left out as bad, by source."""
        return [
            f"{bad.count} of {bad.read} records of {self._key} {source} were skipped (data.on_bad_record): {bad}"
            for source, bad in zip(self._labels(), self.skipped, strict=True)
            if bad.count
        ]

    def notices(self) -> list[str]:
        """What else a person should know of, though it is not in the way of a run."""
        if not self.with_unknown:
            return []
        return [
            f"{self.with_unknown} of {len(self)} prompts hold characters that the tokenizer has no token for; the "
            "model sees its unknown token in their place"
        ]

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
            ids = self._read[index].ids
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
            [self._read[index].set_name for index in indices] + [""] * fillers,
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
            placed = UserError(str(error) if str(error).startswith(where) else f"{where}: {error}")
            placed.kind = error.kind
            raise placed from error

    def _read_all(self, on_bad_record: str) -> list[_Read]:
        """One a place; `_places` loses those of bad records, which are counted."""
        found, places = [], []
        for place in self._places:
            try:
                found.append(self._at(place, self._read_one))
            except UserError as error:
                if on_bad_record != "skip":
                    raise
                self.skipped[place[0]].add(error)
            else:
                places.append(place)
            self.skipped[place[0]].read += 1
        self._places = places
        return found

    def _read_one(self, place: tuple[int, int]) -> _Read:
        with of_kind("unreadable"):
            record = self._record(place)
        with of_kind("no prompt"):
            prompt = self._prompt_of(record)
        with of_kind("prompt that cannot be rendered"):
            ids = self._render(prompt)
        if not ids or not prompt_text(prompt).strip():
            with of_kind("empty prompt"):
                raise UserError("the prompt is empty")
        with of_kind("no value for a reward"):
            arrays = {name: record_array(name, record, get) for name, get in self._arrays.items()}
        if self._check:
            with of_kind("refused"):
                self._check(record)
        name = self._names[place[0]] or str(record.get("data_source") or "all")
        return _Read(np.array(ids, np.int32), arrays, name)

    def _why_none(self, records: int, skipped: BadRecords) -> str:
        if skipped.count and skipped.count == skipped.read:
            return f"all {skipped.count} records are bad: {skipped}"
        left = records - skipped.count
        bad = f"; {skipped.count} more are bad: {skipped}" if skipped.count else ""
        return f"all {left} are longer than {self._prompt_length} tokens{bad}" if records else "it is empty"

    def _labels(self) -> list[str]:
        """How a notice names each source: by what its first record's place is called, without the line."""
        return [re.sub(r"(:\d+|, row \d+| \[\d+\])$", "", source.where(0)) for source in self._sources]

    def _check_sets(self, specs: Sequence[Any]) -> None:
        """
        Raises:
          UserError: a set's name is also the data_source of another source's records, so that their metrics would mix.
        """
        first: dict[str, int] = {name: i for i, name in enumerate(self._names) if name}
        for (source, _), read in zip(self._places, self._read, strict=True) if first else ():
            if first.get(read.set_name, source) != source:
                raise UserError(
                    f"{self._key}: the name {read.set_name!r} of {specs[first[read.set_name]]!s:.80} is also the "
                    f"data_source of records of {specs[source]!s:.80}; give that source another name, as in "
                    f"NAME={specs[source]!s:.80}"
                )

    def _drop_too_long(self, too_long: str) -> int:
        lengths = [len(read.ids) for read in self._read]
        over = [i for i, length in enumerate(lengths) if length > self._prompt_length]
        if over and too_long == "error":
            shown = {"first": over[0], "longest": max(over, key=lambda i: lengths[i])}
            where = [f"the {name}: {self.where(i)} with {lengths[i]}" for name, i in shown.items()]
            raise UserError(
                f"{len(over)} of {len(lengths)} prompts are longer than rollout.prompt_length = "
                f"{self._prompt_length} tokens; {', '.join(where)}. Raise rollout.prompt_length, or set "
                "data.too_long = 'drop' to leave them out"
            )
        kept = [i for i, length in enumerate(lengths) if length <= self._prompt_length]
        self._read, self._places = [self._read[i] for i in kept], [self._places[i] for i in kept]
        return len(over)

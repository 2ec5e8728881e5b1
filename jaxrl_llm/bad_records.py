"""Records that were skipped: how many, of what kinds, and where the first of each stands."""

from __future__ import annotations

import dataclasses

from jaxrl_llm.errors import UserError


@dataclasses.dataclass
class BadRecords:
    """Those of one source.

    >>> bad = BadRecords(read=3)
    >>> bad.add(UserError("train.jsonl:2: the prompt is empty"))
    >>> bad.count, str(bad)
    (1, '33.3%; 1 bad, the first: train.jsonl:2: the prompt is empty')
    """

    read: int = 0  # records, good and bad
    kinds: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)  # kind -> how many, the first's error

    @property
    def count(self) -> int:
        return sum(count for count, _ in self.kinds.values())

    def add(self, error: UserError) -> None:
        kind = error.kind or "bad"
        count, first = self.kinds.get(kind, (0, str(error)))
        self.kinds[kind] = (count + 1, first)

    def __str__(self) -> str:
        share = f"{self.count / max(self.read, 1):.1%}"
        return "; ".join(
            [share, *(f"{count} {kind}, the first: {first}" for kind, (count, first) in self.kinds.items())]
        )

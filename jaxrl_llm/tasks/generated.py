"""Records made when they are read: a task's problems are numbered, and a seed says which of them stands where.

A problem has content, which decides whether it is in "train" or in "test", and a surface (the order of the numbers, the
names in a story), which does not. Within a split no content comes twice.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, overload

from jaxrl_llm.errors import UserError, nearest

T = TypeVar("T")

MOST_RECORDS = 10_000  # of a task, unless a count is given: of both splits together
COUNTED = 20_000  # problems of a difficulty up to which those of a split are counted one by one


class Draw:
    """Random choices that are a function of the seeds alone, in every version of Python.

    >>> draw = Draw("seed", 7)
    >>> [draw.below(10) for _ in range(8)], draw.choice("abc"), draw.shuffled([1, 2, 3])
    ([6, 5, 3, 6, 4, 1, 3, 3], 'b', [3, 2, 1])
    """

    def __init__(self, *seeds: object) -> None:
        self._prefix, self._count = repr(seeds), 0

    def below(self, bound: int) -> int:
        """A number from 0 to bound - 1."""
        self._count += 1
        return _hashed(f"{self._prefix}{self._count}") % bound  # of 512 bits: even, whatever the bound

    def between(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return low + self.below(high - low + 1)

    def choice(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in items]


class Space(Protocol):
    """All problems of one difficulty, numbered from 0."""

    @property
    def level(self) -> int: ...

    @property
    def size(self) -> int: ...

    def content(self, number: int) -> str:
        """What decides the split: equal for problems that differ in their surface alone, whatever their level."""
        ...

    def record(self, number: int, draw: Draw) -> dict[str, Any]:
        """The fields of a problem, its surface drawn."""
        ...


class Generated(Sequence[dict[str, Any]]):
    """Records as a sequence, and a random-access source for grain. Nothing is held but a few bytes a record, if that.

    Record i depends on the seed, the split and i alone, not on how many records there are.

    Args:
      task: its name, in errors and as the hash's salt.
      spaces: one a difficulty; the records take turns, and go on with the others when one is used up.
      split: "all", "train", or "test": the share `held_out` of the contents, the same ones whatever the seed.
      count: how many records; 0: 10,000 for "all" and the share of it for a split, or all that there are.
      data_source: what rewards and evaluation know the records by; "": the task's name.

    Raises:
      UserError: an unknown split, a share outside [0, 1], or a count of more than there are.
    """

    def __init__(
        self,
        task: str,
        spaces: Sequence[Space],
        *,
        split: str = "all",
        held_out: float = 0.1,
        seed: int = 0,
        count: int = 0,
        data_source: str = "",
    ) -> None:
        check_split(split, held_out)
        if count < 0:
            raise UserError(f"{task}: count must be at least 0, found {count}")
        share = {"all": 1.0, "train": 1 - held_out, "test": held_out}[split]
        self._streams = [_Stream(task, space, split, held_out, share, seed) for space in spaces]
        self._task, self._seed, self._source = task, seed, data_source or task
        self._turns = _turns([stream.capacity for stream in self._streams])
        available = sum(stream.capacity for stream in self._streams)
        if count > available:
            raise UserError(
                f"{task}: count = {count}, and there are {available} different problems of split {split!r} at this "
                "difficulty; ask for fewer, or make it harder"
            )
        self._count = count or min(available, round(MOST_RECORDS * share))

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(f"{self._task}: record {index} of {self._count}")
        start, live, place = _find_turn(self._turns, int(index) % self._count)
        turn, of = divmod(place, len(live))
        stream = self._streams[live[of]]
        number = stream.number(start + turn)
        made = stream.space.record(number, Draw(self._task, self._seed, stream.space.level, number))
        return {**made, "level": stream.space.level, "data_source": self._source}


class _Stream:
    """The problems of a split in one difficulty, in an order drawn by the seed."""

    def __init__(self, task: str, space: Space, split: str, held_out: float, share: float, seed: int) -> None:
        self.space, self._seeds = space, (task, seed, space.level)
        self._task, self._split, self._held_out = task, split, held_out
        # Places in the order whose problem is of the split, as far as they were looked for, and how far that is. The
        # pair is replaced whole: grain reads from several threads.
        self._found: tuple[list[int], int] = ([], 0)
        if split == "all" or share in (0.0, 1.0):
            self.capacity = round(space.size * share)
        elif space.size <= COUNTED:
            self._look(space.size)
            self.capacity = len(self._found[0])
        else:  # as many as there are but for a chance of one in a thousand million
            self.capacity = math.floor(space.size * share - 6 * math.sqrt(space.size * share))

    def number(self, index: int) -> int:
        """The problem at a place of the split's own order."""
        if self._split == "all" or self.capacity == self.space.size:
            return self._at(index)
        found, _ = self._found
        if index >= len(found):
            found = self._look(max(2 * len(found), index + 1, 256))
        return self._at(found[index])

    def _look(self, wanted: int) -> list[int]:
        found, place = list(self._found[0]), self._found[1]
        while len(found) < wanted and place < self.space.size:
            if is_test(self._task, self.space.content(self._at(place)), self._held_out) == (self._split == "test"):
                found.append(place)
            place += 1
        self._found = found, place
        return found

    def _at(self, place: int) -> int:
        return permuted(place, self.space.size, *self._seeds)


def _turns(capacities: Sequence[int]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(first record, turns before it, difficulties that take turns from there on), until all are used up.

    >>> _turns([2, 5])
    [(0, 0, (0, 1)), (4, 2, (1,))]
    """
    found, first, before = [], 0, 0
    for capacity in sorted(set(capacities) - {0}):
        live = tuple(i for i, size in enumerate(capacities) if size >= capacity)
        found.append((first, before, live))
        first, before = first + len(live) * (capacity - before), capacity
    return found


def _find_turn(turns: Sequence[tuple[int, int, tuple[int, ...]]], index: int) -> tuple[int, tuple[int, ...], int]:
    first, before, live = next(turn for turn in reversed(turns) if turn[0] <= index)
    return before, live, index - first


def is_test(task: str, content: str, held_out: float) -> bool:
    """Whether a content belongs to "test": the same at any seed and difficulty; more `held_out` adds to them."""
    return _hashed(f"split of {task}: {content}") < held_out * 2.0**512


def permuted(place: int, size: int, *seeds: object) -> int:
    """What stands at `place` when 0 … size - 1 are put in another order: a Feistel network over two digits of base
    about sqrt(size), walked until it is inside (Black & Rogaway 2002).

    >>> [permuted(i, 10, "seed") for i in range(10)]
    [2, 0, 8, 9, 5, 7, 6, 4, 1, 3]
    """
    base = math.isqrt(max(size - 1, 0)) + 1
    key = repr(seeds)
    while True:
        left, right = divmod(place, base)
        for turn in range(4):
            left, right = right, (left + _hashed(f"{key}{turn},{right}")) % base
        place = left * base + right
        if place < size:
            return place


def combination(number: int, items: int, taken: int) -> list[int]:
    """The `number`-th of the C(items, taken) sets of `taken` of 0 … items - 1, ascending.

    >>> [combination(i, 4, 2) for i in range(math.comb(4, 2))]
    [[0, 1], [0, 2], [1, 2], [0, 3], [1, 3], [2, 3]]
    """
    found = []
    for left in range(taken, 0, -1):
        low, high = left - 1, items - 1
        while low < high:  # the largest item with C(item, left) <= number
            middle = (low + high + 1) // 2
            low, high = (middle, high) if math.comb(middle, left) <= number else (low, middle - 1)
        number, items = number - math.comb(low, left), low
        found.append(low)
    return found[::-1]


def selection(number: int, items: int, taken: int) -> list[int]:
    """The same with repetition: the `number`-th of the C(items + taken - 1, taken) multisets.

    >>> [selection(i, 2, 2) for i in range(3)]
    [[0, 0], [0, 1], [1, 1]]
    """
    return [item - i for i, item in enumerate(combination(number, items + taken - 1, taken))]


def levels(task: str, name: str, given: int | Sequence[int], low: int, high: int) -> list[int]:
    """A difficulty, or several to mix, as a list.

    Raises:
      UserError: one is no whole number from `low` to `high`, or none is given.
    """
    found = [given] if isinstance(given, int) else list(given)
    for value in found:
        if type(value) is not int or not low <= value <= high:
            raise UserError(f"{task}: {name} must be from {low} to {high}, or several of them, found {value!r}")
    if not found or len(set(found)) < len(found):
        raise UserError(f"{task}: {name} must be one number, or several different ones, found {given!r}")
    return found


def check_largest(task: str, largest: int, least: int) -> None:
    """
    Raises:
      UserError: the largest number of a task is none, or out of bounds.
    """
    if type(largest) is not int or not least <= largest <= 999_999:
        raise UserError(f"{task}: largest must be from {least} to 999999, found {largest!r}")


def one_of(task: str, name: str, given: str, valid: Mapping[str, T]) -> T:
    """
    Raises:
      UserError: `given` is not among the valid ones; names the nearest.
    """
    if given not in valid:
        raise UserError(f"{task}: {name} = {given!r}; {nearest(str(given), valid)}")
    return valid[given]


def check_split(split: str, held_out: float) -> None:
    """
    Raises:
      UserError: there is no such split, or a share that is none.
    """
    if split not in ("all", "train", "test"):
        raise UserError(f"split must be all, train or test, found {split!r}")
    if not 0 <= held_out <= 1:
        raise UserError(f"held_out must be in [0, 1], found {held_out!r}")


def digits_of(number: int, bases: Sequence[int]) -> Iterator[int]:
    """A number's digits in mixed bases, the last one first counted.

    >>> list(digits_of(7, [3, 4]))
    [1, 3]
    """
    found = []
    for base in reversed(bases):
        number, digit = divmod(number, base)
        found.append(digit)
    return reversed(found)


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=64).digest(), "big")

"""What is told while programs are compiled: which one, how many are to come, how long each took, and whether it was
read back from the compilation cache (compilation_cache.py)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import jax

Tell = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class Compilation:
    """A program that begins to be compiled, or, with its seconds, that is ready.

    >>> print(Compilation("gen")), print(Compilation("gen", 6.12)), print(Compilation("gen", 0.3, cached=True))
    compiling gen
    compiled gen in 6.1 s
    compiled gen in 0.3 s (from the cache)
    (None, None, None)
    """

    name: str
    seconds: float | None = None
    cached: bool = False

    def __str__(self) -> str:
        if self.seconds is None:
            return f"compiling {self.name}"
        return f"compiled {self.name} in {self.seconds:.1f} s" + (" (from the cache)" if self.cached else "")


# `print` is one: it writes a line when a program begins, and one when it is ready.
Report = Callable[[Compilation], object]


class CompileLog:
    """`with CompileLog(...) as report:` counts what is compiled, and tells the total when all of it is ready.

    >>> with CompileLog(print, print, expected=2) as report:
    ...     report(Compilation("gen"))
    ...     report(Compilation("gen", 1.5, cached=True))
    compiling gen (1 of 2)
    compiled gen in 1.5 s (from the cache)
    compiled 1 program in 0.0 s (1 from the cache)
    """

    def __init__(self, begin: Tell, note: Tell, *, expected: int = 0) -> None:
        """
        Args:
          begin: told what begins; a display may show it for as long as it lasts.
          note: told what is ready.
          expected: programs that there will be; 0: not known.
        """
        self._begin, self._note, self._expected = begin, note, expected
        self._start, self.ready, self.cached = time.perf_counter(), 0, 0

    def __call__(self, what: Compilation) -> None:
        if what.seconds is None:
            number = self.ready + 1
            known = f" ({number} of {self._expected})" if number <= self._expected else ""
            self._begin(f"{what}{known}")
        else:
            self.ready, self.cached = self.ready + 1, self.cached + what.cached
            self._note(str(what))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.ready:
            self._note(total(self.ready, self.cached, time.perf_counter() - self._start))


def total(programs: int, cached: int, seconds: float) -> str:
    """
    >>> total(9, 7, 12.34)
    'compiled 9 programs in 12.3 s (7 from the cache)'
    """
    what = f"{programs} program{'s' * (programs != 1)}"
    return f"compiled {what} in {seconds:.1f} s" + (f" ({cached} from the cache)" if cached else "")


_hits = 0


def cache_hits() -> int:
    """Programs that this process has read back from the compilation cache so far."""
    return _hits


def _listen(event: str, **_: str | int) -> None:
    global _hits
    _hits += event == "/jax/compilation_cache/cache_hits"


jax.monitoring.register_event_listener(_listen)

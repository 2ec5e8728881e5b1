"""The metadata of a GGUF file, one value at a time: every error names the file, the key, what is wanted and what is
there. A damaged or hostile file can hold anything under any key."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

from jaxrl_llm.errors import UserError

T = TypeVar("T")
LARGEST = 2**31 - 1  # of sizes and ids: what an int32 holds


def _is_whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x <= LARGEST


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _all(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, list) and all(map(of, x))


def _is_text(x: Any) -> bool:
    return isinstance(x, str)


# What a key may be asked for, in the words of an error's text.
KINDS: dict[str, Callable[[Any], bool]] = {
    "one text": _is_text,
    "true or false": lambda x: isinstance(x, bool),
    "one whole number": _is_whole,
    "one whole number above 0": lambda x: _is_whole(x) and x > 0,
    "one number above 0": lambda x: _is_number(x) and x > 0,
    "a list of texts": _all(_is_text),
    "a list of whole numbers": _all(_is_whole),
    "a list of numbers": _all(_is_number),
}


class Fields:
    """The metadata by their keys; what is asked for is of the type that is asked for, or refused by name."""

    def __init__(self, path: Path, values: Mapping[str, Any]):
        """
        Args:
          path: of the GGUF file, for messages.
          values: bool, int, float, str or lists of these, as gguf's reader gives them.
        """
        self.path, self._values = path, values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    @overload
    def get(self, key: str, kind: str) -> Any: ...
    @overload
    def get(self, key: str, kind: str, default: T) -> T | Any: ...
    def get(self, key: str, kind: str, default: Any = ...) -> Any:
        """The value of a key.

        Args:
          kind: of `KINDS`.
          default: where there is no such key; without one the key is needed.

        Raises:
          UserError: it is needed and missing, or of another kind.
        """
        found = self._values.get(key)
        if found is None:
            if default is ...:
                raise UserError(f"{self.path}: {key} is missing: expected {kind}")
            return default
        if not KINDS[kind](found):
            raise UserError(f"{self.path}: {key}: expected {kind}, found {self.show(key)}")
        return found

    def show(self, key: str) -> str:
        """A value as error texts have it."""
        return f"{self._values.get(key)!r:.40}"

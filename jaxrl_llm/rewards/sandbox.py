"""What runs inside a locked-down process, in one of three roles. The standard library only.

`python -I -S -B sandbox.py ROLE`, see `code.py` for who starts it and why the roles are apart:

- answer: runs the model's code and then answers calls, on a pipe, until it closes
- tests: runs the tests; names that the model's code defines are stand-ins that call the other process
- script: runs the model's code as a program, stdin and stdout being what is tested
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.util
import io
import json
import os
import sys
from types import ModuleType
from typing import Any, BinaryIO

LONGEST_MESSAGE = 4_000_000  # characters of one call or result
DEEPEST = 60
COLLECTIONS: dict[str, Any] = {"l": list, "t": tuple, "s": set, "z": frozenset}
# Modules that a test may use without importing them, as if the answer had: the real ones, not the answer's.
MODULES = ("math", "collections", "itertools", "functools", "re", "random", "string", "heapq", "bisect", "operator")
MODULES += ("copy", "datetime", "cmath", "statistics", "json", "sys", "decimal", "fractions", "typing", "numpy")


# --- what passes between the two processes: plain data, and references to whatever is none


class Unsendable(Exception):
    """A value of the tests that cannot be given to the answer's code, such as a function."""


class Encoder:
    """Plain data as JSON; anything else by a number under which it is kept."""

    def __init__(self, keeps: bool) -> None:
        self.kept: list[Any] = []
        self.keeps = keeps

    def encode(self, value: Any, depth: int = 0) -> Any:
        """Of a subclass of a plain type only the plain part goes over: no method of the answer's compares anything."""
        if depth > DEEPEST:
            raise ValueError("a value that is nested too deeply")
        if value is None or value is True or value is False:
            return value
        if isinstance(value, int):
            return ["i", format(int.__index__(value), "x")]
        if isinstance(value, float):
            return ["f", float.hex(value)]
        if isinstance(value, complex):
            return ["c", float.hex(value.real), float.hex(value.imag)]
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, bytes | bytearray):
            return ["b" if isinstance(value, bytes) else "B", bytes(value).hex()]
        for name, kind in COLLECTIONS.items():
            if isinstance(value, kind):
                return [name, *(self.encode(item, depth + 1) for item in kind.__iter__(value))]
        if isinstance(value, dict):
            return ["d", *([self.encode(k, depth + 1), self.encode(v, depth + 1)] for k, v in dict.items(value))]
        if isinstance(value, Remote):
            return ["r", object.__getattribute__(value, "_number")]
        if not self.keeps:
            raise Unsendable(f"the tests give the answer's code a {type(value).__name__}, which cannot be sent to it")
        if len(self.kept) >= 100_000:
            raise ValueError("too many objects")
        self.kept.append(value)
        return ["r", len(self.kept) - 1]

    def decode(self, value: Any, link: Link | None = None) -> Any:
        if value is None or isinstance(value, bool | str):
            return value
        name, rest = value[0], value[1:]
        if name == "i":
            return int(rest[0], 16)
        if name == "f":
            return float.fromhex(rest[0])
        if name == "c":
            return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
        if name in ("b", "B"):
            return (bytes if name == "b" else bytearray).fromhex(rest[0])
        if name == "r":
            return self.kept[int(rest[0])] if self.keeps else Remote(int(rest[0]), link)
        if name == "d":
            return {self.decode(key, link): self.decode(item, link) for key, item in rest}
        return COLLECTIONS[name](self.decode(item, link) for item in rest)


class Link:
    """The tests' end: calls into the answer's process, one line each way."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self.reader, self.writer = reader, writer
        self.encoder = Encoder(keeps=False)
        self.unsendable: str | None = None

    def ask(self, what: str, *details: Any) -> Any:
        self.writer.write(json.dumps([what, *details]).encode() + b"\n")
        self.writer.flush()
        line = self.reader.readline(LONGEST_MESSAGE)
        if not line.endswith(b"\n"):
            raise RuntimeError("the answer's process has ended, or said too much")
        kind, *rest = json.loads(line)
        if kind == "raised":
            name, text = rest
            known = getattr(builtins, name, None) if isinstance(name, str) else None
            plain = isinstance(known, type) and issubclass(known, Exception)
            raise known(str(text)) if plain else RuntimeError(f"{name}: {text}")  # type: ignore[misc]
        return rest

    def call(self, target: Any, arguments: tuple, keywords: dict[str, Any]) -> Any:
        try:
            sent = [self.encoder.encode(argument) for argument in arguments]
            named = {key: self.encoder.encode(value) for key, value in keywords.items()}
        except Unsendable as error:
            self.unsendable = str(error)
            raise
        result, changed = self.ask("call", target, sent, named)
        for at, now in changed:  # a function may change what it is given: sort a list in place
            replace(arguments[int(at)], self.encoder.decode(now, self))
        return self.encoder.decode(result, self)


def replace(old: Any, new: Any) -> None:
    if isinstance(old, list | bytearray) and isinstance(new, type(old)):
        old[:] = new  # type: ignore[assignment]
    elif isinstance(old, dict | set) and isinstance(new, type(old)):
        old.clear()
        old.update(new)


class Remote:
    """Something of the answer's process that is no plain data. Equal to itself alone, whatever it says of itself."""

    def __init__(self, number: int | str, link: Link | None) -> None:
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_link", link)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _link(self).call(_number(self), arguments, keywords)

    def _method(self, name: str, *arguments: Any) -> Any:
        link, number = _link(self), _number(self)
        (attribute,) = link.ask("get", number, name)
        return link.call(attribute[1], arguments, {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        link = _link(self)
        (value,) = link.ask("get", _number(self), name)
        return link.encoder.decode(value, link)

    def __setattr__(self, name: str, value: Any) -> None:
        link = _link(self)
        link.ask("set", _number(self), name, link.encoder.encode(value))

    def __iter__(self) -> Any:
        link = _link(self)
        (iterator,) = link.ask("iter", _number(self))
        while True:
            done, value = link.ask("next", iterator)
            if done:
                return
            yield link.encoder.decode(value, link)

    def __len__(self) -> int:
        try:
            return self._method("__len__")
        except AttributeError as error:  # what list() of a generator expects
            raise TypeError(str(error)) from None

    def __next__(self) -> Any:
        return self._method("__next__")

    def __str__(self) -> str:
        return str(self._method("__str__"))

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        return self._method("__getitem__", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._method("__setitem__", key, value)

    def __contains__(self, item: Any) -> bool:
        return self._method("__contains__", item) is True


def _link(remote: Remote) -> Link:
    return object.__getattribute__(remote, "_link")


def _number(remote: Remote) -> int | str:
    return object.__getattribute__(remote, "_number")


# --- the three roles


def answer(given: dict[str, Any], reader: BinaryIO, writer: BinaryIO) -> None:
    """Runs the code, tells its names, then answers calls. Whatever the code does to this process, only plain data
    leaves it."""
    names: dict[str, Any] = {"__name__": "answer", "__builtins__": builtins}
    encoder = Encoder(keeps=True)

    def say(*message: Any) -> None:
        writer.write(json.dumps(message).encode() + b"\n")
        writer.flush()

    def raised(error: BaseException) -> None:
        say("raised", type(error).__name__, str(error)[:500])

    iterators: list[Any] = []
    try:
        exec(compile(given["code"], "answer.py", "exec", dont_inherit=True), names)
    except BaseException as error:  # SystemExit too
        raised(error)
    else:
        modules = [name for name, value in names.items() if isinstance(value, type(sys))]
        say("names", [name for name in names if not name.startswith("__") and name not in modules], modules)
    for line in reader:
        message: list[Any] = json.loads(line)
        what, details = message[0], message[2:]
        target: Any = message[1]
        try:
            found: Any = None
            if what != "next":
                found = names[target] if isinstance(target, str) else encoder.kept[int(target)]
            if what == "call":
                arguments = [encoder.decode(argument) for argument in details[0]]
                keywords = {key: encoder.decode(value) for key, value in details[1].items()}
                result = encoder.encode(found(*arguments, **keywords))
                now = [
                    (at, encoder.encode(x)) for at, x in enumerate(arguments) if type(x) in (list, dict, set, bytearray)
                ]
                say("done", result, [(at, new) for at, new in now if new != details[0][at]])
            elif what == "get":
                value = getattr(found, details[0])
                say("done", ["r", _keep(encoder, value)] if callable(value) else encoder.encode(value))
            elif what == "set":
                setattr(found, details[0], encoder.decode(details[1]))
                say("done")
            elif what == "iter":
                iterators.append(iter(found))
                say("done", len(iterators) - 1)
            else:
                try:
                    say("done", False, encoder.encode(next(iterators[int(target)])))
                except StopIteration:
                    say("done", True, None)
        except BaseException as error:
            raised(error)


def _keep(encoder: Encoder, value: Any) -> int:
    encoder.kept.append(value)
    return len(encoder.kept) - 1


def tests(given: dict[str, Any], reader: BinaryIO, writer: BinaryIO, verdict: BinaryIO) -> None:
    """Runs the tests, each a piece of code, in one namespace, and says of each None if it passed, or why not."""
    link = Link(reader, writer)
    results: list[str | None] = []
    setup, pieces = given["setup"], given["tests"]
    broken = unreadable([setup, *pieces])
    try:
        line = reader.readline(LONGEST_MESSAGE)
        said: list[Any] = (
            json.loads(line) if line.endswith(b"\n") else ["raised", "RuntimeError", "the process has ended"]
        )
        if said[0] == "names":
            results = _run_tests(link, setup, pieces, given.get("entry_point"), said[1], said[2])
        else:
            results = [f"the answer's code failed: {said[1]}: {said[2]}"[:200]] * len(pieces)
    finally:
        report = {"results": results, "broken": broken or link.unsendable}
        verdict.write(json.dumps(report).encode() + b"\n")
        verdict.flush()


def _run_tests(
    link: Link, setup: str, pieces: list[str], entry_point: str | None, names: list[str], modules: list[str]
) -> list[str | None]:
    namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
    wanted = used_names("\n".join([setup, *pieces]))
    for name in modules:
        if name in MODULES and name in wanted:
            with contextlib.suppress(ImportError):
                namespace[name] = __import__(name)
    for name in names:
        # The answer's `all` or `abs` is not the tests': what they test with is their own.
        if name == entry_point or (name in wanted and not hasattr(builtins, name)):
            namespace[name] = Remote(name, link)
    if entry_point is not None:
        namespace["candidate"] = namespace.get(entry_point)
    results: list[str | None] = []
    for piece in [setup, *pieces]:
        try:
            exec(compile(piece, "tests.py", "exec", dont_inherit=True), namespace)
        except (Exception, SystemExit) as error:
            results.append(f"{type(error).__name__}: {error}"[:200].removesuffix(": "))
        else:
            results.append(None)
    return results[1:] if results[0] is None else [f"the record's setup failed: {results[0]}"] * len(pieces)


def unreadable(pieces: list[str]) -> str | None:
    for piece in pieces:
        try:
            compile(piece, "tests.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return f"{type(error).__name__}: {error} in {piece[:100]!r}"
    return None


def used_names(code: str) -> set[str]:
    """Every name that a piece of code reads."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def script(given: dict[str, Any]) -> None:
    """Runs the code as a program, whose stdin is the test's."""
    sys.stdin = io.TextIOWrapper(io.BytesIO(given["stdin"].encode("utf-8", "replace")), encoding="utf-8")
    names = {"__name__": "__main__", "__builtins__": builtins}
    exec(compile(given["code"], "answer.py", "exec", dont_inherit=True), names)


def _lockdown() -> ModuleType:
    """By its path: the folder must not be one that is imported from, it has a numbers.py."""
    spec = importlib.util.spec_from_file_location("lockdown", os.path.join(os.path.dirname(__file__), "lockdown.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    role = sys.argv[1]
    given = json.loads(sys.stdin.buffer.read())
    given["pipes"] = [int(number) for number in sys.argv[2:]]
    _lockdown().locked_down(given)
    for name in ("exit", "quit"):  # which `site` would define
        setattr(builtins, name, sys.exit)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    if role == "script":
        return script(given)
    pipes = given["pipes"]
    reader, writer = os.fdopen(pipes[0], "rb"), os.fdopen(pipes[1], "wb")
    if role == "answer":
        answer(given, reader, writer)
    else:
        tests(given, reader, writer, os.fdopen(pipes[2], "wb"))


if __name__ == "__main__":
    main()

"""A worker's own side: it loads the reward functions, says that it is ready, and scores what it is sent.

What comes in is the parent's and is pickled; what goes out has been near a model's text, so that it is JSON, which the
parent can read without running anything. Whatever a function prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from jaxrl_llm.errors import UserError
from jaxrl_llm.rewards.forms import Form, call
from jaxrl_llm.rewards.registry import resolve

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LENGTH = struct.Struct(">Q")  # of a message, before it
LONGEST_ERROR = 4_000  # characters of an error's text
# Of address space beyond the memory limit: libraries map far more than they use (jax: 1.3 GB). It bounds shared
# memory, which RLIMIT_DATA does not count.
MAPPED = 16 * 2**30
Function = tuple[str, Form, Callable[..., Any]]  # name, form, the function itself


def main(descriptor: int, parent: int) -> None:
    """Serves until the parent closes its end.

    Args:
      descriptor: of the socket to the parent.
      parent: its process id.
    """
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback, which would be nobody's
    _outlive_requests_to_stop()
    _die_with(parent)
    with socket.socket(fileno=descriptor) as channel:
        given = receive(channel)
        if given is None:
            return
        try:
            settings = pickle.loads(given)
            _limit_memory(settings["memory"])
            functions = [_load(name, form, source) for name, form, source in settings["functions"]]
        except BaseException as error:  # whatever a user's module does when it is imported
            text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            send(channel, {"error": text[:LONGEST_ERROR]})
            return
        send(channel, {"ready": True})
        own = os.getpid()
        while (message := receive(channel)) is not None:
            reply = _reply(functions, message)
            if os.getpid() != own:  # a function has forked, and this is the child
                os._exit(0)
            send(channel, reply)


def _outlive_requests_to_stop() -> None:
    """A scheduler sends its SIGTERM, SIGUSR1 or SIGHUP to every process of a job. The run ends its step then, and needs
    its workers for that; it ends them itself. What a function has forked is no worker, and stops."""
    own = os.getpid()

    def handle(number: int, frame: Any) -> None:
        if os.getpid() != own:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for name in ("SIGTERM", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), handle)


def receive(channel: socket.socket) -> bytes | None:
    """The next message; None at the end."""
    header = _exactly(channel, LENGTH.size)
    return None if header is None else _exactly(channel, *LENGTH.unpack(header))


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        part = channel.recv(min(size, 2**20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(channel: socket.socket, reply: Any) -> None:
    data = json.dumps(reply).encode()
    channel.sendall(LENGTH.pack(len(data)))
    channel.sendall(data)


def _load(name: str, form: Form, source: str | bytes) -> Function:
    """
    Args:
      source: what `resolve` takes, or a pickled function.
    """
    try:
        function = resolve(source) if isinstance(source, str) else pickle.loads(source)
        # What is slow at the first call, an import say, must not be charged to the first row.
        for warm in (function, getattr(function, "func", None)):  # a partial's function
            getattr(warm, "warm_up", lambda: None)()
    except Exception as error:
        raise UserError(f"reward {name!r}: a worker cannot load it: {type(error).__name__}: {error}") from error
    return name, form, function


def _reply(functions: list[Function], message: bytes) -> dict[str, Any]:
    try:
        number, index, prompts, responses, records = pickle.loads(message)
    except Exception as error:
        return {"error": f"a worker cannot read a record: {type(error).__name__}: {error}"[:LONGEST_ERROR]}
    name, form, function = functions[index]
    try:
        results = call(function, form, name, prompts, responses, records)
    except UserError as error:
        return {"number": number, "error": str(error)[:LONGEST_ERROR]}
    rows = [(None if found.failure else found.score, found.extras, found.failure) for found in results]
    return {"number": number, "results": rows}


def _die_with(parent: int) -> None:
    """Linux kills this process when its parent is gone; elsewhere the guard and the closed socket end it. What it has
    started becomes its own child when what came between is gone: so that all of it can be found."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            library.prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:  # it was quicker
        os._exit(1)


def _limit_memory(limit: int) -> None:
    """Bounds this process and each that it starts.

    RLIMIT_DATA counts what a program may write to, so that a limit of 1 GB is one of 1 GB. RLIMIT_AS alone would count
    reservations as well: jax on a CPU maps 1.4 GB and uses 0.2.

    Args:
      limit: bytes; 0: none.
    """
    limits = {resource.RLIMIT_CORE: 0}  # a crash is not to fill the disk
    if limit:
        limits |= {resource.RLIMIT_DATA: limit, resource.RLIMIT_AS: limit + MAPPED}
    for kind, value in limits.items():
        with contextlib.suppress(ValueError, OSError):  # macOS refuses some, and a lower limit may stand
            resource.setrlimit(kind, (value, value))

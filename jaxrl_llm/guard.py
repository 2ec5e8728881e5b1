"""What a command's run is guarded by: signals that ask it to stop, and a watchdog. `fit` in a notebook has neither."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.config import Config
from jaxrl_llm.errors import exit_code
from jaxrl_llm.signals import StopSignals
from jaxrl_llm.watchdog import Watchdog


class Guard:
    """Belongs to one run. Until it stands, nobody asks the run to stop and its phases take what time they like."""

    def __init__(
        self, *, phase_timeout: float = 0.0, workdir: str | Path | None = None, signals: StopSignals | None = None
    ) -> None:
        self.signals = signals or StopSignals()
        self.watchdog = Watchdog(phase_timeout, workdir)

    @contextlib.contextmanager
    def standing(self) -> Iterator[Guard]:
        with self.signals.installed(), self.watchdog.watching():
            yield self


def guarded_exit_code(body: Callable[[StopSignals], None]) -> int:
    """`errors.exit_code` of a command that writes a run: it hears the signals that ask it to stop from its beginning,
    since to read a configuration and to find the other processes takes time too."""
    signals = StopSignals()

    def hearing() -> None:
        with signals.installed():
            body(signals)

    return exit_code(hearing)


def run_guarded(start: Callable[..., Any], config: Config, args: Namespace, signals: StopSignals) -> None:
    """What a command that writes a run does: starts it, guarded, and takes every step."""
    guard = Guard(phase_timeout=config.trainer.phase_timeout, workdir=args.workdir, signals=signals)
    with guard.standing(), start(config, args.workdir, strict_resume=args.strict_resume, guard=guard) as run:
        for _ in run:
            pass

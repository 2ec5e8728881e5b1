"""Signals that ask a run to stop, as schedulers send them before they take a machine away.

SIGTERM (Kubernetes, spot machines, `scancel`), SIGUSR1 (SLURM's `--signal=USR1@120`) and SIGHUP (a terminal that is
closed; not where it is ignored, as under `nohup`) let the step end; the run saves and its command exits with 75. The
same signal once more changes nothing: launchers often deliver it twice. Before the first step, where nothing is lost,
the run ends at once. Ctrl-C stays what it is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from jaxrl_llm.errors import TryAgain

STOPPING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name))


class StopSignals:
    """Whether a run was asked to stop. `with stop.installed():` a command listens; without it nothing is ever asked."""

    def __init__(self) -> None:
        self.received = ""  # the signal's name
        self.stepping = False  # from the first step on, a run stops when the step ends

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Takes over the signals, in the main thread (no other may), and gives them back."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[signal.Signals, Any] = {}
        try:
            for number in STOPPING:
                if number.name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                before[number] = signal.signal(number, self._handle)
            yield
        finally:
            for number, handler in before.items():
                # None: a handler that was not installed from Python, which cannot be put back.
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.received = self.received, signal.Signals(number).name
        if not self.stepping:
            raise TryAgain(f"{self.received}: stopped before the first step")
        text = "the run is stopping already" if again else "the step is finished and saved, then the run stops"
        # Not print: it may be what was interrupted.
        with contextlib.suppress(OSError):
            os.write(2, f"{self.received}: {text} (Ctrl-C: at once, without saving)\n".encode())

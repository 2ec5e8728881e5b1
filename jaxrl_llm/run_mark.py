"""RUN/lock: which process a run's folder belongs to, and where in the run it is.

The process that writes holds a lock on the file, which the system gives up with the process, however that ends: two
runs in one folder would take each other's checkpoints away. At an orderly end the file is emptied: what is left in it
tells the next start that the last process was killed (for memory, say: nobody has time to speak then), and where.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import socket
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import StorageError, TryAgain
from jaxrl_llm.peers import Peers
from jaxrl_llm.run_files import LOCK, storage

try:
    import fcntl
except ImportError:  # no such locks there
    fcntl = None

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems that have none: all goes on without


@dataclasses.dataclass(frozen=True)
class Killed:
    """A process that ended without a word, as far as its mark tells."""

    process: str
    phase: str
    step: int  # the last one that was done
    held: int  # bytes of the host's memory at the most until then; 0: not known


class RunMark:
    """Holds a run's folder until `close`, or until the process ends."""

    def __init__(self, workdir: str | Path) -> None:
        """
        Args:
          workdir: must be there.

        Raises:
          TryAgain: another process has it.
          StorageError: its file cannot be written.
        """
        self.path = Path(workdir) / LOCK
        with storage(self.path):
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        found = self._read()
        try:
            if fcntl:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(self._file)
                who = f" ({found['process']})" if found else ""
                raise TryAgain(f"{workdir}: another process{who} writes this run; one at a time can") from error
        self.killed: Killed | None = None  # who had the folder before, if it ended without a word
        if found:
            with contextlib.suppress(TypeError):
                self.killed = Killed(**found)
        self._process = f"process {os.getpid()} on {socket.gethostname()}"
        self.at(0, "start")

    def at(self, step: int, phase: str) -> None:
        """Says where the run is now; takes microseconds, and never fails.

        Args:
          step: the last one that is done.
        """
        if self._file >= 0:
            self._write(json.dumps(dataclasses.asdict(Killed(self._process, phase, step, _memory()))))

    def close(self) -> None:
        """An orderly end; a second call does nothing."""
        if self._file >= 0:
            self._write("")
            os.close(self._file)
            self._file = -1

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self._file, text.encode(), 0)
            os.ftruncate(self._file, len(text.encode()))

    def _read(self) -> dict[str, Any] | None:
        """None: nothing, or nothing that makes sense."""
        try:
            found = json.loads(os.pread(self._file, 1 << 12, 0))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and "process" in found else None


def hold(workdir: Path | None, peers: Peers, mark: RunMark | None = None) -> RunMark | None:
    """The mark of a folder, if that holds a run by now; every process of it calls this, and the first one has it.

    Args:
      mark: the one that it has already.

    Raises:
      TryAgain, StorageError: as RunMark, in every process.
    """
    refused: BaseException | None = None
    if peers.first and mark is None and workdir and (workdir / "config.json").exists():
        try:
            mark = RunMark(workdir)
        except (TryAgain, StorageError) as error:
            refused = error
    if refused := peers.share(refused)[0]:
        raise refused
    return mark


def _memory() -> int:
    """Bytes of the host's memory that this process has held at the most."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

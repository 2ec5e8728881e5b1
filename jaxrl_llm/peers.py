"""The processes of a run over several hosts: what each of them must know of the others' host work.

Every process runs the same program on the same data, and arrays are spread over all of their devices. What is done on
hosts alone is done once: rewards by each process for its own rows, files by the first process.
"""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import jax
import numpy as np

from jaxrl_llm.errors import UserError

HEARTBEAT_SECONDS = 60  # without a sign of life, after which a process counts as dead and the runtime ends the others
SHUTDOWN_SECONDS = 20  # that a process which ends with an error waits for the others


@dataclasses.dataclass(frozen=True)
class Peers:
    """This process among all of them. Every process must call `share` the same times in the same order."""

    index: int
    count: int

    @classmethod
    def of_run(cls) -> Peers:
        return cls(jax.process_index(), jax.process_count())

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.index == 0

    def share(self, value: Any) -> list[Any]:
        """What each process gives, in the order of the processes; waits for them all.

        Args:
          value: anything that can be pickled.
        """
        if self.count == 1:
            return [value]
        from jax.experimental import multihost_utils

        own = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.asarray(multihost_utils.process_allgather(np.int32(own.size))).reshape(-1)
        room = 1 << int(sizes.max() - 1).bit_length()  # few different sizes, since each is a program of its own
        padded = np.zeros(room, np.uint8)
        padded[: own.size] = own
        gathered = np.asarray(multihost_utils.process_allgather(padded))
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(gathered, sizes.tolist(), strict=True)]


def join_run(coordinator: str | None, num_processes: int | None, process_id: int | None) -> Peers:
    """Makes this process one of a run's. Without arguments the cluster says which (TPU pods, SLURM, …).

    Raises:
      UserError: what was given does not make a run, or the others do not come.
    """
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        given = f"--coordinator={coordinator} --num_processes={num_processes} --process_id={process_id}"
        raise UserError(f"{'--distributed' if coordinator is None else given}: {error}") from error
    return Peers.of_run()

"""The processes of a run over several hosts: what each of them must know of the others' host work.

Every process runs the same program on the same data, and arrays are spread over all of their devices. What is done on
hosts alone is done once: rewards by each process for its own rows, files by the first process.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_llm.errors import TRY_AGAIN, UserError, say

JOIN_SECONDS = 300  # that a process waits for the others at its start
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
      UserError: what was given does not make a run.
      TryAgain: the others do not come within JOIN_SECONDS; where the runtime cannot be interrupted, the process ends
        with that exit code.
    """
    given = f"--coordinator={coordinator} --num_processes={num_processes} --process_id={process_id}"
    given = "--distributed" if coordinator is None else given
    late = (
        f"{given}: not all of the run's processes have come within {JOIN_SECONDS} s. Each must be started with the "
        "same address of process 0, which all of them can reach, the same number of processes, and a number of its own"
    )

    def give_up() -> None:
        # jax would abort the process, and tell of its own code alone.
        say(f"stopped: {late}", sys.stderr)
        os._exit(TRY_AGAIN)

    clock = threading.Timer(JOIN_SECONDS, give_up)
    clock.daemon = True
    clock.start()
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=2 * JOIN_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        why = str(error)
        if coordinator is None and "should be defined" in why:
            why = "no cluster says who is who here; give --coordinator, --num_processes and --process_id"
        raise UserError(f"{given}: {why}") from error
    finally:
        clock.cancel()
    return Peers.of_run()


SHOWN = 8  # differences that an error lists
SETTINGS = (
    "jax_default_matmul_precision", "jax_default_prng_impl", "jax_enable_x64", "jax_numpy_dtype_promotion",
    "jax_random_seed_offset", "jax_threefry_partitionable",
)  # fmt: skip


def settings_of_jax() -> dict[str, Any]:
    """What changes the programs that a process compiles, or their numbers, without any config."""
    return {"jax's version": jax.__version__} | {name: getattr(jax.config, name, None) for name in SETTINGS}


def must_agree(peers: Peers, given: Mapping[str, Any]) -> None:
    """Compares what the processes were given. Of two that differ each would compute its share of another run, and
    nothing would tell but the numbers.

    Args:
      given: the same names in every process.

    Raises:
      UserError: in all of them, naming what differs between the first process and another.
    """
    first, *others = peers.share({name: repr(value) for name, value in given.items()})
    for index, other in enumerate(others, 1):
        names = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
        if names:
            lines = [f"{name}: {first.get(name)} in process 0, {other.get(name)} in process {index}" for name in names]
            more = [f"… and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
            head = "the processes of a run must be given the same:"
            raise UserError("\n  ".join([head, *lines[:SHOWN], *more]))

"""Starts JAX in a job of several processes, which exchange small values on the host.

The values go through the store of JAX's coordination service. No device takes part, so
any thread may exchange them while a step runs.
"""

import collections
import itertools
import json
from collections.abc import Iterator
from typing import Any, Final

import jax
from jax._src import clusters  # no public name, as the next
from jax._src import distributed as _jax_distributed

__all__ = ["exchange", "is_first", "num_processes", "start"]

START_SECONDS: Final = 300
"""Longest wait for the name of the coordinator's host, as in JAX."""

EXCHANGE_SECONDS: Final = 600
"""Longest wait for the other processes. One that dies is found earlier, by JAX."""

_numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


def start(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Starts JAX in a job of several processes, before any other use of JAX.

    All processes call it, in the same program. Without arguments, JAX asks the
    environment: Cloud TPU, GKE, Slurm and Open MPI tell a process its place. Outside of
    a job, and with one process, it starts nothing.

    JAX's heartbeats end all processes some time after one has died.

    Args:
      coordinator: `HOST:PORT` of process 0.
      num_processes: processes of the job.
      process_id: number of this process, from 0.

    Raises:
      ValueError: if some arguments are missing, and no environment tells them.

    Example:
      >>> start(num_processes=1)
    """
    if num_processes == 1 or jax.distributed.is_initialized():
        return
    given = (coordinator, num_processes, process_id)
    if given == (None, None, None) and not _is_in_a_job():
        return
    jax.distributed.initialize(*given)


def _is_in_a_job() -> bool:
    """Returns True if JAX finds a job of several processes in the environment."""
    place = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, START_SECONDS
    )
    return place[1] is not None and place[1] > 1


def num_processes() -> int:
    """Returns the processes of the job; 1 outside of one. Does not start devices."""
    return _jax_distributed.global_state.num_processes or 1


def is_first() -> bool:
    """Returns True on the process that prints, and writes the files of a run."""
    return _jax_distributed.global_state.process_id == 0


def exchange(name: str, value: Any) -> list[Any]:
    """Returns the value of every process, in their order, on all of them.

    All processes call it, the same number of times for each name.

    Args:
      name: name of the exchange. Exchanges of one name happen in order; threads use
        different names.
      value: JSON value of this process.

    Raises:
      jax.errors.JaxRuntimeError: if a process does not arrive in time.

    Example:
      >>> exchange("steps", 7)
      [7]
    """
    if num_processes() == 1:
        return [value]
    client: Any = _jax_distributed.global_state.client
    number, own = next(_numbers[name]), _jax_distributed.global_state.process_id

    def key(number: int, process: int) -> str:
        return f"tpu_embedding/{name}/{number}/{process}"

    client.key_value_set(key(number, own), json.dumps(value))
    values = [
        client.blocking_key_value_get(key(number, process), 1000 * EXCHANGE_SECONDS)
        for process in range(num_processes())
    ]
    if number:  # All processes have read the one before: they have come to this one.
        client.key_value_delete(key(number - 1, own))
    return [json.loads(text) for text in values]

"""Starts JAX in multi-process jobs, and exchanges small host values between processes.

The key-value store in JAX's coordination service carries the values. Devices take no
part, so any thread may exchange values while a step runs.
"""

import collections
import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any, Final

import jax
from jax._src import clusters  # not public, like the next import
from jax._src import distributed as _jax_distributed

__all__ = ["exchange", "is_first", "num_processes", "post", "posted", "start"]

START_SECONDS: Final = 300
"""Longest wait for the coordinator's host name, as in JAX."""

EXCHANGE_SECONDS: Final = 600
"""Longest wait for the other processes. JAX notices a dead process earlier."""

_numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


def start(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Starts JAX in a multi-process job, before any other use of JAX.

    Call it in every process. Without arguments, JAX detects jobs on Cloud TPU, GKE,
    Slurm and Open MPI. Outside a job, or with one process, the function does nothing.

    Note that JAX ends all processes some time after one of them dies and its heartbeats
    stop.

    Args:
      coordinator: `HOST:PORT` where process 0 listens.
      num_processes: process count.
      process_id: number of this process, from 0.

    Raises:
      ValueError: if an argument is missing and the environment doesn't provide it.

    Example:
      >>> start(num_processes=1)
    """
    if num_processes == 1 or jax.distributed.is_initialized():
        return
    given = (coordinator, num_processes, process_id)
    # Outside a job, `initialize` without arguments raises an error.
    if given == (None, None, None) and not _is_in_a_job():
        return
    jax.distributed.initialize(*given)


def _is_in_a_job() -> bool:
    # `jax.distributed.initialize` makes the same call. Item 1 of the result is the
    # process count.
    place = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, START_SECONDS
    )
    return place[1] is not None and place[1] > 1


def num_processes() -> int:
    """Counts the processes in the job. Outside a job, the count is 1.

    Example:
      >>> num_processes()
      1
    """
    # `jax.process_count` would initialize devices.
    return _jax_distributed.global_state.num_processes or 1


def is_first() -> bool:
    """Tells whether this is process 0, which prints and writes files.

    Example:
      >>> is_first()
      True
    """
    return _jax_distributed.global_state.process_id == 0


def exchange(name: str, value: Any) -> list[Any]:
    """Exchanges a small value between all processes.

    All processes must call this function, equally often for each name.

    Args:
      name: identifies the exchange. Exchanges with the same name happen in order, so
        use different names in different threads.
      value: JSON-serializable value from this process.

    Returns:
      All values, in process order.

    Raises:
      jax.errors.JaxRuntimeError: if a process does not arrive in time.

    Example:
      >>> exchange("steps", 7)
      [7]
    """
    if num_processes() == 1:
        return [value]
    client: Any = _jax_distributed.global_state.client
    # A key can be set only once, so every exchange has its own number.
    number, own = next(_numbers[name]), _jax_distributed.global_state.process_id

    def key(number: int, process: int) -> str:
        return f"tpu_embedding/{name}/{number}/{process}"

    client.key_value_set(key(number, own), json.dumps(value))
    values = [
        client.blocking_key_value_get(key(number, process), 1000 * EXCHANGE_SECONDS)
        for process in range(num_processes())
    ]
    if number:  # All processes have set this value, so all have read the previous one.
        client.key_value_delete(key(number - 1, own))
    return [json.loads(text) for text in values]


def post(name: str, text: str) -> None:
    """Posts a text for all processes, without waiting for them.

    If a process posts to a topic twice, the first text stays.

    Args:
      name: topic, the argument to `posted`.
      text: what to post.

    Example:
      >>> post("state", "ready")  # does nothing outside a job
    """
    client: Any = _jax_distributed.global_state.client
    if client is not None:
        key = f"tpu_embedding/{name}/{_jax_distributed.global_state.process_id}"
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.key_value_set(key, text)


def posted(name: str) -> dict[int, str]:
    """Collects the texts that processes have posted so far, by process.

    Example:
      >>> posted("state")
      {}
    """
    client: Any = _jax_distributed.global_state.client
    entries = client.key_value_dir_get(f"tpu_embedding/{name}/") if client else []
    return {int(key.rsplit("/", 1)[1]): text for key, text in entries}

"""The key-value store that the processes of a job share.

JAX's coordination service, which runs in process 0, holds it. All knowledge of JAX's
client is in this module, and tests put a dictionary in its place.
"""

import threading
from typing import Any, Final

import jax
from jax._src import distributed  # JAX has no public name for the client

_PREFIX: Final = "tpu_embedding/"


class CoordinatorStore:
    """Texts by key in JAX's coordination service, which all processes see."""

    def set(self, key: str, value: str) -> None:
        """Stores a text, in place of an earlier one."""
        _client().key_value_set(_PREFIX + key, value, allow_overwrite=True)

    def get(self, key: str, timeout_seconds: float) -> str:
        """Waits until a key is set, and returns its text.

        Raises:
          TimeoutError: if it is not set within the time.
        """
        milliseconds = max(1, round(1000 * timeout_seconds))
        try:
            return _client().blocking_key_value_get(_PREFIX + key, milliseconds)
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith("DEADLINE_EXCEEDED"):
                raise TimeoutError(key) from None
            raise

    def items(self, folder: str) -> dict[str, str]:
        """Returns the texts whose keys begin with `folder/`, by the rest of the key."""
        prefix = f"{_PREFIX}{folder}/"
        found = _client().key_value_dir_get(prefix)
        return {key.removeprefix(prefix): value for key, value in found}

    def delete(self, key: str) -> None:
        """Deletes a key, if it is set."""
        _client().key_value_delete(_PREFIX + key)


class MemoryStore:
    """A store within one process: for a job of one, and for threads that play a job.

    Example:
      >>> store = MemoryStore()
      >>> store.set("hosts/0", "localhost")
      >>> store.items("hosts")
      {'0': 'localhost'}
    """

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        """Stores a text, in place of an earlier one."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_seconds: float) -> str:
        """Waits until a key is set, and returns its text."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_seconds):
                raise TimeoutError(key)
            return self._values[key]

    def items(self, folder: str) -> dict[str, str]:
        """Returns the texts whose keys begin with `folder/`, by the rest of the key."""
        prefix = f"{folder}/"
        with self._changed:
            return {
                key.removeprefix(prefix): value
                for key, value in self._values.items()
                if key.startswith(prefix)
            }

    def delete(self, key: str) -> None:
        """Deletes a key, if it is set."""
        with self._changed:
            self._values.pop(key, None)


Store = CoordinatorStore | MemoryStore


def place_in_jax() -> tuple[int, int]:
    """Returns this process's number and the processes of JAX's job.

    `jax.process_index` would start the devices.
    """
    state = distributed.global_state
    return state.process_id, state.num_processes


def forget_client() -> None:
    """Lets JAX forget a client that did not connect: any use would end the process."""
    distributed.global_state.client = None


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("JAX's distributed runtime is not running.")
    return client

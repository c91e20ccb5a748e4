"""Sends arrays to each device's process, and a header to all processes.

Each turn runs one small all-to-all, in which the i-th device in a process carries piece
`i` of each message. Only the main thread sends, so that all processes run programs in
the same order.
"""

import atexit
import functools
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding

from tpu_embedding import distributed
from tpu_embedding.argument_checks import invalid
from tpu_embedding.host_rows.worker import ENDING, Worker
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.shard_map import on_shards

_FEWEST_WORDS: Final = 1024
"""Minimum number of words from one device to another. Larger sizes are powers of two,
because each new size compiles a program."""

_SECONDS_BETWEEN_LOOKS: Final = 1.0
_SECONDS_TO_NOTICE: Final = 8.0
"""Time in which a process may end by itself after another process has failed."""

_FAILURES: Final = "host_rows_failed"


ReceivedRows = list[list[list[np.ndarray]]]
"""Arrays by stack, by own device (in mesh order), and by sending process."""


class Messenger:
    """Sends messages between processes, in turns.

    `loop` is the number of the loop over batches, the same in all processes.
    `processes` lists each device's process, in mesh order.
    """

    def __init__(self, plan: EmbeddingPlan, loop: int):
        self.plan, self._loop = plan, loop
        # While the main thread waits for a batch, `num_awaited` is the batch's number,
        # counted from 1. Otherwise, it is 0.
        self.num_sent = self.num_awaited = 0
        self.processes = [device.process_index for device in plan.mesh.devices.flat]
        own = jax.process_index()
        self._devices = [x for x in plan.mesh.devices.flat if x.process_index == own]
        self._num_words = _FEWEST_WORDS
        self._sent: Any = None
        self._is_closed = threading.Event()
        self._is_shared = is_shared(plan)
        if self._is_shared:
            self._waiter = Worker("host_rows_waiter")
            self._watch = Worker("host_rows_watch")
            self._watch.submit(self._end_with_others)

    def send(self, header: Sequence[int], rows: Sequence[Sequence[np.ndarray]]) -> None:
        """Sends a header to all processes, and `rows[stack][device]` to each device.

        All processes must send equally long headers.
        """
        self._sent = header, rows
        self.num_sent += 1
        if not self._is_shared:
            return
        messages = [_encode(arrays) for arrays in zip(*rows, strict=True)]
        num_carriers, width = len(self._devices), 2 + len(header)
        # Each own device carries a piece, so buffers are small and all links are used.
        size = -(-max(map(len, messages)) // num_carriers)
        words = np.zeros(
            (num_carriers, len(messages), width + self._num_words), np.int32
        )
        # The size is sent even if the message doesn't fit. All processes then learn the
        # largest size, and repeat the turn with equally large buffers.
        words[:, :, 0] = size
        words[:, :, 2:width] = header
        for device, message in enumerate(messages if size <= self._num_words else ()):
            for carrier in range(num_carriers):
                piece = message[carrier * size : (carrier + 1) * size]
                words[carrier, device, 1] = len(piece)
                words[carrier, device, width : width + len(piece)] = piece
        sent = jax.make_array_from_single_device_arrays(
            (len(messages) ** 2, words.shape[2]),
            NamedSharding(self.plan.mesh, self.plan.sample_spec),
            jax.device_put(list(words), self._devices),
        )
        received = exchange_program(self.plan)(sent)
        data = {shard.device: shard.data for shard in received.addressable_shards}
        own_data = [data[device] for device in self._devices]
        # `np.asarray` blocks until the program has run. It runs in a thread, so that
        # `_wait` can notice a process that will never run the program.
        self._arriving = self._waiter.submit(lambda: list(map(np.asarray, own_data)))

    def receive(self) -> tuple[list[list[int]], ReceivedRows]:
        """Waits for the headers from all processes, and for the rows for own devices.

        Raises RuntimeError if another process has failed, or has left the loop.
        """
        assert self._sent is not None
        header, rows = self._sent
        if not self._is_shared:
            return [list(header)], [[[x] for x in of_stack] for of_stack in rows]
        width = 2 + len(header)
        # For each own device, int32 `[devices, words]` with a row from each device.
        words_by_device = self._wait()
        while (size := int(words_by_device[0][:, 0].max())) > self._num_words:
            self._num_words = 1 << (size - 1).bit_length()
            self.send(header, rows)
            words_by_device = self._wait()
        carriers: dict[int, list[int]] = {}
        for device, process in enumerate(self.processes):
            carriers.setdefault(process, []).append(device)
        senders = [devices for _, devices in sorted(carriers.items())]
        headers = [words_by_device[0][x[0], 2:width].tolist() for x in senders]
        arrays = [
            [_decode(words[devices], width, len(rows)) for devices in senders]
            for words in words_by_device
        ]
        received = [
            [[by_stack[stack] for by_stack in by_sender] for by_sender in arrays]
            for stack in range(len(rows))
        ]
        return headers, received

    def _wait(self) -> list[np.ndarray]:
        """Waits for the words to each own device, int32 `[devices, words]`."""
        while True:
            try:
                return self._arriving.result(_SECONDS_BETWEEN_LOOKS)
            except Exception as error:
                # A collective may fail because a process has ended. Then show what that
                # process posted, which is the cause.
                if absences := self._absences():
                    text = f"te.host_rows can't go on: {absences}"
                    raise RuntimeError(text) from error
                if not isinstance(error, TimeoutError):
                    raise

    def _absences(self) -> str:
        """Explains which processes won't go on with this one, or is empty."""
        absences = [
            (process, f"has failed: {text}")
            for process, text in distributed.posted(_FAILURES).items()
        ]
        for process, number in distributed.posted(self._name_of("messages")).items():
            if int(number) < self.num_sent:
                absences.append((process, "has left the loop, and this one goes on"))
        for process, number in distributed.posted(self._name_of("batches")).items():
            if int(number) < self.num_awaited:
                text = f"has only {number} batches, and this one has more"
                absences.append((process, text))
        own = jax.process_index()
        return "; ".join(f"process {p} {text}" for p, text in absences if p != own)

    def post_last(self, kind: Literal["messages", "batches"], number: int) -> None:
        """Tells other processes this process's total number of messages or batches."""
        if self._is_shared:
            distributed.post(self._name_of(kind), str(number))

    def _name_of(self, kind: str) -> str:
        return f"host_rows/{self._loop}/{kind}"

    def close(self) -> None:
        self._is_closed.set()
        if self._is_shared:
            self._waiter.close()
            self._watch.close()

    def _end_with_others(self) -> None:
        """Ends this process if another is gone and the main thread can't notice it."""
        # The main thread may wait forever in a step that the missing process doesn't
        # run. It first gets some seconds to raise the error itself, in `_wait`.
        while not self._is_closed.wait(_SECONDS_BETWEEN_LOOKS) and not ENDING.is_set():
            if self._absences() and not self._is_closed.wait(_SECONDS_TO_NOTICE):
                if absences := self._absences():
                    text = f"te.host_rows ends this process: {absences}."
                    print(text, file=sys.stderr, flush=True)
                    distributed.post(_FAILURES, text)
                    # Without a shutdown, JAX's barrier at exit would keep other
                    # processes waiting for this one. A thread runs the shutdown, since
                    # the barrier may also block.
                    shutdown = threading.Thread(
                        target=jax.distributed.shutdown, daemon=True
                    )
                    shutdown.start()
                    shutdown.join(_SECONDS_TO_NOTICE)
                    os._exit(1)  # `sys.exit` would end only this thread.


def _encode(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Joins arrays, each preceded by its length."""
    lengths = [np.array([len(array)], np.int32) for array in arrays]
    pairs = zip(lengths, arrays, strict=True)
    return np.concatenate([array for pair in pairs for array in pair])


def _decode(words: np.ndarray, width: int, count: int) -> list[np.ndarray]:
    """Inverts `_encode` for a message that several devices carried in pieces.

    Column 1 has the piece lengths. The pieces begin at column `width`.
    """
    pieces = [row[width : width + row[1]] for row in words]
    message, arrays = np.concatenate(pieces), []
    for _ in range(count):
        end = 1 + int(message[0])
        arrays.append(message[1:end])
        message = message[end:]
    return arrays


def is_shared(plan: EmbeddingPlan) -> bool:
    """Tells whether several processes share the mesh.

    Raises ValueError if several, but not all, processes of the job share it.
    """
    processes = {device.process_index for device in plan.mesh.devices.flat}
    if 1 < len(processes) < distributed.num_processes():
        rule = "be of one process, or of all processes of the job, for te.HostRows"
        raise invalid("Devices of the mesh", rule, sorted(processes))
    return len(processes) > 1


def exchange_values(name: str, value: Any, plan: EmbeddingPlan) -> list[Any]:
    """Exchanges values like `distributed.exchange`, if processes share the mesh."""
    return distributed.exchange(name, value) if is_shared(plan) else [value]


def raise_together(error: Exception | None, plan: EmbeddingPlan) -> None:
    """Raises this process's error, or RuntimeError if only other processes have one.

    All processes must call this together, in the main thread.
    """
    text = error and f"{type(error).__name__}: {error}"
    texts = exchange_values("host_rows_errors", text, plan)
    if error is not None:
        raise error
    if causes := [f"process {i}: {x}" for i, x in enumerate(texts) if x]:
        raise RuntimeError(f"te.HostRows failed in {'; '.join(causes)}")


@functools.cache
def exchange_program(plan: EmbeddingPlan) -> Any:
    """Makes a program where device `i` sends its local row `j` to device `j`."""

    def exchange(words: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(words, plan.sample_axes, 0, 0, tiled=True)

    spec = plan.sample_spec
    return jax.jit(on_shards(exchange, plan, in_specs=spec, out_specs=spec))


@atexit.register
def _post_failure() -> None:
    """Tells other processes that an exception ends this one."""
    # Python sets these attributes for an uncaught exception. `last_exc` is new in 3.12.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is not None and distributed.num_processes() > 1:
        distributed.post(_FAILURES, f"{type(error).__name__}: {error}")

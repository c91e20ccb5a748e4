"""What keeps the devices busy: batches made ahead, and metrics read behind.

Both ends are bounded, so that the host is never more than a few steps away from the
devices in either direction.
"""

import collections
import concurrent.futures
import math
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final

import jax

from tpu_embedding.data.batch import Batch, DataError, Dataset
from tpu_embedding.lookup.prepare import shard_batch
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.training.reporting import Record
from tpu_embedding.training.step import StepMetrics, prepare_batch

STEPS_IN_FLIGHT: Final = 2
"""Steps that the devices may be behind the host. One hides the host's work; more would
only hold batches in memory."""


class TrainingDivergedError(RuntimeError):
    """The loss is no finite number any more."""


def train_batches(
    data: Dataset, plan: EmbeddingPlan, steps: Iterable[int]
) -> Generator[tuple[int, Batch], None, None]:
    """Yields step and placed batch; a thread makes the next one meanwhile.

    Raises:
      DataError: if data are damaged, or ids lie outside their tables.
    """

    def make(step: int) -> Batch:
        return put_batch(data.train_batch(step), plan, f"Training batch {step}")

    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        pending: collections.deque[tuple[int, concurrent.futures.Future[Batch]]]
        pending = collections.deque()
        for step in steps:
            pending.append((step, thread.submit(make, step)))
            if len(pending) > 1:
                ready, batch = pending.popleft()
                yield ready, batch.result()
        for ready, batch in pending:
            yield ready, batch.result()


def put_batch(batch: Batch, plan: EmbeddingPlan, owner: str) -> Batch:
    """Checks a batch and puts it on the devices.

    Raises:
      DataError: if ids lie outside their tables, or have no place there; names the
        owner.
    """
    try:
        return shard_batch(prepare_batch(batch, plan), plan)
    except (TypeError, ValueError) as error:
        raise DataError(f"{owner}: {error}") from error


class StepMeter:
    """Reads the metrics of steps when they are done, and sums up every few of them.

    Attributes:
      batch_size: samples per step.
      log_every: steps that one record sums up.
      report: receives the records.
    """

    def __init__(
        self, batch_size: int, log_every: int, report: Callable[[Record], None]
    ):
        self.batch_size = batch_size
        self.log_every = log_every
        self.report = report
        self._in_flight: collections.deque[tuple[int, StepMetrics]]
        self._in_flight = collections.deque()
        self._since_record: list[StepMetrics] = []
        self._timed_steps = 0
        self._last_time: float | None = None
        self._seconds = 0.0

    def add(self, num_steps_done: int, metrics: StepMetrics) -> None:
        """Takes the metrics of a step that was just dispatched.

        Raises:
          TrainingDivergedError: if the loss of an earlier step is not finite.
        """
        self._in_flight.append((num_steps_done, metrics))
        if len(self._in_flight) > STEPS_IN_FLIGHT:
            self._read_one()

    def flush(self) -> None:
        """Waits for all steps, and leaves the time until the next out of the rate."""
        while self._in_flight:
            self._read_one()
        self._last_time = None

    def finish(self, num_steps_done: int) -> None:
        """Waits for all steps, and reports those that are in no record yet."""
        self.flush()
        if self._since_record:
            self.report(self._summarize(num_steps_done))

    def _read_one(self) -> None:
        num_steps_done, metrics = self._in_flight.popleft()
        metrics = jax.device_get(metrics)
        if not math.isfinite(metrics.loss):
            raise TrainingDivergedError(
                f"The loss of step {num_steps_done} is {metrics.loss}; lower the "
                "learning rates, or look for damaged inputs."
            )
        now = time.perf_counter()
        # The first step of all, and after a pause, is not timed: it may compile.
        if self._last_time is not None:
            self._seconds += now - self._last_time
            self._timed_steps += 1
        self._last_time = now
        self._since_record.append(metrics)
        if num_steps_done % self.log_every == 0:
            self.report(self._summarize(num_steps_done))

    def _summarize(self, num_steps_done: int) -> Record:
        metrics, self._since_record = self._since_record, []
        rate = self._timed_steps / self._seconds if self._timed_steps else None
        self._timed_steps, self._seconds = 0, 0.0
        return {
            "step": num_steps_done,
            "loss": sum(float(m.loss) for m in metrics) / len(metrics),
            "steps_per_second": rate,
            "samples_per_second": rate and rate * self.batch_size,
            "rounds": max(int(m.rounds) for m in metrics),
            "out_of_range": sum(int(m.out_of_range) for m in metrics),
        }


def add_up(sums: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the totals of device arrays by name, in float64, one batch behind."""
    totals: dict[str, Any] = {}
    pending: dict[str, Any] = {}
    for of_batch in sums:
        totals, pending = _add(totals, pending), of_batch
    return _add(totals, pending)


def _add(totals: dict[str, Any], sums: dict[str, Any]) -> dict[str, Any]:
    read = jax.device_get(sums)
    return totals | {
        name: totals.get(name, 0.0) + value.astype("float64")
        for name, value in read.items()
    }

"""Keeps the devices busy: prepares the next batch early, and reads metrics late.

Both queues are bounded, so the host is at most a few steps ahead of the devices.
"""

import collections
import concurrent.futures
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Final

import jax

from tpu_embedding.inputs.agreed_sizes import abandon_agreement
from tpu_embedding.inputs.buffer_sizes import BufferSizes
from tpu_embedding.inputs.prepare import (
    Samples,
    global_shapes,
    num_parts_of,
    shard_batch,
)
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.jobs.pulses import send_event
from tpu_embedding.tools.jobs.slow_steps import SlowStepWatch
from tpu_embedding.tools.jobs.stop_signals import StopRequest
from tpu_embedding.tools.train.config.run_config import NonFinite
from tpu_embedding.tools.train.loop.checked_data import (
    CheckedDataset,
    check_num_samples,
)
from tpu_embedding.tools.train.loop.input_wait import InputWait
from tpu_embedding.tools.train.loop.loaders import open_reader
from tpu_embedding.tools.train.loop.reporting import Record
from tpu_embedding.tools.train.loop.step import StepMetrics, prepare_batch

STEPS_IN_FLIGHT: Final = 2
"""Maximum number of steps that are dispatched before the host reads their metrics.

One step in flight hides the host's work behind the devices'. Many steps would keep many
batches in device memory."""

MAX_SKIPPED_IN_A_ROW: Final = 10
"""Number of steps in a row that are not finite, at which a run ends in any case."""

_POLL_SECONDS: Final = 0.1
"""Time after which a loop that waits for a batch looks for signals again."""

_DEVICE_POLL_SECONDS: Final = 0.001
"""Time after which it looks again for the end of the step in flight."""


class TrainingDivergedError(RuntimeError):
    """Raised if the loss, a metric or the model is NaN or infinite."""


def train_batches(
    data: CheckedDataset,
    plan: EmbeddingPlan,
    steps: range,
    sizes: BufferSizes | None = None,
    stop: StopRequest | None = None,
    *,
    num_processes: int = 0,
    input_wait: InputWait | None = None,
) -> Generator[tuple[int, Batch], None, None]:
    """Yields each step's number and its batch on the devices.

    A thread prepares the next batch and puts it on the devices while the caller uses
    the current one. The thread reads it, too, or loader processes do, further ahead. In
    a job of several processes, each reads the samples of its own devices only.

    Args:
      data: data set.
      plan: plan of the embedding layer.
      steps: numbers of the steps, from 0.
      sizes: buffer sizes of ragged features, which only the thread uses.
      stop: request that ends the batches, even while the next one is prepared.
      num_processes: loader processes; 0 reads in the thread.
      input_wait: clock that runs while the caller waits and the devices are idle.

    Raises:
      ConfigError: if the data set cannot be sent to loader processes.
      DataError: if the data are damaged, or ids lie outside their tables.
      ChildProcessError: if a loader process ended.
    """
    part = _part_of_process(data.batch_size, plan)
    reader = open_reader(data, part or range(data.batch_size), steps, num_processes)

    def make(step: int) -> Batch:
        owner = f"Training batch {step}"
        batch = reader.read(step)
        if part is None:
            return put_batch(batch, plan, owner, sizes)
        owner = f"{owner}, samples {part.start} to {part.stop - 1}"
        return put_batch(batch, plan, owner, sizes, samples="process")

    def submit(steps: Iterable[int]) -> Iterator[tuple[int, Future[Batch]]]:
        return ((step, thread.submit(make, step)) for step in steps)

    stop = stop or StopRequest()
    input_wait = input_wait or InputWait()
    thread = concurrent.futures.ThreadPoolExecutor(max_workers=1)
    pending: collections.deque[tuple[int, Future[Batch]]] = collections.deque()
    try:
        numbers = iter(steps)
        pending.extend(submit(itertools.islice(numbers, 1)))
        while pending:
            step, batch = pending.popleft()
            pending.extend(submit(itertools.islice(numbers, 1)))
            if not _is_ready(batch, step, stop, input_wait):
                return
            yield step, batch.result()
    finally:
        for _, batch in pending:
            batch.cancel()
        if pending and sizes is not None:
            abandon_agreement(sizes)
        thread.submit(reader.close)
        # A run that stops saves its state first; the batch in progress may take long.
        thread.shutdown(wait=not stop.requested)


def _part_of_process(batch_size: int, plan: EmbeddingPlan) -> range | None:
    """Returns the samples that this process loads; None if all processes load all."""
    part = plan.process_samples(batch_size)
    has_shapes = any(f.config.output_shape is not None for f in plan.inputs)
    return None if has_shapes or len(part) == batch_size else part


def _is_ready(
    batch: Future[Batch], step: int, stop: StopRequest, input_wait: InputWait
) -> bool:
    """Waits for a batch; returns False if the run stops before its step."""
    while not _is_done(batch, input_wait):
        if stop.is_decided(step):
            return False
    input_wait.stop()
    return not stop.reached(step)


def _is_done(batch: Future[Batch], input_wait: InputWait) -> bool:
    """Waits for a batch, `_POLL_SECONDS` at most; returns True if it is there."""
    end = time.monotonic() + _POLL_SECONDS
    while (seconds := end - time.monotonic()) > 0:
        if not input_wait.poll():
            seconds = min(seconds, _DEVICE_POLL_SECONDS)
        if concurrent.futures.wait([batch], timeout=seconds).done:
            return True
    return False


def put_batch(
    batch: Batch,
    plan: EmbeddingPlan,
    owner: str,
    sizes: BufferSizes | None = None,
    *,
    samples: Samples = "global",
) -> Batch:
    """Checks a batch on the host and transfers it to the devices.

    Args:
      batch: the batch on the host.
      plan: plan of the embedding layer.
      owner: name of the batch, for errors.
      sizes: buffer sizes of ragged features; None: each batch has its own.
      samples: samples of the batch, as in `prepare_features`.

    Raises:
      DataError: if the features do not match the plan, or ids lie outside their
        tables. The message starts with the owner.
    """
    prepared = prepare_checked(batch, plan, owner, sizes, samples=samples)
    return shard_batch(prepared, plan, samples=samples)


def prepare_checked(
    batch: Batch,
    plan: EmbeddingPlan,
    owner: str,
    sizes: BufferSizes | None = None,
    *,
    samples: Samples = "global",
) -> Batch:
    """Checks a batch on the host and gives it static shapes.

    Arguments and errors are those of `put_batch`.
    """
    try:
        prepared = prepare_batch(batch, plan, sizes, samples=samples)
    except (TypeError, ValueError) as error:
        raise DataError(f"{owner}: {error}") from error
    shapes = global_shapes(prepared, num_parts_of(samples, plan))
    check_num_samples(shapes, plan, owner)
    return prepared


class StepMeter:
    """Reads the metrics of completed steps, and reports one record per few steps.

    A record has the mean loss of the steps that were not skipped, the number of those
    that were, the speed, the maximum rounds, the total of ids out of range, and
    `input_wait`: the share of the time in which the devices waited for input, in
    [0, 1]. It is None if no step was timed. The unique ratio and the hottest shard over
    the mean are means, or None where no ids leave their device; see `StepMetrics`.

    Attributes:
      batch_size: samples per step.
      log_every: number of steps per record.
      report: function that receives each record.
      input_wait: clock of the time in which the devices wait for input.
      non_finite: treatment of a step that is not finite; see `RunConfig`.
      watch: watch of slow steps, which learns of each step; or None.
    """

    def __init__(
        self,
        batch_size: int,
        log_every: int,
        report: Callable[[Record], None],
        *,
        non_finite: NonFinite = "raise",
        watch: SlowStepWatch | None = None,
    ):
        self.batch_size = batch_size
        self.log_every = log_every
        self.report = report
        self.non_finite: NonFinite = non_finite
        self.watch = watch
        self.input_wait = InputWait()
        self._num_skipped_in_a_row = 0
        self._in_flight: collections.deque[tuple[int, StepMetrics, float]]
        self._in_flight = collections.deque()
        self._since_record: list[StepMetrics] = []
        self._timed_steps = 0
        self._last_time: float | None = None
        self._seconds = 0.0
        self._waited_seconds = 0.0

    def add(self, num_steps_done: int, metrics: StepMetrics) -> None:
        """Adds the metrics of a step that was just dispatched.

        Raises:
          TrainingDivergedError: if an earlier step, whose metrics are read now, has a
            loss that is not finite.
        """
        self._in_flight.append((num_steps_done, metrics, self.input_wait.take()))
        self.input_wait.note_step(metrics.loss)
        if len(self._in_flight) > STEPS_IN_FLIGHT:
            self._read_oldest()

    def flush(self) -> None:
        """Waits for all steps; leaves the pause until the next one out of the speed."""
        while self._in_flight:
            self._read_oldest()
        self._last_time = None
        if self.watch is not None:
            self.watch.pause()

    def finish(self, num_steps_done: int) -> None:
        """Waits for all steps, and reports the remaining ones in a last record."""
        self.flush()
        if self._since_record:
            self.report(self._summarize(num_steps_done))

    def _read_oldest(self) -> None:
        """Waits for the oldest step in flight; reports if it completes a record."""
        num_steps_done, metrics, waited_seconds = self._in_flight.popleft()
        metrics = jax.device_get(metrics)
        send_event("step", num_steps_done)
        if self.watch is not None:
            self.watch.completed(num_steps_done)
        self._check_finite(num_steps_done, metrics)
        now = time.perf_counter()
        # The first step, and the first one after a pause, are not timed: they may
        # include compilation or other work of the host.
        if self._last_time is not None:
            self._seconds += now - self._last_time
            self._waited_seconds += waited_seconds
            self._timed_steps += 1
        self._last_time = now
        self._since_record.append(metrics)
        if num_steps_done % self.log_every == 0:
            self.report(self._summarize(num_steps_done))

    def _check_finite(self, num_steps_done: int, metrics: StepMetrics) -> None:
        """Raises an error at a step that is not finite, or counts it as skipped."""
        if metrics.is_finite:
            self._num_skipped_in_a_row = 0
            return
        what = f"The loss of step {num_steps_done} is {metrics.loss}"
        if math.isfinite(metrics.loss):
            what = f"The gradients of step {num_steps_done} are not finite"
        if self.non_finite == "raise":
            raise TrainingDivergedError(
                f"{what}; lower the learning rates, or check the input data for "
                "damaged values. --set non_finite=skip_step skips such steps."
            )
        self._num_skipped_in_a_row += 1
        if self._num_skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            raise TrainingDivergedError(
                f"{what}, and so were those of the {MAX_SKIPPED_IN_A_ROW - 1} steps "
                "before it, which were skipped; lower the learning rates, or check the "
                "input data for damaged values."
            )

    def _summarize(self, num_steps_done: int) -> Record:
        """Returns the record of the steps since the last one, and starts a new one."""
        metrics, self._since_record = self._since_record, []
        rate = self._timed_steps / self._seconds if self._timed_steps else None
        # Completions are noticed with some delay, so the share might exceed 1.
        waited = min(1.0, self._waited_seconds / self._seconds) if rate else None
        self._timed_steps, self._seconds, self._waited_seconds = 0, 0.0, 0.0
        finite = [float(m.loss) for m in metrics if m.is_finite]
        return {
            "step": num_steps_done,
            "loss": sum(finite) / len(finite) if finite else None,
            "skipped": len(metrics) - len(finite),
            "steps_per_second": rate,
            "samples_per_second": rate and rate * self.batch_size,
            "input_wait": waited,
            "rounds": max(int(m.rounds) for m in metrics),
            "out_of_range": sum(int(m.out_of_range) for m in metrics),
            "unique_ratio": _mean(m.unique_ratio for m in metrics),
            "hottest_shard_over_mean": _mean(
                m.hottest_shard_over_mean for m in metrics
            ),
        }


def _mean(values: Iterable[Any]) -> float | None:
    """Returns the mean of the values; None if steps have none."""
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None

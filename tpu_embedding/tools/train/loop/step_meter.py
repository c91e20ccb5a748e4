"""Reads the metrics of steps late, and measures how long the devices wait for input.

The queue of metrics is bounded, so the host is at most a few steps ahead of the
devices.
"""

import collections
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import jax

from tpu_embedding.tools.jobs.pulses import send_event
from tpu_embedding.tools.jobs.slow_steps import SlowStepWatch
from tpu_embedding.tools.train.config.run_config import NonFinite
from tpu_embedding.tools.train.errors import TrainingDivergedError
from tpu_embedding.tools.train.loop.reporting import Record
from tpu_embedding.tools.train.loop.step import StepMetrics
from tpu_embedding.types import DynamicStats

STEPS_IN_FLIGHT: Final = 2
"""Maximum number of steps that are dispatched before the host reads their metrics.

One step in flight hides the host's work behind the devices'. Many steps would keep many
batches in device memory."""

MAX_SKIPPED_IN_A_ROW: Final = 10
"""Number of steps in a row that are not finite, at which a run ends in any case."""


class StepMeter:
    """Reads the metrics of completed steps, and reports one record per few steps.

    A record has the mean loss of the steps that were not skipped, the number of those
    that were, the speed, the maximum rounds, the total of ids out of range, and
    `input_wait`: the share of the time in which the devices waited for input, in
    [0, 1]. It is None if no step was timed. The unique ratio and the hottest shard over
    the mean are means, or None where no ids leave their device; see `StepMetrics`.

    With dynamic tables, `dynamic_tables` has an entry for each: the totals of its
    counts, and `load`, the share of its places that are taken after the last step.

    Attributes:
      batch_size: samples per step.
      log_every: number of steps per record.
      report: function that receives each record.
      input_wait: clock of the time in which the devices wait for input.
      non_finite: treatment of a step that is not finite; see `RunConfig`.
      watch: watch of slow steps, which learns of each step; or None.
      places: number of places for ids by dynamic table.
    """

    def __init__(
        self,
        batch_size: int,
        log_every: int,
        report: Callable[[Record], None],
        *,
        non_finite: NonFinite = "raise",
        watch: SlowStepWatch | None = None,
        places: Mapping[str, int] | None = None,
    ):
        self.batch_size = batch_size
        self.log_every = log_every
        self.report = report
        self.non_finite: NonFinite = non_finite
        self.watch = watch
        self.places = places or {}
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
            what = (
                f"The gradients of step {num_steps_done}, or a learning rate of a "
                "table, are not finite"
            )
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
        record = {
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
        if self.places:
            record["dynamic_tables"] = {
                name: _counts_of([m.dynamic_tables[name] for m in metrics], places)
                for name, places in self.places.items()
            }
        return record


def _counts_of(stats: Sequence[DynamicStats], places: int) -> Record:
    """Returns the totals of a dynamic table's counts over some steps, and its load."""
    totals: Record = {
        name: sum(int(getattr(of_step, name)) for of_step in stats)
        for name in ("ids", "hits", "inserts", "evictions", "not_admitted", "no_place")
    }
    return totals | {"load": int(stats[-1].used_rows) / places}


def _mean(values: Iterable[Any]) -> float | None:
    """Returns the mean of the values; None if steps have none."""
    known = [float(value) for value in values if value is not None]
    return sum(known) / len(known) if known else None


class InputWait:
    """Clock of the time in which the devices have nothing to do for want of a batch.

    It runs while the training loop is blocked for the next batch and no step is in
    flight: from the later of the moment at which the loop asks for the batch, and the
    moment at which the devices complete the latest step; to the moment at which the
    batch is on its devices. The latter moment is found to a millisecond, as the loop
    looks for it that often. Time in which the devices still run is not counted.

    With several processes, each measures its own loop.
    """

    def __init__(self):
        self._latest: Any = None
        self._since: float | None = None
        self._seconds = 0.0

    def note_step(self, output: jax.Array) -> None:
        """Notes the step that was just dispatched, by one of its outputs."""
        self._latest = output

    def poll(self) -> bool:
        """Starts the clock if the devices are idle; returns True if it runs.

        The loop calls it now and then while it is blocked.
        """
        if self._since is None and (self._latest is None or self._latest.is_ready()):
            self._since = time.perf_counter()
        return self._since is not None

    def stop(self) -> None:
        """Stops the clock, because the batch has come."""
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def take(self) -> float:
        """Returns the seconds since the last call, and starts anew."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

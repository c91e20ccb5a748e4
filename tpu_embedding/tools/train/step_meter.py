"""Waits for the steps of a run, checks their numbers, and reports their means."""

import faulthandler
import time
from collections.abc import Iterator
from typing import Any, Final

import jax
import numpy as np

from tpu_embedding.tools.train.config import RunConfig
from tpu_embedding.tools.train.reporting import RunReport
from tpu_embedding.tools.train.steps import StepMetrics

STEPS_IN_FLIGHT: Final = 2
"""Steps that are dispatched before the host waits for the first of them.

One step in flight hides the host's work behind the devices' work. Many steps would keep
many batches in device memory."""

_STDERR: Final = 2

HANG_SECONDS: Final = 600
"""Time without a step after which the stacks of all threads are printed."""


class TrainingDivergedError(RuntimeError):
    """Raised if the loss, a gradient or a metric is NaN or infinite."""


class StepMeter:
    """Keeps the metrics of steps on the devices, and reports their means."""

    def __init__(self, config: RunConfig, report: RunReport):
        self._config, self._report = config, report
        self._steps: list[StepMetrics] = []
        self._waited = 0.0
        self._since = time.perf_counter()

    def waiting(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the batches, and counts the time in which the loop waits for them."""
        while True:
            begin = time.perf_counter()
            faulthandler.dump_traceback_later(HANG_SECONDS, file=_STDERR)
            batch = next(batches, None)
            self._waited += time.perf_counter() - begin
            if batch is None:
                return
            yield batch

    def add(self, done: int, metrics: StepMetrics) -> None:
        """Adds the metrics of a step that was just dispatched; reports when due.

        Raises:
          TrainingDivergedError: if a step was not finite whose metrics are read now.
        """
        self._steps.append(metrics)
        if len(self._steps) > STEPS_IN_FLIGHT:
            jax.block_until_ready(self._steps[-1 - STEPS_IN_FLIGHT])
        if done % self._config.log_every == 0 or done == self._config.num_steps:
            self.read(done)
            self._report_means(done)

    def read(self, done: int) -> None:
        """Waits for all steps, the last of which is `done`.

        Raises:
          TrainingDivergedError: if one was not finite.
        """
        self._steps = jax.device_get(self._steps)
        for step, metrics in enumerate(self._steps, done - len(self._steps) + 1):
            if not metrics["is_finite"]:
                raise TrainingDivergedError(
                    f"The loss of step {step} is {metrics['loss']}, and the loss, a "
                    "gradient or a learning rate is not finite; lower the learning "
                    "rates, or check the input data for damaged values."
                )

    def _report_means(self, done: int) -> None:
        now = time.perf_counter()
        seconds, steps = now - self._since, len(self._steps)
        means = {
            name: float(np.mean([metrics[name] for metrics in self._steps]))
            for name in self._steps[0]
            if name != "is_finite"
        }
        speed = {
            "steps_per_second": steps / seconds,
            "samples_per_second": steps * self._config.batch_size / seconds,
            "input_wait": self._waited / seconds,
        }
        loss = {"loss": means.pop("loss")}
        self._report.scalars(done, "train", loss | speed | means)
        self._steps, self._waited, self._since = [], 0.0, now

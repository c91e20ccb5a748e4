"""Saves the state of a run in the background, and reports checkpoints once complete."""

import concurrent.futures
import threading
from typing import Any

from flax import nnx

from tpu_embedding.checkpoint.run_checkpoints import RunCheckpoints
from tpu_embedding.distributed.job import current_job
from tpu_embedding.distributed.notices import end_job
from tpu_embedding.tools.jobs.exit_status import FAILED
from tpu_embedding.tools.jobs.pulses import send_event
from tpu_embedding.tools.train.errors import TrainingDivergedError
from tpu_embedding.tools.train.loop.reporting import RunReport
from tpu_embedding.tools.train.loop.step import names_not_finite


class RunSaver:
    """Saves states of one run. At most one save is in progress."""

    def __init__(
        self,
        checkpoints: RunCheckpoints,
        description: dict[str, Any],
        report: RunReport,
        *,
        max_seconds: float,
    ):
        """Makes a saver.

        Args:
          checkpoints: checkpoints of the run.
          description: description of the run, for the checkpoints.
          report: report of the run.
          max_seconds: time within which a checkpoint must be complete. The process then
            ends, and so does its job: its threads may wait for a disk or for other
            processes, where no error reaches them.
        """
        self._checkpoints = checkpoints
        self._description = description
        self._report = report
        self._max_seconds = max_seconds
        self._waiter = concurrent.futures.ThreadPoolExecutor(max_workers=1)
        self._saving: tuple[int, concurrent.futures.Future[None]] | None = None

    def save(self, step: int, state: nnx.State) -> None:
        """Starts to save a state; the next step may then donate it.

        Args:
          step: number of steps done.
          state: state of the pair (model, optimizer).

        Raises:
          TrainingDivergedError: if the model is not finite.
          CheckpointError: if this checkpoint, or the one before, cannot be written.
        """
        names = names_not_finite(state)
        if names:
            raise TrainingDivergedError(
                f"The update of step {step} left values that are not finite in "
                f"{', '.join(names)}; lower the learning rates. This step is not "
                "saved; --resume continues from the checkpoint before it, if there is "
                "one."
            )
        self.wait()
        deadline = threading.Timer(self._max_seconds, self._give_up, (step,))
        deadline.daemon = True
        deadline.start()
        try:
            self._checkpoints.save(step, state, self._description)
        except BaseException:
            deadline.cancel()
            raise
        complete = self._waiter.submit(self._checkpoints.wait)
        complete.add_done_callback(lambda _: deadline.cancel())
        self._saving = step, complete

    def poll(self) -> None:
        """Reports the latest checkpoint if it has become complete; does not wait."""
        if self._saving is not None and self._saving[1].done():
            self.wait()

    def wait(self) -> None:
        """Waits until the latest checkpoint is complete, and reports it.

        Raises:
          CheckpointError: if it cannot be written.
        """
        if self._saving is None:
            return
        (step, complete), self._saving = self._saving, None
        complete.result()
        self._report.saved(step)
        send_event("saved", step)

    def _give_up(self, step: int) -> None:
        """Ends this process and its job, in the thread of the deadline."""
        end_job(
            current_job(),
            f"The checkpoint of step {step} is not complete after "
            f"{self._max_seconds:g} s, so a disk or a process of the job hangs. The "
            "checkpoint before it is as it was; --resume continues from it. If saving "
            "takes that long, --set max_save_seconds=N allows more.",
            FAILED,
        )

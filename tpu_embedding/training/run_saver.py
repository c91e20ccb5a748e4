"""Saves the state of a run in the background, and reports checkpoints once complete."""

from typing import Any

from flax import nnx

from tpu_embedding.checkpoint.run_checkpoints import RunCheckpoints
from tpu_embedding.supervision.pulses import tell
from tpu_embedding.training.pipeline import TrainingDivergedError
from tpu_embedding.training.reporting import RunReport
from tpu_embedding.training.step import names_not_finite


class RunSaver:
    """Saves states of one run. At most one save is in progress."""

    def __init__(
        self,
        checkpoints: RunCheckpoints,
        description: dict[str, Any],
        report: RunReport,
    ):
        self._checkpoints = checkpoints
        self._description = description
        self._report = report
        self._unreported: int | None = None

    def save(self, step: int, state: nnx.State) -> None:
        """Starts to save a state; the next step may then donate it.

        Args:
          step: number of steps done.
          state: of the pair (model, optimizer).

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
        self._checkpoints.save(step, state, self._description)
        self._unreported = step

    def poll(self) -> None:
        """Reports the latest checkpoint if it has become complete; does not wait."""
        if self._unreported is not None and not self._checkpoints.is_saving:
            self.wait()

    def wait(self) -> None:
        """Waits until the latest checkpoint is complete, and reports it.

        Raises:
          CheckpointError: if it cannot be written.
        """
        if self._unreported is None:
            return
        step, self._unreported = self._unreported, None
        self._checkpoints.wait()
        self._report.saved(step)
        tell("saved", step)

"""The checkpoints of a run, so that a later process can continue it exactly.

A description of the run is stored with the state, and compared before it is restored.
Devices, stacking, packing and backends are no part of it: a run may resume on others.

A checkpoint is written in the background, under a temporary name, and renamed when it
is complete. A kill at any time therefore leaves the earlier ones readable. The training
loop is the only caller of this module.
"""

import dataclasses
import datetime
import itertools
import json
import math
import os
from collections.abc import Iterator
from typing import Any, Final, Literal, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from tpu_embedding.checkpoint.differences import value_differences
from tpu_embedding.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    errors_of_writing,
)
from tpu_embedding.checkpoint.failed_saves import print_no_tracebacks
from tpu_embedding.checkpoint.format import checkpoint_path, describe
from tpu_embedding.checkpoint.restoring import RestoreState, restore_state
from tpu_embedding.checkpoint.state_handler import (
    ASYNC_OPTIONS,
    HOST_BYTES,
    SaveState,
)
from tpu_embedding.plan.plan import EmbeddingPlan

T = TypeVar("T")
Description = dict[str, Any]

Fallback = Literal["refuse", "older"]
"""If a checkpoint is damaged: `"refuse"` raises an error, `"older"` takes the next
older one that is whole."""

MAX_SAVE_SECONDS: Final = 600.0
"""Default of the time within which a checkpoint is complete."""

_ITEM = "state"


class RunCheckpoints:
    """The checkpoints of one run, one directory per saved step.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> checkpoints = RunCheckpoints(tempfile.mkdtemp(), kept=2)
      >>> checkpoints.save(7, {"weight": jnp.ones(3)}, {"seed": 0})
      >>> checkpoints.wait()
      >>> checkpoints.latest_step
      7
      >>> step, state = checkpoints.restore({"weight": jnp.zeros(3)}, {"seed": 0})
      >>> state["weight"].tolist()
      [1.0, 1.0, 1.0]
      >>> checkpoints.close()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        kept: int | None,
        keep_every: datetime.timedelta | None = None,
        plan: EmbeddingPlan | None = None,
        host_bytes: int = HOST_BYTES,
        max_save_seconds: float = MAX_SAVE_SECONDS,
    ):
        """Opens a directory of checkpoints, and creates it if it does not exist.

        Leftovers of saves that a kill interrupted are deleted.

        Args:
          directory: directory that contains only this run's checkpoints.
          kept: number of latest checkpoints to keep; older ones are deleted. None: all.
          keep_every: time after which one more checkpoint is kept for good.
          plan: the tables' plan, if the state is not made of modules.
          host_bytes: maximum bytes of table rows that wait in host memory.
          max_save_seconds: time within which the caller expects a checkpoint to be
            complete. Orbax waits for the other processes a minute longer.

        Raises:
          CheckpointError: if the directory cannot be used.
        """
        self.directory = checkpoint_path(directory)
        self._plan, self._host_bytes = plan, host_bytes
        options = ocp.CheckpointManagerOptions(
            max_to_keep=kept,
            keep_time_interval=keep_every,
            create=True,
            cleanup_tmp_directories=True,
            async_options=dataclasses.replace(
                ASYNC_OPTIONS, timeout_secs=math.ceil(max_save_seconds) + 60
            ),
        )
        print_no_tracebacks(self.directory)
        with errors_of_writing(self.directory):
            self._manager = ocp.CheckpointManager(self.directory, options=options)

    @property
    def steps(self) -> list[int]:
        """Numbers of steps done at the complete checkpoints, in order."""
        return saved_steps(self.directory)

    @property
    def latest_step(self) -> int | None:
        """Number of steps done at the latest complete checkpoint; None without one."""
        return max(self.steps, default=None)

    def save(self, step: int, state: Any, description: Description) -> None:
        """Starts to write a checkpoint, and deletes those that exceed `kept`.

        The state may be donated when the call returns. `wait` waits for the end.

        Args:
          step: number of steps done.
          state: see `te.save`.
          description: JSON values that must be equal in a run that resumes.

        Raises:
          CheckpointError: if this checkpoint, or the one before, cannot be written, or
            the step is saved already.
        """
        args = SaveState(
            state,
            plan=self._plan,
            description=description,
            host_bytes=self._host_bytes,
        )
        with errors_of_writing(self.directory / str(step)):
            composite = ocp.args.Composite(**{_ITEM: args})
            try:
                self._manager.save(step, args=composite, force=True)
            except ocp.checkpoint_manager.StepAlreadyExistsError as error:
                raise CheckpointError(
                    f"The directory {self.directory} has a checkpoint of step {step}, "
                    "and a saved step is never replaced; save another step."
                ) from error

    def wait(self) -> None:
        """Waits until the latest checkpoint is complete.

        Raises:
          CheckpointError: if it cannot be written.
        """
        with errors_of_writing(self.directory):
            self._manager.wait_until_finished()

    def check(self, description: Description) -> int:
        """Returns the number of steps done at the latest checkpoint, after checking it.

        Args:
          description: description of the run that resumes.

        Raises:
          CheckpointError: if there is no checkpoint, or its description differs; the
            message lists every difference.
        """
        step = next(self._from_latest())
        self._check(step, description)
        return step

    def _from_latest(self, latest: int | None = None) -> Iterator[int]:
        """Returns the saved steps from the latest one, or from a given one, down."""
        steps = self.steps
        if not steps:
            raise CheckpointError(
                f"There is no complete checkpoint in {self.directory} to resume from; "
                "start a new run, or give the directory of the run to resume."
            )
        if latest is None:
            return reversed(steps)
        if latest not in steps:
            raise CheckpointError(
                f"step must be that of a complete checkpoint in {self.directory}, got "
                f"{latest}; those are {steps}."
            )
        return reversed(steps[: steps.index(latest) + 1])

    def _check(self, step: int, description: Description) -> None:
        saved = describe(self.directory / str(step)).description
        # As JSON has them: lists for tuples, strings for keys.
        wanted = json.loads(json.dumps(description))
        problems = value_differences(saved, wanted)
        if problems:
            raise CheckpointError(
                f"The checkpoint {self.directory / str(step)} belongs to another run. "
                "Resume with the same settings and data, or start a new run in another "
                "directory:\n  " + "\n  ".join(problems)
            )

    def restore(
        self,
        state: T,
        description: Description,
        *,
        step: int | None = None,
        fallback: Fallback = "refuse",
    ) -> tuple[int, T]:
        """Restores the state of a checkpoint.

        Args:
          state: see `te.restore`; may consist of shapes (`jax.ShapeDtypeStruct`).
          description: description of the run that resumes.
          step: steps done at the checkpoint; None takes the latest one. Processes that
            restore together must agree on it, as they may list different ones.
          fallback: what to do if files are damaged. A state of arrays cannot be used
            again after a damaged checkpoint, so `"older"` needs shapes. Damaged
            checkpoints stay under the name `damaged-STEP`.

        Returns:
          The number of steps done, and the state.

        Raises:
          CheckpointError: see `check`; or if files are damaged, or none is whole.
        """
        problems = []
        for saved in self._from_latest(step):
            path = self.directory / str(saved)
            try:
                self._check(saved, description)
                args = RestoreState(state, plan=self._plan)
                restored = restore_state(path / _ITEM, args)
            except DamagedCheckpointError as error:
                if fallback == "refuse":
                    raise
                if _has_lost_arrays(state):
                    raise DamagedCheckpointError(
                        f"{error} The arrays of the given state are lost, as the "
                        "damage was found while rows were written; fallback='older' "
                        "needs a new state, of shapes (jax.ShapeDtypeStruct)."
                    ) from error
                problems.append((path, error))
                continue
            for damaged, _ in problems:
                damaged.rename(_free_path(self.directory / f"damaged-{damaged.name}"))
            if problems:
                self._manager.reload()
            return saved, restored
        raise CheckpointError(
            f"No checkpoint in {self.directory} is whole:\n  "
            + "\n  ".join(str(error) for _, error in problems)
        )

    def close(self) -> None:
        """Waits for the latest checkpoint, and ends the background work.

        Raises:
          CheckpointError: if it cannot be written.
        """
        with errors_of_writing(self.directory):
            self._manager.close()


def _has_lost_arrays(state: Any) -> bool:
    leaves = jax.tree.leaves(state)
    return any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)


def _free_path(path: epath.Path) -> epath.Path:
    """Returns a path that does not exist: the given one, or it with a number."""
    if not path.exists():
        return path
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(2))
    return next(name for name in names if not name.exists())


def saved_steps(directory: str | os.PathLike[str]) -> list[int]:
    """Returns the steps of the complete checkpoints in a directory; writes nothing.

    Args:
      directory: directory of a `RunCheckpoints`, which need not exist.

    Example:
      >>> saved_steps("not_there")
      []
    """
    path = checkpoint_path(directory)
    if not path.is_dir():
        return []
    return sorted(
        int(step.name)
        for step in path.iterdir()
        if step.name.isdigit() and ocp.utils.is_checkpoint_finalized(step)
    )

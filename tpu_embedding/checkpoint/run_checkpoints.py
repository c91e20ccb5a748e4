"""Checkpoints of one run: a later process continues with the same numbers.

The state is saved as it lies on the devices, and restored under the same plan only; a
description of the plan and the run is stored beside it and compared. The training loop
is the only caller. Orbax writes each checkpoint under a temporary name and renames it
when it is complete, so a kill leaves the last complete one readable.
"""

import pathlib
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from tpu_embedding.plan.plan import EmbeddingPlan

T = TypeVar("T")
Description = dict[str, Any]


class CheckpointError(ValueError):
    """There is no checkpoint to resume from, or it belongs to another run."""


class RunCheckpoints:
    """The checkpoints of a run, one directory per step.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> checkpoints = RunCheckpoints(tempfile.mkdtemp(), kept=2)
      >>> checkpoints.save(7, {"weight": jnp.ones(3)}, {"seed": 0})
      >>> checkpoints.latest_step
      7
      >>> step, state = checkpoints.restore({"weight": jnp.zeros(3)}, {"seed": 0})
      >>> state["weight"].tolist()
      [1.0, 1.0, 1.0]
      >>> checkpoints.close()
    """

    def __init__(self, directory: str | pathlib.Path, *, kept: int):
        """Opens a directory, which is made if it is not there.

        Args:
          directory: of this run's checkpoints and nothing else.
          kept: how many of the latest checkpoints stay.
        """
        self.directory = pathlib.Path(directory).resolve()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=kept,
            create=True,
            # The next step donates the state; it must have been written by then.
            enable_async_checkpointing=False,
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    @property
    def latest_step(self) -> int | None:
        """Steps that were done at the latest complete checkpoint; None without any."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, description: Description) -> None:
        """Writes a checkpoint, and removes the ones that are too many.

        Args:
          step: number of steps done.
          state: pytree of arrays.
          description: JSON values that a run which resumes must agree with.
        """
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(_by_key(state)),
            description=ocp.args.JsonSave(description),
        )
        self._manager.save(step, args=arguments, force=True)

    def check(self, description: Description) -> int:
        """Returns the steps done at the latest checkpoint, if a run can resume there.

        Args:
          description: of the run that resumes.

        Raises:
          CheckpointError: if there is none, or its description is another; names
            every difference.
        """
        step = self.latest_step
        if step is None:
            raise no_checkpoint(self.directory)
        read = self._manager.restore(
            step, args=ocp.args.Composite(description=ocp.args.JsonRestore())
        )
        problems = _differences(read["description"], description)
        if problems:
            raise CheckpointError(
                f"The checkpoint {self.directory / str(step)} is that of another run "
                "or plan; resume with the same settings and number of devices, or "
                "begin anew elsewhere:\n  " + "\n  ".join(problems)
            )
        return step

    def restore(self, state: T, description: Description) -> tuple[int, T]:
        """Reads the latest checkpoint.

        Args:
          state: pytree of arrays or `jax.ShapeDtypeStruct`s, whose shapes, dtypes and
            shardings the restored ones get.
          description: of the run that resumes.

        Returns:
          The number of steps done, and the state.

        Raises:
          CheckpointError: as `check`.
        """
        step = self.check(description)
        by_key = _by_key(state)
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, by_key)
        read = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
        )
        # In the order of the state; `jax.tree.map` sorts the keys of a dict.
        leaves = [read["state"][key] for key in by_key]
        return step, jax.tree.unflatten(jax.tree.structure(state), leaves)

    def close(self) -> None:
        """Ends what the manager runs in the background."""
        self._manager.close()


def no_checkpoint(directory: pathlib.Path) -> CheckpointError:
    """Returns the error for a directory with nothing to resume from."""
    return CheckpointError(
        f"There is no complete checkpoint in {directory} to resume from; begin anew, "
        "or give the directory of the run."
    )


def describe_plan(plan: EmbeddingPlan) -> Description:
    """Returns what must be equal for arrays of one plan to be used under another."""
    return {
        "num_shards": plan.num_shards,
        "stacks": {
            stack.name: {
                "dim": stack.dim,
                "rows_per_shard": stack.rows_per_shard,
                "rows_per_line": stack.layout.rows_per_line,
                "lanes": stack.layout.lanes,
                "num_lines": stack.layout.num_lines,
                "gradient_steps": stack.optimizer and stack.optimizer.gradient_steps,
                "slots": [
                    {"row_shape": list(slot.shape), "dtype": str(slot.dtype)}
                    for slot in stack.slots
                ],
                "tables": {
                    table.name: {
                        "vocabulary_size": table.config.vocabulary_size,
                        "row_offset": table.row_offset,
                    }
                    for table in stack.tables
                },
            }
            for stack in plan.stacks
        },
    }


def _by_key(state: Any) -> dict[str, Any]:
    """Returns the leaves by their path, so that no class of ours is in the file."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    by_key = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in leaves
    }
    if len(by_key) < len(leaves):
        raise ValueError(
            "The state has two parts of one path once the path is joined by dots; "
            "rename a key that has a dot in it."
        )
    return by_key


def _differences(saved: Any, wanted: Any, path: str = "") -> list[str]:
    if not (isinstance(saved, dict) and isinstance(wanted, dict)):
        if saved == wanted:
            return []
        return [f"{path}: {saved!r} in the checkpoint, {wanted!r} now"]
    found = []
    for key in sorted(saved.keys() | wanted.keys()):
        place = f"{path}.{key}" if path else key
        if key not in saved:
            found.append(f"{place}: not in the checkpoint")
        elif key not in wanted:
            found.append(f"{place}: only in the checkpoint")
        else:
            found += _differences(saved[key], wanted[key], place)
    return found

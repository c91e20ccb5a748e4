"""Saves the state of a run, so that a later process can continue it exactly.

The state is saved in the layout that it has on the devices, and can only be restored
under an equal plan. A description of the plan and the run is stored with the state, and
compared before it is restored.

Orbax writes each checkpoint under a temporary name, and renames it when it is complete.
A kill at any time therefore leaves the last complete checkpoint readable. The training
loop is the only caller of this module.
"""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.packed_rows import PackedRows

T = TypeVar("T")
Description = dict[str, Any]


class CheckpointError(ValueError):
    """Raised if there is no checkpoint to resume from, or it belongs to another run."""


class RunCheckpoints:
    """The checkpoints of one run, one directory per saved step.

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
        """Opens a directory of checkpoints, and creates it if it does not exist.

        Args:
          directory: directory that contains only this run's checkpoints.
          kept: number of latest checkpoints to keep; older ones are deleted.
        """
        self.directory = pathlib.Path(directory).resolve()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=kept,
            create=True,
            # Saving blocks, because the next step donates the arrays of the state.
            enable_async_checkpointing=False,
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    @property
    def latest_step(self) -> int | None:
        """Number of steps done at the latest complete checkpoint; None without one."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, description: Description) -> None:
        """Writes a checkpoint, and deletes those that exceed `kept`.

        Args:
          step: number of steps done.
          state: pytree of arrays.
          description: JSON values that must be equal in a run that resumes.
        """
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(_leaves_by_path(state)),
            description=ocp.args.JsonSave(description),
        )
        self._manager.save(step, args=arguments, force=True)

    def check(self, description: Description) -> int:
        """Returns the number of steps done at the latest checkpoint, after checking it.

        Args:
          description: description of the run that resumes.

        Raises:
          CheckpointError: if there is no checkpoint, or its description differs; the
            message lists every difference.
        """
        step = self.latest_step
        if step is None:
            raise CheckpointError(
                f"There is no complete checkpoint in {self.directory} to resume from; "
                "start a new run, or give the directory of the run to resume."
            )
        arguments = ocp.args.Composite(description=ocp.args.JsonRestore())
        with self._reading(step):
            read = self._manager.restore(step, args=arguments)
        problems = _differences(read["description"], description)
        if problems:
            raise CheckpointError(
                f"The checkpoint {self.directory / str(step)} belongs to another run "
                "or plan. Resume with the same settings, optimizers and number of "
                "devices, or start a new run in another directory:\n  "
                + "\n  ".join(problems)
            )
        return step

    def restore(self, state: T, description: Description) -> tuple[int, T]:
        """Restores the state of the latest checkpoint.

        Args:
          state: pytree of arrays or `jax.ShapeDtypeStruct`s. The restored arrays get
            their shapes, dtypes and shardings.
          description: description of the run that resumes.

        Returns:
          The number of steps done, and the state.

        Raises:
          CheckpointError: as in `check`.
        """
        step = self.check(description)
        leaves_by_path = _leaves_by_path(state)
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, leaves_by_path)
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
        with self._reading(step):
            read = self._manager.restore(step, args=arguments)
        # `jax.tree.map` sorts the keys of a dict, so the order comes from the state.
        leaves = [read["state"][key] for key in leaves_by_path]
        return step, jax.tree.unflatten(jax.tree.structure(state), leaves)

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Raises `CheckpointError` if a checkpoint cannot be read."""
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"The checkpoint {self.directory / str(step)} cannot be read: "
                f"{type(error).__name__}: {str(error).partition(chr(10))[0]} Move it "
                "out of its directory to resume from an earlier one."
            ) from error

    def close(self) -> None:
        """Waits for the checkpoint manager's background work and stops it."""
        self._manager.close()


def saved_steps(directory: str | pathlib.Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a directory; writes nothing.

    Args:
      directory: directory of a `RunCheckpoints`, which need not exist.

    Example:
      >>> saved_steps("not_there")
      []
    """
    if not pathlib.Path(directory).is_dir():
        return []
    return sorted(ocp.utils.checkpoint_steps(str(directory)))


def describe_plan(plan: EmbeddingPlan) -> Description:
    """Returns the layout that two plans must share to use the same stacked arrays.

    Hyperparameters of the optimizers are not part of it.
    """
    return {
        "num_shards": plan.num_shards,
        "stacks": {
            stack.name: {
                "dim": stack.dim,
                "dtype": stack.layout.dtype_name,
                "rows_per_shard": stack.rows_per_shard,
                "rows_per_line": stack.layout.rows_per_line,
                "lanes": stack.layout.lanes,
                "num_lines": stack.layout.num_lines,
                "optimizer": stack.optimizer and _describe_rule(stack),
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


def _describe_rule(stack: StackPlan) -> Description:
    """Returns how a rule is applied, and the types of its state; no numbers."""
    assert stack.optimizer is not None
    rows = jax.ShapeDtypeStruct((1, stack.dim), jnp.float32)
    return {
        "state": list(_type_names(jax.eval_shape(stack.optimizer.init, rows))),
        "rows": stack.optimizer.rows,
        "duplicates": stack.optimizer.duplicates,
        "gradient_steps": stack.optimizer.gradient_steps,
    }


def _type_names(state: Any) -> Iterator[str]:
    """Yields the type of each part of a state, such as ScaleByAdamState."""
    if hasattr(state, "_fields"):
        yield type(state).__name__
    parts = state.values() if isinstance(state, dict) else state
    if isinstance(state, dict | list | tuple):
        for part in parts:
            yield from _type_names(part)


def describe_state(state: Any) -> Description:
    """Returns the name, dtype and shape of each leaf of a state, nested by name.

    Packed rows are one leaf without a shape, which `describe_plan` describes.

    Args:
      state: pytree of arrays or `jax.ShapeDtypeStruct`s.

    Example:
      >>> import jax.numpy as jnp
      >>> describe_state({"moments": [jnp.ones((2, 3))]})
      {'moments': {'0': 'float32[2, 3]'}}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_rows)
    description: Description = {}
    for path, leaf in leaves:
        *parents, name = (jax.tree_util.keystr((key,), simple=True) for key in path)
        node = description
        for parent in parents:
            node = node.setdefault(parent, {})
        is_rows = _is_rows(leaf)
        node[name] = "rows" if is_rows else f"{leaf.dtype}{list(leaf.shape)}"
    return description


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, PackedRows)


def _leaves_by_path(state: Any) -> dict[str, Any]:
    """Returns the leaves by their path, joined with dots.

    A saved file then contains no class of this package.

    Raises:
      ValueError: if two leaves have the same path.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    leaves_by_path = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in leaves
    }
    if len(leaves_by_path) < len(leaves):
        raise ValueError(
            "The state has two leaves with the same path once its keys are joined with "
            "dots; rename the key that contains a dot."
        )
    return leaves_by_path


def _differences(saved: Any, wanted: Any, path: str = "") -> list[str]:
    """Returns one message per value that differs between two nested dicts."""
    if not (isinstance(saved, dict) and isinstance(wanted, dict)):
        if saved == wanted:
            return []
        return [f"{path}: {saved!r} in the checkpoint, {wanted!r} now"]
    found = []
    for key in sorted(saved.keys() | wanted.keys()):
        key_path = f"{path}.{key}" if path else key
        if key not in saved:
            found.append(f"{key_path}: not in the checkpoint")
        elif key not in wanted:
            found.append(f"{key_path}: only in the checkpoint")
        else:
            found += _differences(saved[key], wanted[key], key_path)
    return found

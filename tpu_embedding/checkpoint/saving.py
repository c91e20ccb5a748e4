"""`te.save`, `te.restore`, and their Orbax handler.

Orbax manages steps and writes in the background. `StateHandler` plugs into Orbax's
`Checkpointer` and `CheckpointManager`, and decides which arrays to write. Orbax writes
to a directory with a temporary name and renames it at the end, so a killed process
never damages earlier checkpoints.
"""

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import unflatten_dict
from orbax.checkpoint.checkpoint_args import register_with_handler

from tpu_embedding.argument_checks import invalid
from tpu_embedding.checkpoint.arrays import ArrayWriter, TableToSave
from tpu_embedding.checkpoint.records import (
    CheckpointError,
    CheckpointRecord,
    array_keys,
    checkpoint_path,
    dense_keys,
    errors_of_writing,
)
from tpu_embedding.checkpoint.restoring import RestoreState, restore_state
from tpu_embedding.checkpoint.saved_leaves import (
    array_of_leaf,
    describe_leaf,
    tables_to_save,
)
from tpu_embedding.checkpoint.split_state import SplitState
from tpu_embedding.checkpoint.state_file import (
    description_as_json,
    seal_state_file,
    write_state_file,
)
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.transfers import moves_arrays
from tpu_embedding.update.state import is_slot


class StateHandler(ocp.AsyncCheckpointHandler):
    """The Orbax handler that saves `SaveState` and restores `RestoreState`.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with ocp.Checkpointer(StateHandler()) as checkpointer:
      ...         checkpointer.save(folder + "/3", args=SaveState({"next_batch": 17}))
      ...         new = RestoreState({"next_batch": 0})
      ...         checkpointer.restore(folder + "/3", args=new)
      {'next_batch': 17}
    """

    def __init__(self):
        # All types share one writer, which streams each stack once for all of the
        # stack's tables. Without OCDBT, each chunk has its own file, which ends with
        # the chunk's checksum.
        writer = ArrayWriter()
        types = (TableToSave, np.ndarray, jax.Array)
        self._pytree = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False,
            use_zarr3=True,
            type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                *((kind, writer) for kind in types)
            ),
        )

    async def async_save(
        self, directory: epath.Path, args: "SaveState"
    ) -> list[ocp.future.Future]:
        """Copies the state to the host, and returns futures for the writes.

        You may donate the state once this method returns.
        """
        # `_tree_to_save` writes into the directory, which Orbax creates in the
        # background. This future ends as soon as Orbax signals that the directory
        # exists.
        ready = _nothing()
        try:
            ocp.future.CommitFutureAwaitingContractedSignals(ready).result()
        finally:
            # If the wait fails, Orbax never awaits the coroutine. Closing it prevents
            # Python's warning.
            ready.close()
        tree = _tree_to_save(directory, args)
        return await self._pytree.async_save(directory, args=tree) or []

    @moves_arrays
    def save(self, directory: epath.Path, args: "SaveState") -> None:
        """Saves a state, and waits until everything is written."""
        self._pytree.save(directory, args=_tree_to_save(directory, args))

    def finalize(self, directory: epath.Path) -> None:
        """Adds the checksums to `state.json`, once all files are complete."""
        # Orbax calls this on one process, after a barrier and before it renames the
        # directory. If the process is killed before that, only a temporary directory is
        # left.
        seal_state_file(directory)

    @moves_arrays
    def restore(self, directory: epath.Path, args: RestoreState) -> Any:
        """Restores a state; see `te.restore`."""
        return restore_state(directory, args)

    def close(self) -> None:
        """Closes the Orbax handler."""
        self._pytree.close()


@register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class SaveState(ocp.args.CheckpointArgs):
    """The state to save: an argument for `CheckpointManager.save`.

    Attributes:
      state: nnx modules such as `(model, optimizer)`, an `nnx.State`, a Linen
        `TrainState`, or any pytree.
      plan: table plan. Needed unless modules or Linen variables in `state` hold it.
      description: JSON values to store with the state.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     with ocp.CheckpointManager(folder) as manager:
      ...         manager.save(3, args=SaveState({"next_batch": 17}))
      ...         manager.wait_until_finished()
      ...         manager.restore(3, args=RestoreState({"next_batch": 0}))
      True
      {'next_batch': 17}
    """

    state: Any
    plan: EmbeddingPlan | None = None
    description: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        # Argument errors are raised here, before Orbax starts.
        self.parts = SplitState(self.state, self.plan)
        for layer in self.parts.layers:
            for rows in jax.tree.leaves((layer.tables, layer.slots), is_leaf=is_slot):
                if is_slot(rows):
                    # Rows in host memory may be newer than the caller's arrays.
                    rows.check_current()
        self.description = description_as_json(self.description)


register_with_handler(StateHandler, for_restore=True)(RestoreState)


def _tree_to_save(directory: epath.Path, args: SaveState) -> ocp.args.PyTreeSave:
    dense = args.parts.dense
    leaves = {dense_keys(name): array_of_leaf(leaf) for name, leaf in dense.items()}
    tables = {}
    for layer in args.parts.layers:
        records, arrays = tables_to_save(layer)
        tables |= records
        leaves |= {array_keys(*names): leaf for names, leaf in arrays.items()}
    # This comes after the loop, because all processes must run `tables_to_save`
    # together.
    if jax.process_index() == 0:
        record = CheckpointRecord(
            tables=tables,
            dense={name: describe_leaf(leaf) for name, leaf in dense.items()},
            description=dict(args.description),
        )
        write_state_file(directory, record)
    return ocp.args.PyTreeSave(unflatten_dict(leaves))


async def _nothing() -> None:
    pass


@moves_arrays
def save(
    directory: str | os.PathLike[str],
    state: Any,
    *,
    plan: EmbeddingPlan | None = None,
    description: Mapping[str, Any] | None = None,
) -> None:
    """Saves training state to a new directory.

    The directory appears only when everything is written. Each table is saved as one
    array with its rows in natural order, so you can restore it under any plan. To keep
    only the latest checkpoints, pass `te.checkpoint.SaveState` to an Orbax
    `CheckpointManager`.

    Args:
      directory: checkpoint path. It must not exist.
      state: nnx modules such as `(model, optimizer)`, an `nnx.State`, a Linen
        `TrainState`, or any pytree. The pytree may include data positions and random
        keys.
      plan: table plan. Needed unless modules or Linen variables in `state` hold it.
      description: JSON values to store with the state.

    Raises:
      CheckpointError: if the directory exists, or the files can't be written. For
        example, the disk may be full, or a leaf's dtype may not be supported.
      TypeError: if a leaf is neither an array nor a number, or the description can't be
        written as JSON.
      ValueError: if some tables have no known plan, or the description is larger than
        4 MiB as JSON.

    Example:
      >>> import tempfile, jax, optax
      >>> from flax import nnx
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(
      ...     te.FeatureConfig(table=table), "adagrad", rngs=nnx.Rngs(0)
      ... )
      >>> optimizer = te.Optimizer(layer, optax.adam(1e-3))
      >>> directory = tempfile.mkdtemp() + "/checkpoint"
      >>> te.save(directory, (layer, optimizer))
      >>> layer, optimizer = te.restore(directory, (layer, optimizer))
    """
    args = SaveState(state, plan=plan, description=description or {})
    path = checkpoint_path(directory)
    with (
        errors_of_writing(path),
        _new_path(path),
        ocp.Checkpointer(StateHandler()) as checkpointer,
    ):
        checkpointer.save(path, args=args)


@contextlib.contextmanager
def _new_path(path: epath.Path) -> Iterator[None]:
    """Rejects a path that exists, and locks its parent folder against other saves."""
    # Orbax writes under a temporary name that two saves to the same path would share.
    # The later save waits for the lock, then finds that the path exists and raises.
    # Only the job's first process locks and checks the path. Buckets such as `gs://`
    # have no locks.
    exists, error = False, None
    with contextlib.ExitStack() as ends:
        if jax.process_index() == 0:
            try:
                if "://" not in os.fspath(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    folder = os.open(path.parent, os.O_RDONLY)
                    ends.callback(os.close, folder)  # Closing releases the lock.
                    # Some network file systems have no locks.
                    with contextlib.suppress(OSError):
                        fcntl.flock(folder, fcntl.LOCK_EX)
                exists = path.exists()
            except OSError as found:
                # Raise the error after the broadcast that other processes wait for.
                error = found
        flags = np.array([exists, error is not None])
        exists, fails = ocp.multihost.broadcast_one_to_all(flags)
        if exists:
            fix = "Choose a new directory."
            raise invalid("directory", "not exist", f"{path}", fix, CheckpointError)
        if fails:
            raise error or CheckpointError(
                f"The first process of the job cannot create {path}; see its error."
            )
        yield


@moves_arrays
def restore(
    directory: str | os.PathLike[str],
    state: Any,
    *,
    plan: EmbeddingPlan | None = None,
    tables: Collection[str] | None = None,
    rename: Mapping[str, str] | None = None,
) -> Any:
    """Restores a state from a checkpoint that was saved under any plan.

    Devices, mesh, stacking, packing and placement may all differ from the saved state.
    Tables must have the saved dims, types and kinds of optimizer, but hyper-parameters
    may change. If your table has more rows than the saved one, the new rows keep their
    values in `state`. If a checkpoint doesn't fit, read its tables and slot variables
    with `te.checkpoint.read_table`, and set them in your model.

    Note that rows are written in place, so the arrays in `state` are donated. All
    differences and damage are found before anything changes. Therefore, if `state` has
    arrays, the files are read twice: first to check them, then to restore the rows. If
    you pass only shapes, the files are read once. Everything is read from the same
    save, even if the directory is replaced during the restore.

    Args:
      directory: checkpoint from `save`, or one step of a `CheckpointManager`.
      state: state with the saved structure. Modules are restored in place. Other
        leaves are arrays or shapes (`jax.ShapeDtypeStruct`). You may leave out the last
        parts of a tuple: to restore only the model from a saved `(model, optimizer)`,
        pass `(model,)`. To restore only tables, pass a layer alone.
      plan: table plan. Needed unless modules or Linen variables in `state` hold it.
      tables: names of the tables to restore. Defaults to all tables. Tables that you
        leave out keep their values. If the state has several layers, the layer path
        precedes the name: `"user/movie"`. Stacked tables share step counts. If you
        restore only some tables in a stack, the state's count must be 0 or equal to the
        restored count.
      rename: maps a table's name in the state to its name in the checkpoint.

    Returns:
      The restored state. Modules are the same objects, updated.

    Raises:
      CheckpointError: if the checkpoint or a file is missing or damaged, or if the
        checkpoint doesn't fit the state. The message then lists every difference with a
        fix. The arrays in `state` keep their values, unless checkpoint files are
        overwritten in place or removed while rows are being restored.
      ValueError: if an argument is invalid, or some tables have no known plan.

    Example:
      >>> import tempfile, jax
      >>> import tpu_embedding as te
      >>> def plan_of(vocabulary_size):
      ...     table = te.TableConfig(
      ...         vocabulary_size=vocabulary_size, dim=4, name="movie"
      ...     )
      ...     return te.make_plan(te.FeatureConfig(table=table))
      >>> plan, grown = plan_of(10), plan_of(12)
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> directory = tempfile.mkdtemp() + "/checkpoint"
      >>> te.save(directory, {"tables": tables}, plan=plan)
      >>> new = {"tables": te.functional.init_tables(grown, jax.random.key(0))}
      >>> new = te.restore(directory, new, plan=grown)
      >>> te.functional.unstack_tables(new["tables"], grown)["movie"].shape
      (12, 4)
    """
    args = RestoreState(state, plan=plan, tables=tables, rename=rename)
    return restore_state(directory, args)

"""`te.save` and `te.restore`, and the orbax handler that they use.

`StateHandler` is an orbax handler, so a state goes into any orbax `CheckpointManager`::

    manager.save(step, args=te.checkpoint.SaveState((model, optimizer)))
    manager.restore(step, args=te.checkpoint.RestoreState((model, optimizer)))

Orbax writes a checkpoint under a temporary name and renames it at the end, so a kill at
any time leaves the earlier ones as they are. Saving copies blocks of rows to the host
and writes them in the background. The call returns once the rest fits in host memory,
and the next step may then donate its arrays.
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

from tpu_embedding.checkpoint.arrays import pytree_handler
from tpu_embedding.checkpoint.differences import (
    DenseChoice,
    DtypesChoice,
    RulesChoice,
    SlotsChoice,
    describe_leaf,
)
from tpu_embedding.checkpoint.records import (
    CheckpointError,
    CheckpointRecord,
    array_keys,
    checkpoint_path,
    dense_keys,
    errors_of_writing,
)
from tpu_embedding.checkpoint.restoring import RestoreState, restore_state
from tpu_embedding.checkpoint.saved_leaves import array_of_leaf, tables_to_save
from tpu_embedding.checkpoint.split_state import SplitState
from tpu_embedding.checkpoint.state_file import (
    description_as_json,
    seal_state_file,
    write_state_file,
)
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.update.lazy_update import is_slot


class StateHandler(ocp.AsyncCheckpointHandler):
    """Saves and restores states; orbax makes one for `SaveState` and `RestoreState`."""

    def __init__(self):
        self._pytree = pytree_handler()

    async def async_save(
        self, directory: epath.Path, args: "SaveState"
    ) -> list[ocp.future.Future]:
        """Copies the state to the host, and starts to write it.

        Args:
          directory: gets the state.
          args: the state and options.

        Returns:
          The ends of the writes.
        """
        # Orbax makes the directory in the background.
        ready = _nothing()
        try:
            ocp.future.CommitFutureAwaitingContractedSignals(ready).result()
        finally:
            ready.close()  # Orbax does not run it if it waits in vain.
        tree = _tree_to_save(directory, args)
        return await self._pytree.async_save(directory, args=tree) or []

    def save(self, directory: epath.Path, args: "SaveState") -> None:
        """Saves a state, and returns when all is written."""
        self._pytree.save(directory, args=_tree_to_save(directory, args))

    def finalize(self, directory: epath.Path) -> None:
        """Records the checksums of all files, once they are complete."""
        seal_state_file(directory)

    def restore(self, directory: epath.Path, args: RestoreState) -> Any:
        """Restores a state; see `te.restore`."""
        return restore_state(directory, args)

    def close(self) -> None:
        """Ends the orbax handler."""
        self._pytree.close()


@register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class SaveState(ocp.args.CheckpointArgs):
    """The state to save: an argument for `CheckpointManager.save`.

    Attributes:
      state: nnx modules, as `(model, optimizer)`; an `nnx.State`; a Linen `TrainState`;
        or any pytree.
      plan: the tables' plan, if neither modules nor Linen variables hold it.
      description: JSON values to keep with the state.
    """

    state: Any
    plan: EmbeddingPlan | None = None
    description: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        # The user's errors are raised here, and the disk's errors later.
        self.parts = SplitState(self.state, self.plan)
        for layer in self.parts.layers:
            for rows in jax.tree.leaves((layer.tables, layer.slots), is_leaf=is_slot):
                if is_slot(rows):
                    rows.check_current()
        self.description = description_as_json(self.description)


register_with_handler(StateHandler, for_restore=True)(RestoreState)


def _tree_to_save(directory: epath.Path, args: SaveState) -> ocp.args.PyTreeSave:
    """Returns the tree that orbax saves, and writes its description."""
    dense = args.parts.dense
    leaves = {dense_keys(name): array_of_leaf(leaf) for name, leaf in dense.items()}
    tables = {}
    for layer in args.parts.layers:
        records, arrays = tables_to_save(layer)
        tables |= records
        leaves |= {array_keys(*names): leaf for names, leaf in arrays.items()}
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


def save(
    directory: str | os.PathLike[str],
    state: Any,
    *,
    plan: EmbeddingPlan | None = None,
    description: Mapping[str, Any] | None = None,
) -> None:
    """Saves the state of a training in a new directory.

    The directory appears when all is written. A table is one array in it, rows in
    natural order, so `te.restore` reads it under any plan. A `CheckpointManager` of
    orbax keeps the latest of several; see `te.checkpoint.SaveState`.

    Args:
      directory: path of the checkpoint. It must not exist.
      state: nnx modules, as `(model, optimizer)`; an `nnx.State`; a Linen `TrainState`;
        or any pytree, which may also hold positions in the data and random keys.
      plan: the tables' plan, if neither modules nor Linen variables hold it.
      description: JSON values to keep with the state.

    Raises:
      CheckpointError: if the directory exists, or the files cannot be written, as with
        a dtype that no file can hold.
      TypeError: if a leaf is not a number.
      ValueError: if the plan of some tables is not known, or the description has
        more than 4 MiB as JSON.

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
    """Rejects a path that exists; another save into its folder waits meanwhile.

    Orbax writes under a temporary name, which two saves to one path would share. The
    first process of a job decides for all. Stores such as `gs://` have no locks.
    """
    exists, error = False, None
    with contextlib.ExitStack() as ends:
        if jax.process_index() == 0:
            try:
                if "://" not in os.fspath(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    folder = os.open(path.parent, os.O_RDONLY)
                    ends.callback(os.close, folder)  # This frees the lock.
                    with contextlib.suppress(OSError):  # some network file systems
                        fcntl.flock(folder, fcntl.LOCK_EX)
                exists = path.exists()
            except OSError as found:
                error = found
        flags = np.array([exists, error is not None])
        exists, fails = ocp.multihost.broadcast_one_to_all(flags)
        if exists:
            raise CheckpointError(f"The directory {path} exists; choose a new one.")
        if fails:
            raise error or CheckpointError(
                f"The first process of the job cannot make {path}; see its error."
            )
        yield


def restore(
    directory: str | os.PathLike[str],
    state: Any,
    *,
    plan: EmbeddingPlan | None = None,
    tables: Collection[str] | None = None,
    rename: Mapping[str, str] | None = None,
    slots: SlotsChoice = "restore",
    rules: RulesChoice = "check",
    dense: DenseChoice = "restore",
    dtypes: DtypesChoice = "check",
) -> Any:
    """Restores a state that was saved under any plan.

    Number of devices, mesh, stacking, packing and placement may all differ.
    Rows are written in place, so the arrays of `state` are donated. Rows and tables
    that the checkpoint lacks keep the values of `state`: the initial ones if the model
    is new. All differences and all damage are found before anything changes. For that,
    the files are read twice if `state` has arrays, and once if it has shapes.

    All is read from one save, even if another checkpoint takes the directory's name in
    the meantime.

    Args:
      directory: from `save`, or of one step of a `CheckpointManager`.
      state: has the structure of the saved one. Modules are restored in place.
        Other leaves are arrays, or shapes (`jax.ShapeDtypeStruct`). Parts may be
        missing: the model of a saved `(model, optimizer)` is restored as `(model,)`.
      plan: the tables' plan, if neither modules nor Linen variables hold it.
      tables: names of the tables to restore. Defaults to all; tables that are left
        out keep their values. In a state of several layers, the path of the layer
        precedes the name: `"user/movie"`. Tables of a stack share a count of steps: it
        must be equal, or 0 in tables that stay.
      rename: name of a table to its name in the checkpoint.
      slots: `"restore"`: slot variables come from the checkpoint. `"initialize"`: slot
        variables of the restored tables start again. So do their counts, unless tables
        that stay share them.
      rules: `"check"`: the optimizer of each table must have a state of the types,
        names and shapes in the checkpoint. Its hyper-parameters may change.
        `"ignore"`: slot variables are taken over if names, types and shapes are equal,
        and start again if not. A count of steps is taken over under any name: a
        schedule instead of a constant rate continues from it, and starts at 0 if the
        checkpoint counts no steps.
      dense: `"restore"`: all other leaves come from the checkpoint. `"keep"`: they
        stay.
      dtypes: `"check"`: tables must have the types of the checkpoint. `"convert"`: rows
        are rounded to float32 or bfloat16, whichever the tables of the state are. Their
        slot variables are taken over as they are.

    Returns:
      The restored state; for modules, these modules.

    Raises:
      CheckpointError: if the checkpoint or a file is missing or damaged, or
        checkpoint and state differ; the message lists every difference, and what to do
        about it. The arrays of `state` keep their values, unless files are overwritten
        in place or removed while rows are being written.
      ValueError: if an argument is wrong, or the plan of some tables is not known.

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
    args = RestoreState(
        state,
        plan=plan,
        tables=tables,
        rename=rename,
        slots=slots,
        rules=rules,
        dense=dense,
        dtypes=dtypes,
    )
    return restore_state(directory, args)

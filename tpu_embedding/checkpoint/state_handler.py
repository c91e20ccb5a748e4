"""Saves and restores a training state through orbax.

`StateHandler` is an orbax handler, so a state goes into any orbax `CheckpointManager`::

    manager.save(step, args=te.checkpoint.SaveState((model, optimizer)))
    manager.restore(step, args=te.checkpoint.RestoreState((model, optimizer)))

Orbax writes a checkpoint under a temporary name and renames it at the end, so a kill at
any time leaves the earlier ones as they are. Saving copies blocks of rows to the host
and writes them in the background. `SaveState.host_bytes` bounds the copies. The call
returns once the rest fits, and the next step may then donate its arrays.
"""

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_args import register_with_handler

from tpu_embedding.checkpoint.arrays import HostBudget
from tpu_embedding.checkpoint.dense_leaves import (
    check_dtypes,
    start_writing_leaves,
    with_elements,
)
from tpu_embedding.checkpoint.differences import describe_leaf
from tpu_embedding.checkpoint.failed_saves import meet_unless_failed
from tpu_embedding.checkpoint.format import (
    DENSE,
    TABLES,
    write_manifest,
    write_state_file,
    write_tables_file,
)
from tpu_embedding.checkpoint.restoring import RestoreState, restore_state
from tpu_embedding.checkpoint.split_state import SplitState
from tpu_embedding.checkpoint.table_arrays import start_writing, table_records
from tpu_embedding.plan.plan import EmbeddingPlan

HOST_BYTES: Final = 2**28
"""Default of the rows that wait in host memory to be written."""

ASYNC_OPTIONS: Final = ocp.AsyncOptions(
    create_directories_asynchronously=False, barrier_sync_fn=meet_unless_failed
)
"""Directories are made at once: orbax waits five minutes for one that cannot be made in
the background. A save that fails in one process waits for no other."""


class StateHandler(ocp.AsyncCheckpointHandler):
    """Saves and restores states; orbax makes one for `SaveState` and `RestoreState`."""

    def __init__(self):
        self._dense = ocp.StandardCheckpointHandler()
        self._has_dense = False

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
        dense, layers = args.parts.dense, args.parts.layers
        # Orbax makes the directory in the background.
        ready = _nothing()
        try:
            ocp.future.CommitFutureAwaitingContractedSignals(ready).result()
        finally:
            ready.close()  # Orbax does not run it if it waits in vain.
        is_first = jax.process_index() == 0
        if is_first:
            (directory / TABLES).mkdir(exist_ok=True)
            (directory / DENSE).mkdir(exist_ok=True)
        futures: list[Any] = []
        leaves = with_elements(dense)
        self._has_dense = bool(leaves)
        if leaves:
            path = directory / DENSE
            futures += await start_writing_leaves(self._dense, path, leaves)
        budget = HostBudget(args.host_bytes)
        records = {}
        for layer in layers:
            records |= table_records(layer)
        futures += start_writing(layers, directory / TABLES, budget)
        if is_first:
            write_tables_file(directory / TABLES, records)
            names = {name: describe_leaf(leaf) for name, leaf in dense.items()}
            write_state_file(directory, names, dict(args.description))
        return futures

    def save(self, directory: epath.Path, args: "SaveState") -> None:
        """Saves a state, and returns when all is written."""
        # In a thread, as the caller may run in an event loop, which notebooks do.
        with ThreadPoolExecutor(1) as thread:
            save = self.async_save(directory, args=args)
            futures = thread.submit(asyncio.run, save).result()
        for future in futures:
            future.result()

    def finalize(self, directory: epath.Path) -> None:
        """Writes the manifest, after all processes have written."""
        if self._has_dense:
            self._dense.finalize(directory / DENSE)
        write_manifest(directory)

    def restore(self, directory: epath.Path, args: RestoreState) -> Any:
        """Restores a state; see `te.restore`."""
        return restore_state(directory, args)

    def close(self) -> None:
        """Ends the handler of the dense leaves."""
        self._dense.close()


@register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class SaveState(ocp.args.CheckpointArgs):
    """The state to save: an argument for `CheckpointManager.save`.

    Attributes:
      state: nnx modules, as `(model, optimizer)`; an `nnx.State`; a Linen `TrainState`;
        or any pytree.
      plan: the tables' plan, if neither modules nor Linen variables hold it.
      description: JSON values to keep with the state.
      host_bytes: maximum bytes of table rows that wait in host memory to be written;
        see `te.save`.
    """

    state: Any
    plan: EmbeddingPlan | None = None
    description: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    host_bytes: int = HOST_BYTES

    def __post_init__(self):
        # Errors of the user are raised here, and those of the disk later.
        self.parts = SplitState(self.state, self.plan)
        slots = jax.tree_util.tree_leaves_with_path(
            [layer.slots for layer in self.parts.layers]
        )
        in_slots = {f"slots{jax.tree_util.keystr(path)}": leaf for path, leaf in slots}
        check_dtypes(self.parts.dense | in_slots)
        try:
            self.description = json.loads(json.dumps(dict(self.description)))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"description must hold JSON values, got {self.description!r}: {error}."
            ) from error


register_with_handler(StateHandler, for_restore=True)(RestoreState)


async def _nothing() -> None:
    pass

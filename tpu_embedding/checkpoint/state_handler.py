"""Saves and restores a training state through orbax.

`StateHandler` is an orbax handler, so a state goes into any orbax `CheckpointManager`::

    manager.save(step, args=te.checkpoint.SaveState((model, optimizer)))
    manager.restore(step, args=te.checkpoint.RestoreState((model, optimizer)))

Orbax writes a checkpoint under a temporary name and renames it at the end, so a kill at
any time leaves the earlier ones as they are. Saving copies blocks of rows to the host
and writes them in the background. The call returns once the rest fits in host memory,
and the next step may then donate its arrays.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import unflatten_dict
from orbax.checkpoint.checkpoint_args import register_with_handler

from tpu_embedding.checkpoint.array_writer import pytree_handler
from tpu_embedding.checkpoint.dense_leaves import array_of_leaf
from tpu_embedding.checkpoint.differences import describe_leaf
from tpu_embedding.checkpoint.layer_tables import tables_to_save
from tpu_embedding.checkpoint.records import (
    CheckpointRecord,
    array_keys,
    dense_keys,
)
from tpu_embedding.checkpoint.restoring import RestoreState, restore_state
from tpu_embedding.checkpoint.split_state import SplitState
from tpu_embedding.checkpoint.state_file import (
    description_as_json,
    seal_state_file,
    write_state_file,
)
from tpu_embedding.plan.plan import EmbeddingPlan


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
        # Errors of the user are raised here, and those of the disk later.
        self.parts = SplitState(self.state, self.plan)
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

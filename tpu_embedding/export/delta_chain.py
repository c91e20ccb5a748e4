"""The chain of an export and its deltas, as the state of an optimizer records it."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from tpu_embedding.distributed.job import current_job
from tpu_embedding.export.layer_tables import table_prefix
from tpu_embedding.export.signature import ExportError
from tpu_embedding.functional.dynamic_ids import dynamic_rows
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.nn.training import Optimizer, embedding_layers
from tpu_embedding.optimizers.rules.track_touched_rows import is_tracking
from tpu_embedding.tables.touched_rows import TrackedStack, tracked_stacks


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackedPart:
    """A stack whose touched rows are tracked, and the layer that owns it."""

    prefix: str
    path: str
    layer: TPUEmbedding
    tracked: TrackedStack


class DeltaChain:
    """The records of touched rows in an optimizer, which follow one export."""

    def __init__(self, model: nnx.Module, optimizer: Optimizer):
        """Finds the records.

        Raises:
          ExportError: if the optimizer is another model's, or a trained table has none.
        """
        layers = embedding_layers(model)
        self._optimizer = optimizer
        slots = optimizer.slots.get_value()
        if set(layers) != set(slots):
            raise ExportError(
                "Deltas need the optimizer that was made for the model, got layers "
                f"{sorted(layers)} of the model and {sorted(slots)} of the optimizer."
            )
        self.parts = [
            TrackedPart(
                prefix=table_prefix(path, layers), path=path, layer=layer, tracked=each
            )
            for path, layer in layers.items()
            for each in tracked_stacks(slots[path], layer.plan)
        ]
        known = {(part.path, part.tracked.stack.name) for part in self.parts}
        missing = [
            table_prefix(path, layers) + table.name
            for path, layer in layers.items()
            for stack in layer.plan.trained_stacks
            for table in stack.tables
            if (path, stack.name) not in known
        ]
        if missing or not self.parts:
            raise ExportError(
                "Deltas need the touched rows of all trained tables, but the "
                f"optimizers of tables {sorted(missing)} do not record them; wrap "
                "these by te.optimizers.track_touched_rows."
            )

    def base_identity(self) -> str:
        """Returns the identity of the export or delta that the tables follow.

        Raises:
          ExportError: if they follow none, or not all the same.
        """
        ids = {int(part.tracked.state.base_id) for part in self.parts}
        (base, *others) = ids
        if others or base == 0:
            raise ExportError(
                "There is no export that a delta could follow: none was made with this "
                "optimizer, or rows changed since by finalize_variable_values, or by a "
                "restore of some tables. Start a chain by "
                "te.export.save_tables(model, directory, optimizer=optimizer)."
            )
        return f"{base:08x}"

    def steps(self, field: str) -> dict[str, int]:
        """Returns a number of updates of each table."""
        return {
            part.prefix + table.name: int(getattr(part.tracked.state, field))
            for part in self.parts
            for table in part.tracked.stack.tables
        }

    def first_record(self, digests: Mapping[str, str]) -> dict[str, Any]:
        """Returns the entry of the chain in the document of its first export.

        Args:
          digests: path of each file of the export to its SHA-256.
        """
        steps = self.steps("update_count")
        identity = identity_of({"steps": steps, "files": dict(digests)})
        return {"identity": identity, "steps": steps}

    def follow(self, record: Mapping[str, Any] | None) -> None:
        """Makes the next delta follow an export or delta of the present step.

        Args:
          record: with the identity; other processes than the first may lack it.
        """
        identity = current_job().broadcast(
            "identity of an export", record and record["identity"]
        )

        def replace(node: Any) -> Any:
            if not is_tracking(node):
                return node
            new = {"base_step": int(node.update_count), "base_id": int(identity, 16)}
            return node._replace(
                **{
                    name: jax.device_put(np.int32(x), getattr(node, name).sharding)
                    for name, x in new.items()
                }
            )

        slots = self._optimizer.slots
        slots.set_value(jax.tree.map(replace, slots.get_value(), is_leaf=is_tracking))
        for layer in {id(part.layer): part.layer for part in self.parts}.values():
            layer.set_tables.forget(int(identity, 16))
            found = dynamic_rows(layer.tables.get_value(), layer.plan)
            for table, rows in found.items():
                layer.set_tables.keep_ids(int(identity, 16), table, rows.ids)


def identity_of(body: Mapping[str, Any]) -> str:
    """Returns 8 hexadecimal digits of a positive int32, which a state can hold."""
    text = json.dumps(body, sort_keys=True)
    number = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)
    return f"{number & 0x7FFFFFFF or 1:08x}"

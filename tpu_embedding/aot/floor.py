"""The least that any program must move for the embedding part of a train step.

A yardstick for `cost.py`: modelled bytes over these say how far the compiled program is
from what the lookup and the update need at all. It is recomputed from the plan and the
shapes of a batch, as follows, per device, for each stack of tables.

With S devices, and per table t with V_t rows N_t ids per device (all places of a batch
count, padded ones too) and rows of D float32:

    u = sum over t of min(N_t, V_t)            rows that a device asks for
    r = sum over t of min(S * N_t, V_t) / S    rows that a device owns and is asked for

that is, the ids are taken to be as different as they can be; where they repeat, less
has to move. Then

    HBM, forward   = ids (and their weights and row splits) as they come
                   + 4 D r                     each row read once, where it lies
                   + 4 D A                     each activation written once
    HBM, backward  = 4 D A                     each cotangent read once
                   + 2 r (4 D + B)             row of table and slots read and written
    links          = (S - 1) / S * u * (4 + 4 D + 4 D)
                                               an id out, a row back, a gradient out

Of S devices in L slices, S / L - 1 are reached within the slice (ICI), and S - S / L
over the network of the data centre (DCN); what goes over the links is split so.

where A is the number of activation vectors per device and B the bytes of a row's slot
variables. Rules that move every row read and write all rows of a shard: there the last
line of HBM has rows per shard in place of r. Rules that run once per occurrence of an
id send N_t gradients. A stack without an optimizer has the forward part only, and
sends 4 + 4 D bytes a row.

Rows count without the padding of tiles, and nothing in between is written to memory:
exchange buffers, sorted ids, gradients before they are summed. No program does that;
but one whose tables fit the chip's own memory may move less than this over HBM.
"""

import dataclasses
import math
from typing import Any, Final

import jax
import jax.numpy as jnp

from tpu_embedding.functional import activation_shapes
from tpu_embedding.hardware import num_slices_of
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan

_ITEM_BYTES: Final = 4
"""Of a row id, and of a float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floor:
    """Least traffic of the embedding part of a train step, in bytes per device.

    Attributes:
      forward_hbm_bytes: of the lookup, over the device's memory.
      backward_hbm_bytes: of gradient and update, over the device's memory.
      ici_bytes: sent to other devices of the slice.
      dcn_bytes: sent to other slices.
    """

    forward_hbm_bytes: float
    backward_hbm_bytes: float
    ici_bytes: float
    dcn_bytes: float

    @property
    def hbm_bytes(self) -> float:
        """Over the device's memory, both passes together."""
        return self.forward_hbm_bytes + self.backward_hbm_bytes


def embedding_floor(plan: EmbeddingPlan, features: Any) -> Floor:
    """Returns the least that lookup and update of a batch must move.

    Args:
      plan: of the layer.
      features: a batch as the layer takes it, or its shapes; global.

    Example:
      >>> import jax.numpy as jnp
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=1000, dim=8, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> ids = jax.ShapeDtypeStruct((16,), jnp.int32)
      >>> embedding_floor(plan, {"watched": ids}).forward_hbm_bytes * plan.num_shards
      1088.0
    """

    def activations_of(features: Any) -> Any:
        shapes = activation_shapes(features, plan)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    leaves = plan.flatten(features)
    activations = plan.flatten(jax.eval_shape(activations_of, features))
    floors = [_stack_floor(stack, plan, leaves, activations) for stack in plan.stacks]
    return Floor(
        forward_hbm_bytes=sum(floor.forward_hbm_bytes for floor in floors),
        backward_hbm_bytes=sum(floor.backward_hbm_bytes for floor in floors),
        ici_bytes=sum(floor.ici_bytes for floor in floors),
        dcn_bytes=sum(floor.dcn_bytes for floor in floors),
    )


def _stack_floor(
    stack: StackPlan, plan: EmbeddingPlan, leaves: list[Any], activations: list[Any]
) -> Floor:
    num_shards = plan.num_shards
    input_bytes, activation_bytes = 0.0, 0.0
    ids_of_table: dict[int, float] = {}
    for i in plan.features_of(stack):
        input_bytes += sum(map(_num_bytes, jax.tree.leaves(leaves[i]))) / num_shards
        activation_bytes += _num_bytes(activations[i]) / num_shards
        row_offset = plan.features[i].row_offset
        num_ids = _num_ids(leaves[i]) / num_shards
        ids_of_table[row_offset] = ids_of_table.get(row_offset, 0) + num_ids
    asked, owned = 0.0, 0.0
    for table in stack.tables:
        num_ids = ids_of_table.get(table.row_offset, 0)
        num_rows = table.config.vocabulary_size
        asked += min(num_ids, num_rows)
        owned += min(num_shards * num_ids, num_rows) / num_shards

    row_bytes = _ITEM_BYTES * stack.dim
    link_bytes = asked * (_ITEM_BYTES + row_bytes)
    backward = 0.0
    if stack.optimizer is not None:
        slot_bytes = sum(
            math.prod(slot.shape) * slot.dtype.itemsize for slot in stack.slots
        )
        moved = stack.rows_per_shard if stack.optimizer.rows == "every" else owned
        backward = activation_bytes + 2 * moved * (row_bytes + slot_bytes)
        sent = sum(ids_of_table.values()) if stack.keeps_duplicates else asked
        link_bytes += sent * row_bytes
    per_slice = num_shards / num_slices_of(plan.mesh)
    return Floor(
        forward_hbm_bytes=input_bytes + owned * row_bytes + activation_bytes,
        backward_hbm_bytes=backward,
        ici_bytes=link_bytes * (per_slice - 1) / num_shards,
        dcn_bytes=link_bytes * (num_shards - per_slice) / num_shards,
    )


def _num_ids(ids: Any) -> int:
    """Returns the places for ids of a feature: those of its (first) array of ids."""
    for name in ("ids", "values"):
        ids = getattr(ids, name, ids)
    return math.prod(ids.shape)


def _num_bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize

"""Minimum traffic of the embedding part of a train step: the floor.

The compile report compares a program's modelled traffic with this floor, for example
"2.5x the minimum traffic". The floor follows from the plan and the shapes of a batch,
per device and for each stack of tables:

    S    shards of the rows
    R    copies of each shard
    D    float32 elements of a row
    B    bytes of a row's slot variables
    A    activation vectors per device
    V_t  rows of table t
    N_t  ids of table t per device, padding included

    u = sum over t of min(N_t, V_t)            rows that a device requests
    r = sum over t of min(S * N_t, V_t) / S    rows that a device owns and must read
    m = sum over t of min(R * S * N_t, V_t) / S    rows that a device must update

    HBM, forward   = ids, weights and row splits, read once
                   + 4 D r                     rows, read once
                   + 4 D A                     activations, written once
    HBM, backward  = 4 D A                     cotangents, read once
                   + 2 m (4 D + B)             rows and slots, read and written once
    links          = (S - 1) / S * u * (4 + 4 D + 4 D)
                                               id out, row back, gradient out
                   + (R - 1) / R * (r + m) * 4 D
                                               gradients to and from the other copies

The ids are assumed to be as distinct as possible; repeated ids need less traffic.

The links' traffic splits by destination: to devices of the same slice (ICI), and to the
others over the data-centre network (DCN).

Three kinds of stacks differ. An optimizer that updates every row has the rows per shard
in place of m in the last HBM term. An optimizer whose rule runs once per occurrence of
an id sends N_t gradients. A stack without an optimizer has no backward part and sends
4 + 4 D bytes per row.

The floor counts rows without tile padding, and no intermediate results: no exchange
buffers, no sorted ids, no gradients before they are summed. No program moves less over
HBM unless its tables fit in VMEM.
"""

import dataclasses
import math
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tpu_embedding.functional.steps import activation_shapes
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan

_ITEM_BYTES: Final = 4
"""Bytes of a row id and of a float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Floor:
    """Minimum traffic of the embedding part of a train step, in bytes per device.

    Attributes:
      forward_hbm_bytes: HBM bytes read and written by the lookup.
      backward_hbm_bytes: HBM bytes read and written by gradient and update.
      ici_bytes: bytes sent to other devices of the slice.
      dcn_bytes: bytes sent to other slices.
    """

    forward_hbm_bytes: float
    backward_hbm_bytes: float
    ici_bytes: float
    dcn_bytes: float

    @property
    def hbm_bytes(self) -> float:
        """HBM bytes read and written by both passes."""
        return self.forward_hbm_bytes + self.backward_hbm_bytes


def embedding_floor(plan: EmbeddingPlan, features: Any) -> Floor:
    """Returns the minimum traffic of the lookup and update of one batch.

    Args:
      plan: plan of the layer.
      features: batch of features or its shapes, as the layer takes them; global. Stacks
        that it does not use have no traffic, unless their rule moves every row.

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

    plan = plan.for_batch(features)
    leaves = plan.flatten(features)
    activations = plan.flatten_activations(jax.eval_shape(activations_of, features))
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
    num_devices = plan.num_shards
    input_bytes, activation_bytes = 0.0, 0.0
    ids_of_table: dict[int, float] = {}
    for i in plan.features_of(stack):
        if plan.features[i].table_index == 0:  # Its other tables read the same ids.
            of_leaf = jax.tree.leaves(leaves[i])
            input_bytes += sum(map(_num_bytes, of_leaf)) / num_devices
        activation_bytes += _num_bytes(activations[i]) / num_devices
        row_offset = plan.features[i].row_offset
        num_ids = _num_ids(leaves[i]) / num_devices
        ids_of_table[row_offset] = ids_of_table.get(row_offset, 0) + num_ids
    requested, owned, updated = 0.0, 0.0, 0.0
    for table in stack.tables:
        num_ids = ids_of_table.get(table.row_offset, 0)
        num_rows = table.config.max_rows
        requested += min(num_ids, num_rows)
        owned += min(stack.num_shards * num_ids, num_rows) / stack.num_shards
        updated += min(num_devices * num_ids, num_rows) / stack.num_shards

    # Gradients are float32, whatever the rows are stored in.
    gradient_bytes = _ITEM_BYTES * stack.dim
    row_bytes = stack.layout.row_bytes
    link_bytes = requested * (_ITEM_BYTES + row_bytes)
    backward, copy_bytes = 0.0, 0.0
    if stack.optimizer is not None:
        slot_bytes = sum(
            math.prod(slot.shape) * slot.dtype.itemsize for slot in stack.slots
        )
        moved = stack.rows_per_shard if stack.optimizer.rows == "every" else updated
        backward = activation_bytes + 2 * moved * (row_bytes + slot_bytes)
        sent = sum(ids_of_table.values()) if stack.keeps_duplicates else requested
        link_bytes += sent * gradient_bytes
        copy_bytes = (owned + updated) * gradient_bytes
    ici_bytes, dcn_bytes = 0.0, 0.0
    for num_bytes, axes in (
        (link_bytes, stack.shard_axes),
        (copy_bytes, stack.replica_axes),
    ):
        ici_share, dcn_share = _link_shares(plan.mesh, axes)
        ici_bytes += num_bytes * ici_share
        dcn_bytes += num_bytes * dcn_share
    return Floor(
        forward_hbm_bytes=input_bytes + owned * row_bytes + activation_bytes,
        backward_hbm_bytes=backward,
        ici_bytes=ici_bytes,
        dcn_bytes=dcn_bytes,
    )


def _link_shares(mesh: Mesh, axes: tuple[str, ...]) -> tuple[float, float]:
    """Returns the shares of evenly spread data that leave a device by ICI and DCN."""
    index = tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)
    group = np.ravel(mesh.devices[index])
    slices = [getattr(device, "slice_index", 0) for device in group]
    num_near = slices.count(slices[0])
    return (num_near - 1) / len(group), (len(group) - num_near) / len(group)


def _num_ids(ids: Any) -> int:
    """Returns the number of places for ids of a feature, padding included."""
    for name in ("ids", "values"):
        ids = getattr(ids, name, ids)
    return math.prod(ids.shape)


def _num_bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize

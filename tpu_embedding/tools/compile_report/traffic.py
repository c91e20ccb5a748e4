"""A model of the bytes that a step moves, per device.

The traffic is not measured. Given a batch's number of distinct rows, the model counts
what each backend must read and write of tables, slot variables, samples and ids:

    minimum        Each distinct row once: read for the lookup; read and written for the
                   update, in table and slot variables. Samples and ids once each.
    sparse_core    Like the minimum, with rows as wide as they are stored. For the
                   lookup, every SparseCore that asks for a row reads it. Ids are
                   sorted, and read by both operations.
    xla            As in the cost model of XLA's compiler: a tile of 8 lines, 4 KiB, for
                   each row of the minimum. Pooling reads rows a second time.
"""

import dataclasses
from typing import Any, Final

import jax

from tpu_embedding.plan import memory
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.packed_rows import LANE_BYTES, bank_lanes
from tpu_embedding.types import ids_of

_TILE_BYTES: Final = 4096
"""Size of a tile of 8 lines of 128 lanes."""

_SORT_PASSES: Final = 6
"""How often sorting by core and row reads and writes an id: three sorts of a pair."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Modelled bytes per device and step.

    Attributes:
      minimum: bytes that any implementation moves.
      sparse_core: bytes that XLA's embedding operations move.
      xla: bytes that XLA's gathers and scatters move.
    """

    minimum: int
    sparse_core: int
    xla: int


def model_traffic(
    stack: StackPlan, *, num_ids: int, num_samples: int, distinct_rows: int, cores: int
) -> Traffic:
    """Returns the modelled traffic of a training step, per device.

    Args:
      stack: stack of float32 tables, whose slot variables are as wide as its rows.
      num_ids: number of ids of the device's samples.
      num_samples: number of samples, summed over the stack's features.
      distinct_rows: number of distinct rows among the ids.
      cores: number of SparseCores per device.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10**6, dim=32, name="item")
      >>> plan = te.make_plan(te.FeatureConfig(table=table), optimizer="adagrad")
      >>> traffic = model_traffic(
      ...     plan.stacks[0], num_ids=512, num_samples=512, distinct_rows=512, cores=4)
      >>> round(traffic.sparse_core / traffic.minimum, 2)
      1.09
    """
    row, width = LANE_BYTES * stack.dim, LANE_BYTES * bank_lanes(stack.dim)
    id_bytes = 4 * num_ids
    num_arrays = 1 + len(stack.slots)
    samples = 2 * num_samples  # Activations are written, cotangents are read.
    updates = 2 * num_arrays * distinct_rows
    # A SparseCore asks for a row only once, even if several of its ids are equal.
    asked = max(distinct_rows, min(num_ids, cores * distinct_rows))
    buffers = 3 * 4 * num_ids * 3  # Row, sample and gain: written once, read twice.
    sorting = _SORT_PASSES * 2 * id_bytes
    tiles = _TILE_BYTES * (distinct_rows + updates)
    return Traffic(
        minimum=row * (distinct_rows + samples + updates) + id_bytes,
        sparse_core=width * (asked + samples + updates) + buffers + sorting,
        xla=tiles + row * (samples + num_ids) + sorting,
    )


def traffic_of_batch(plan: EmbeddingPlan, features: Any) -> dict[str, Traffic]:
    """Returns the modelled traffic of each trained float32 stack, by name.

    Assumes that all ids are different rows, up to the number of rows in the stack.

    Args:
      plan: plan of the layer.
      features: prepared features of the global batch, or their shapes.
    """
    plan = plan.for_batch(features)
    leaves = plan.flatten(features)
    result = {}
    for stack in plan.used_stacks:
        if stack.optimizer is None or stack.layout.narrow_dtype is not None:
            continue
        num_ids = num_samples = 0
        for i in plan.features_of(stack):
            ids = jax.tree.leaves(ids_of(leaves[i]))[0]
            batch_size = getattr(leaves[i], "batch_size", ids.shape[0])
            length = plan.features[i].config.max_sequence_length
            num_ids += ids.size // plan.num_shards
            num_samples += batch_size * max(1, length) // plan.num_shards
        result[stack.name] = model_traffic(
            stack,
            num_ids=num_ids,
            num_samples=num_samples,
            distinct_rows=min(num_ids, stack.num_rows),
            cores=plan.hardware.cores_per_device or 2,
        )
    return result


def format_traffic(rows: dict[str, Traffic]) -> str:
    """Returns a text table of the modelled traffic of named batches or stacks."""
    cells: list[tuple[str, ...]] = [("modelled bytes", "minimum", "sparse_core", "xla")]
    for name, traffic in rows.items():
        least, *others = dataclasses.astuple(traffic)
        sizes = (f"{memory.format_bytes(x)} ({x / least:.1f})" for x in others)
        cells.append((name, memory.format_bytes(least), *sizes))
    return memory.format_table(cells, num_left_aligned=1)

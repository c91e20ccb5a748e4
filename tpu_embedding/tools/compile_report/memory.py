"""The memory that a compiled program needs, and a model of the bytes that it moves.

The compiler reports the memory of one device. The traffic is not measured: the model
counts what each backend must read and write of tables, slot variables, samples and ids,
for a batch whose distinct rows are known:

    minimum        each distinct row once: read for the lookup; read and written for the
                   update, in table and slot variables. Samples and ids once each.
    sparse_core    as the minimum, with rows as wide as they are stored. A row is read
                   for the lookup by each SparseCore that asks for it. Ids are sorted,
                   and read by both operations.
    xla            as XLA's compiler charges it: a tile of 8 lines, 4 KiB, wherever the
                   minimum has a row. Pooling reads rows a second time.
"""

import dataclasses
from typing import Any, Final

import jax

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.plan import memory
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.packed_rows import LANE_BYTES, bank_lanes
from tpu_embedding.types import ids_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory that a program needs on one device, in bytes.

    Attributes:
      arguments: all inputs, with tile padding: tables, slot variables, dense state and
        the batch. 0 if the compiler rejected the program.
      aliased: inputs whose memory the results reuse.
      outputs: results that do not reuse the memory of an input.
      temporaries: see `temporary_bytes`.
      code: code of the program.
      required: total memory; None if the compiler rejected the program, whose error
        has the figure.
      capacity: the device's memory; None if unknown.
      fits: True if the compiler accepted the program, and `required` is at most the
        capacity.
    """

    arguments: int = 0
    aliased: int = 0
    outputs: int = 0
    temporaries: int = 0
    code: int = 0
    required: int | None
    capacity: int | None
    fits: bool


def temporary_bytes(sizes: Any) -> int:
    """Returns the bytes of temporaries that a program has at a time, at most.

    What SparseCores write on the way is not in XLA's `temp_size_in_bytes`, but in its
    peak: 0.12 MiB and 8,938 MiB for a gather of 16.7 million rows. The larger one
    counts.

    Args:
      sizes: result of `compiled.memory_analysis()`.
    """
    outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    peak = sizes.peak_memory_in_bytes - sizes.argument_size_in_bytes - outputs
    return max(sizes.temp_size_in_bytes, peak)


def memory_of(compiled: jax.stages.Compiled, hardware: HardwareInfo) -> Memory:
    """Returns the memory that a compiled program needs, and its fit."""
    sizes = compiled.memory_analysis()
    assert sizes is not None
    outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    temporaries = temporary_bytes(sizes)
    code = sizes.generated_code_size_in_bytes
    required = sizes.argument_size_in_bytes + outputs + temporaries + code
    capacity = _capacity(hardware)
    return Memory(
        arguments=sizes.argument_size_in_bytes,
        aliased=sizes.alias_size_in_bytes,
        outputs=outputs,
        temporaries=temporaries,
        code=code,
        required=required,
        capacity=capacity,
        fits=capacity is None or required <= capacity,
    )


def refused_memory(refusal: str, hardware: HardwareInfo) -> Memory | None:
    """Returns the memory of a program that the compiler rejected for its size.

    Args:
      refusal: first line of the compiler's error.
      hardware: hardware of the devices.

    Returns:
      Memory that does not fit; None if the error is about something else.
    """
    if "RESOURCE_EXHAUSTED" not in refusal or "HBM" not in refusal.upper():
        return None
    return Memory(required=None, capacity=_capacity(hardware), fits=False)


def _capacity(hardware: HardwareInfo) -> int | None:
    capacity = hardware.hbm_capacity_bytes
    return None if capacity is None else capacity // hardware.devices_per_chip


_TILE_BYTES: Final = 4096
"""A tile of 8 lines of 128 lanes."""

_SORT_PASSES: Final = 6
"""Times that sorting by core and row reads and writes an id: three sorts of a pair."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Modelled bytes per device and step.

    Attributes:
      minimum: what any implementation moves.
      sparse_core: what XLA's embedding operations move.
      xla: what XLA's gathers and scatters move.
    """

    minimum: int
    sparse_core: int
    xla: int


def model_traffic(
    stack: StackPlan, *, num_ids: int, num_samples: int, distinct_rows: int, cores: int
) -> Traffic:
    """Returns the modelled traffic of a training step, per device.

    Args:
      stack: tables of float32; its slot variables are as wide as its rows.
      num_ids: ids of the device's samples.
      num_samples: samples, over all features of the stack.
      distinct_rows: different rows among the ids.
      cores: SparseCores per device.

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
    # A SparseCore asks once for a row: some ids of its samples are equal.
    asked = min(num_ids, cores * distinct_rows)
    asked = max(distinct_rows, min(asked, num_ids))
    buffers = 3 * 4 * num_ids * 3  # Row, sample and gain: written once, read twice.
    return Traffic(
        minimum=row * (distinct_rows + samples + updates) + id_bytes,
        sparse_core=width * (asked + samples + updates)
        + buffers
        + _SORT_PASSES * 2 * id_bytes,
        xla=_TILE_BYTES * (distinct_rows + updates)
        + row * (samples + num_ids)
        + _SORT_PASSES * 2 * id_bytes,
    )


def traffic_of_batch(plan: EmbeddingPlan, features: Any) -> dict[str, Traffic]:
    """Returns the modelled traffic of each trained float32 stack, by its name.

    All ids count as different rows, as far as the stack has so many.

    Args:
      plan: plan of the layer.
      features: the batch's features, prepared, or their shapes. Global.
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
    """Returns a table of modelled traffic.

    Args:
      rows: name of a batch to its traffic.
    """
    cells: list[tuple[str, ...]] = [("modelled bytes", "minimum", "sparse_core", "xla")]
    for name, traffic in rows.items():
        cells.append(
            (
                name,
                memory.format_bytes(traffic.minimum),
                *(
                    f"{memory.format_bytes(x)} ({x / traffic.minimum:.1f})"
                    for x in (traffic.sparse_core, traffic.xla)
                ),
            )
        )
    return memory.format_table(cells, num_left_aligned=1)

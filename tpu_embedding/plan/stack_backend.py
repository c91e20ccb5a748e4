"""Chooses the backend of a stack: what looks its rows up, and what updates them."""

import dataclasses
from typing import Final, Literal

from jax.sharding import Mesh

from tpu_embedding.backends import BackendName, SparseCore
from tpu_embedding.hardware import MAX_SPARSE_CORE_BYTES, HardwareInfo
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.plan.memory import format_bytes
from tpu_embedding.plan.stacking import NamedTable
from tpu_embedding.rows.packed_rows import LANE_BYTES, round_up, sparse_core_lanes
from tpu_embedding.sparse_core.operations import unavailable_reason
from tpu_embedding.sparse_core.row_rule import RowRule, row_rule

_EMULATED_CORES: Final = 2
"""SparseCores per device, on devices without."""

_ROW_ALIGNMENT: Final = 128
"""The rows of a SparseCore are a multiple of it: whole tiles of a TPU, at any dim."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackBackend:
    """What looks up and updates the rows of a stack, and why.

    Attributes:
      lookups: backend of the lookup.
      updates: backend of the update; `"sparse_core"` only if that of the lookup is.
      max_ids: the user's limit, see `te.SparseCore`; None: as the batch needs.
      cores: SparseCores per device that own rows; 1 with XLA's gathers and scatters.
      reason: why the backends were chosen.
    """

    lookups: BackendName = "xla"
    updates: BackendName = "xla"
    max_ids: int | None = None
    cores: int = 1
    reason: str = dataclasses.field(default="", compare=False)


def choose_backend(
    wanted: Literal["xla"] | SparseCore,
    table: NamedTable,
    num_rows: int,
    mesh: Mesh,
    hardware: HardwareInfo,
) -> StackBackend:
    """Returns the backend of a stack.

    Args:
      wanted: what the user asks for.
      table: a table of the stack.
      num_rows: rows of the stack.
      mesh: devices of the plan.
      hardware: their kind.
    """
    if wanted == "xla":
        return StackBackend(reason="backend='xla'")
    problem = _lookup_problem(wanted, table, num_rows, mesh, hardware)
    if problem:
        return StackBackend(reason=problem)
    problem = _update_problem(table.optimizer, table.config.dim)
    return StackBackend(
        lookups="sparse_core",
        updates="xla" if problem else "sparse_core",
        max_ids=wanted.max_ids,
        cores=_cores_of(wanted, hardware),
        reason="backend='sparse_core'" + (f"; update: {problem}" if problem else ""),
    )


def rows_of_shard(num_rows: int, num_shards: int, cores: int) -> int:
    """Returns the rows of a shard, those that fill up SparseCores included.

    Args:
      num_rows: rows of the stack.
      num_shards: shards of the stack.
      cores: SparseCores per shard that own rows, or 1.
    """
    if cores == 1:
        return -(-num_rows // num_shards)
    return cores * round_up(-(-num_rows // (num_shards * cores)), _ROW_ALIGNMENT)


def rule_on_sparse_cores(optimizer: RowOptimizer, dim: int) -> RowRule:
    """Returns the rule of a stack whose updates SparseCores run."""
    rule = row_rule(optimizer, dim, sparse_core_lanes(dim))
    assert isinstance(rule, RowRule), rule
    return rule


def _lookup_problem(
    wanted: SparseCore,
    table: NamedTable,
    num_rows: int,
    mesh: Mesh,
    hardware: HardwareInfo,
) -> str | None:
    """Returns why SparseCores cannot look up the rows of a table; None: they can."""
    config = table.config
    reason = unavailable_reason(hardware, mesh.size)
    if reason is not None:
        return reason
    if hardware.is_tpu and wanted.cores not in (None, hardware.cores_per_device):
        return (
            f"te.SparseCore(cores={wanted.cores}), but a device of {hardware.name} has "
            f"{hardware.cores_per_device}"
        )
    if config.dtype_name != "float32":
        return f"SparseCores look up float32 rows, not {config.dtype_name}"
    if table.num_shards != mesh.size or table.shard_axes != mesh.axis_names:
        return "the rows are not split over all devices"
    if config.quantization_config is not None:
        return "SparseCores do not quantize rows"
    rows = rows_of_shard(num_rows, mesh.size, _cores_of(wanted, hardware))
    num_bytes = LANE_BYTES * rows * sparse_core_lanes(config.dim)
    if hardware.is_tpu and num_bytes > MAX_SPARSE_CORE_BYTES:
        return (
            f"the table takes {format_bytes(num_bytes)} per device, more than the "
            f"{format_bytes(MAX_SPARSE_CORE_BYTES)} of an operation"
        )
    return None


def _update_problem(optimizer: RowOptimizer | None, dim: int) -> str | None:
    """Returns why SparseCores cannot update rows; None: they can."""
    if optimizer is None:
        return "no optimizer"
    rule = row_rule(optimizer, dim, sparse_core_lanes(dim))
    return rule if isinstance(rule, str) else None


def _cores_of(wanted: SparseCore, hardware: HardwareInfo) -> int:
    return hardware.cores_per_device or wanted.cores or _EMULATED_CORES

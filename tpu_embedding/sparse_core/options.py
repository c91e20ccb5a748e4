"""The options of the backend, and its choice: which stacks SparseCores can serve."""

import dataclasses
from typing import Final

from jax.sharding import Mesh

from tpu_embedding.field_checks import (
    broken_rules,
    convert_ints,
    int_rule,
    optional,
    raise_all,
)
from tpu_embedding.hardware import MAX_SPARSE_CORE_BYTES, HardwareInfo
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.plan.backend import Backend, BackendOptions
from tpu_embedding.plan.memory import format_bytes
from tpu_embedding.plan.stacking import NamedTable
from tpu_embedding.rows.packed_rows import LANE_BYTES, bank_lanes
from tpu_embedding.sparse_core.backend import SparseCoreBackend, rows_of_shard
from tpu_embedding.sparse_core.operations import unavailable_reason
from tpu_embedding.sparse_core.row_rule import row_rule

_EMULATED_CORES: Final = 2
"""SparseCores per device, on devices without."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseCore(BackendOptions):
    """XLA's embedding operations on the SparseCores of a TPU, with options.

    TensorFlow's TPUEmbedding and jax-tpu-embedding train with these operations. They
    look rows up, pool and exchange them, and apply the optimizer. Here they get raw ids
    within the step. A step whose ids are too many for an operation runs XLA's gathers
    and scatters on the same rows, so no id is lost.

    Attributes:
      max_ids: ids, and different rows among them, that the samples of one SparseCore
        may look up in the rows of another, a multiple of 8; less if the memory of a
        SparseCore bounds it. It changes speed, never results. None: the mean and some
        standard deviations, and room for hot rows.
      cores: SparseCores per device, only for devices without: CPUs and GPUs run the
        operations in plain JAX, for tests. None: those of the device, or 2.

    Raises:
      ValueError: if an option is out of range.

    Example:
      >>> SparseCore(max_ids=1024).max_ids
      1024
    """

    max_ids: int | None = None
    cores: int | None = None

    def __post_init__(self):
        convert_ints(self, "max_ids", "cores")
        rules = {
            "max_ids": optional(int_rule(8)),
            "cores": optional(int_rule(2)),
        }
        raise_all(broken_rules(self, rules))
        if self.max_ids is not None and self.max_ids % 8:
            raise ValueError(
                f"SparseCore.max_ids must be a multiple of 8, got {self.max_ids}."
            )

    def choose(
        self, table: NamedTable, num_rows: int, mesh: Mesh, hardware: HardwareInfo
    ) -> Backend:
        """Returns the backend of a stack, for `make_plan`; see `BackendOptions`."""
        cores = hardware.cores_per_device or self.cores or _EMULATED_CORES
        problem = (
            unavailable_reason(hardware, mesh.size)
            or self._cores_problem(hardware)
            or _table_problem(table, num_rows, cores, mesh, hardware)
        )
        if problem:
            return Backend(reason=problem)
        problem = _update_problem(table.optimizer, table.config.dim)
        reason = "backend='sparse_core'" + (f"; update: {problem}" if problem else "")
        return SparseCoreBackend(
            updates="xla" if problem else "sparse_core",
            max_ids=self.max_ids,
            cores=cores,
            reason=reason,
        )

    def _cores_problem(self, hardware: HardwareInfo) -> str:
        """Returns why a device does not have the cores; empty if it has."""
        if not hardware.is_tpu or self.cores in (None, hardware.cores_per_device):
            return ""
        return (
            f"te.SparseCore(cores={self.cores}), but a device of {hardware.name} has "
            f"{hardware.cores_per_device}"
        )


def _table_problem(
    table: NamedTable, num_rows: int, cores: int, mesh: Mesh, hardware: HardwareInfo
) -> str:
    """Returns why SparseCores cannot look up a table; empty if they can."""
    config = table.config
    if config.dtype_name != "float32":
        return f"SparseCores look up float32 rows, not {config.dtype_name}"
    if table.num_shards != mesh.size or table.shard_axes != mesh.axis_names:
        return "the rows are not split over all devices"
    if config.quantization_config is not None:
        return "SparseCores do not quantize rows"
    rows = rows_of_shard(-(-num_rows // mesh.size), cores)
    num_bytes = LANE_BYTES * rows * bank_lanes(config.dim)
    if hardware.is_tpu and num_bytes > MAX_SPARSE_CORE_BYTES:
        return (
            f"the table takes {format_bytes(num_bytes)} per device, more than the "
            f"{format_bytes(MAX_SPARSE_CORE_BYTES)} of an operation"
        )
    return ""


def _update_problem(optimizer: RowOptimizer | None, dim: int) -> str:
    """Returns why SparseCores cannot update rows; empty if they can."""
    if optimizer is None:
        return "no optimizer"
    rule = row_rule(optimizer, dim, bank_lanes(dim))
    return rule if isinstance(rule, str) else ""

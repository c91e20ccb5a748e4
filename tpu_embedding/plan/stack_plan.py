"""Stacks and tables of a plan: which array holds a table, and which shard a row."""

import dataclasses

import jax
from jax.sharding import PartitionSpec

from tpu_embedding.config import QuantizationConfig, TableConfig
from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.initializers import RowInitializer, row_initializer
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.plan.backend import Backend
from tpu_embedding.plan.capacity import RoundSize, round_size
from tpu_embedding.plan.forms import Gathers, Updates
from tpu_embedding.rows.packed_rows import RowLayout
from tpu_embedding.vocabularies import Vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePlan:
    """A table in its stack: rows `row_offset` and on.

    Attributes:
      name: name of the table.
      config: the table as the user declared it.
      row_offset: first row in the stack.
      num_rows: rows in the stack, spare ones included.
      placement_reason: the setting that chose the placement of its stack.
    """

    name: str
    config: TableConfig
    row_offset: int
    num_rows: int
    placement_reason: str = dataclasses.field(compare=False)

    @property
    def row_initializer(self) -> RowInitializer | None:
        """Computes its initial values row by row; None: all rows at once."""
        return row_initializer(self.config.initializer, self.config.dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPlan:
    """Tables that share one array, and the shards that own its rows.

    Row `q` of the stack (a table's row plus the table's `row_offset`) belongs to shard
    `q % num_shards` ("mod" placement) and is row `q // num_shards` there. So hot
    neighbouring rows spread out, and small tables start at different shards. Neither
    rows nor shards have to divide the other.

    Devices that differ along the `replica_axes` only hold the same shard. Their copies
    are equal bit by bit, before and after every update.

    Attributes:
      name: key of its array in the tables' dict.
      tables: in the order of their rows.
      sample_axes: all mesh axes; samples are split over the devices in this order.
      shard_axes: mesh axes that rows are split over; none if every device has all rows.
      num_shards: devices along the `shard_axes`.
      num_replicas: devices along the `replica_axes`: copies of each row.
      layout: packing of the rows of one shard.
      quantization: applied to looked-up rows.
      capacity: the user's maximum of ids per destination and round, or None.
      gathers: form of the gathers that bring rows to samples.
      updates: form in which gradients are summed and applied.
      backend: what looks rows up, and what updates them.
      hardware: hardware of the devices.
      optimizer: None; `TrainedStackPlan` has one.
      slots: row shape and dtype of each slot variable.
    """

    name: str
    tables: tuple[TablePlan, ...]
    sample_axes: tuple[str, ...]
    shard_axes: tuple[str, ...]
    num_shards: int
    num_replicas: int
    layout: RowLayout
    quantization: QuantizationConfig | None
    capacity: int | None
    gathers: Gathers
    updates: Updates
    backend: Backend
    hardware: HardwareInfo
    optimizer: RowOptimizer | None
    slots: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The mesh axes along which shards are copied: those that split no rows."""
        return tuple(axis for axis in self.sample_axes if axis not in self.shard_axes)

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.num_shards * self.num_replicas

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of its first table; all of them are of one kind."""
        return self.tables[0].config.vocabulary

    @property
    def dim(self) -> int:
        """Columns of its tables."""
        return self.layout.dim

    @property
    def rows_per_shard(self) -> int:
        """Logical rows that each shard holds, the last ones possibly unused."""
        return self.layout.num_rows

    @property
    def num_rows(self) -> int:
        """Rows of all its tables."""
        last = self.tables[-1]
        return last.row_offset + last.num_rows

    @property
    def rows_spec(self) -> PartitionSpec:
        """Partition of the rows of the table and of its slot variables."""
        # XLA names the sharding of its results so; another name compiles anew.
        return (
            PartitionSpec(self.shard_axes) if self.num_shards > 1 else PartitionSpec()
        )

    @property
    def sends_ids(self) -> bool:
        """True if a lookup sends ids to the owners of their rows, each row once.

        False if each device reads its own rows straight from its table, or the backend
        brings rows to samples.
        """
        reads_own_rows = self.num_shards == 1 and self.capacity is None
        return not (reads_own_rows or self.backend.replaces_lookup)

    @property
    def keeps_duplicates(self) -> bool:
        """True if each occurrence of an id travels separately."""
        return self.optimizer is not None and self.optimizer.sees_occurrences

    def round_size(self, max_unique_ids: int) -> RoundSize:
        """Returns the buffer sizes of a round, for at most this many ids per shard."""
        if self.keeps_duplicates:
            # Rounds are cut between rows, so one row has to fit with all it has.
            num_ids = max(1, max_unique_ids)
            size = round_size(num_ids, self.num_shards, num_ids, capacity=num_ids)
            unique_rows = min(size.buffer_size, self.rows_per_shard)
            return dataclasses.replace(size, unique_rows=unique_rows)
        return round_size(
            max_unique_ids,
            self.num_shards,
            self.rows_per_shard,
            capacity=self.capacity,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedStackPlan(StackPlan):
    """A stack whose tables an optimizer trains.

    Attributes:
      optimizer: the rule that updates all its tables, and how it is applied.
    """

    optimizer: RowOptimizer

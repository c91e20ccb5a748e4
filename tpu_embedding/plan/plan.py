"""The plan: every fact that is fixed before a step.

It is frozen and hashable, so it can be static under `jit`. `StackPlan` answers the main
questions: which array holds a table, and which shard holds a row.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_embedding.argument_checks import ArgumentType
from tpu_embedding.config import QuantizationConfig, TableConfig
from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.initializers import RowInitializer, row_initializer
from tpu_embedding.optimizers.row_optimizer import RowOptimizer, Touched
from tpu_embedding.plan.backend import Backend
from tpu_embedding.plan.capacity import Gathers, RoundSize, Updates, round_size
from tpu_embedding.plan.features import (
    FeatureNest,
    FeaturePlan,
    InputPlan,
    find_tables,
    flatten_config,
    plan_features,
    process_shards,
)
from tpu_embedding.plan.memory import rows_bytes
from tpu_embedding.plan.report import describe, summarize
from tpu_embedding.rows.packed_rows import LANE_BYTES, RowLayout
from tpu_embedding.rows.row_storage import RowStorage
from tpu_embedding.types import AxisSize
from tpu_embedding.vocabularies import Vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePlan:
    """A table and its range of rows in the stack.

    Attributes:
      num_rows: rows in the stack, including spare rows.
      placement_reason: setting that chose the placement.
    """

    name: str
    config: TableConfig
    row_offset: int
    num_rows: int
    # Not compared, so plans that differ only in reasons share compiled programs.
    placement_reason: str = dataclasses.field(compare=False)

    @property
    def row_initializer(self) -> RowInitializer | None:
        """Initializer, if it works row by row. None if it needs the whole shape."""
        return row_initializer(self.config.initializer, self.config.dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPlan:
    """Tables that share one array, and the shards that own its rows.

    Stack row `q` (a table row plus `row_offset`) belongs to shard `q % num_shards` and
    is row `q // num_shards` there. So hot neighboring rows spread out, and `num_shards`
    need not divide the row count.

    Devices that differ only along the `replica_axes` hold the same shard. Their copies
    are bitwise equal before and after every update.

    Attributes:
      name: key in the dict of tables.
      tables: in row order.
      sample_axes: all mesh axes. Samples are split over the devices in this order.
      shard_axes: mesh axes that split rows. Empty if every device has all rows.
      rows_per_shard: rows that each shard owns. The last ones may be unused.
      layout: packing of the rows that a device holds, which may be fewer than
        `rows_per_shard`.
      slots: row shape and dtype of each slot variable.
      array_names: keys of vocabulary arrays in the dict of tables.
      vocabulary_bytes: memory for vocabulary arrays on each device.
    """

    name: str
    tables: tuple[TablePlan, ...]
    sample_axes: tuple[str, ...]
    shard_axes: tuple[str, ...]
    num_shards: int
    num_replicas: int
    rows_per_shard: int
    layout: RowLayout
    quantization: QuantizationConfig | None
    capacity: int | None
    backend: Backend
    hardware: HardwareInfo
    storage: RowStorage
    trained_by: RowOptimizer | None
    slots: tuple[jax.ShapeDtypeStruct, ...]
    array_names: tuple[str, ...] = ()
    vocabulary_bytes: int = 0
    # Not compared; see `TablePlan.placement_reason`.
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    # Cached, because every trace reads these facts many times.

    @functools.cached_property
    def is_trained(self) -> bool:
        return self.trained_by is not None

    @functools.cached_property
    def optimizer(self) -> RowOptimizer:
        """Rule that updates the stack's tables. The stack must be trained."""
        if self.trained_by is None:
            names = [table.name for table in self.tables]
            raise ValueError(
                f"{self.name} has no optimizer. Pass te.make_plan(optimizer=...) or "
                f"TableConfig(optimizer=...) to train its tables {names}."
            )
        return self.trained_by

    @functools.cached_property
    def replica_axes(self) -> tuple[str, ...]:
        """Mesh axes along which shards are copied."""
        return tuple(axis for axis in self.sample_axes if axis not in self.shard_axes)

    @functools.cached_property
    def num_devices(self) -> int:
        return self.num_shards * self.num_replicas

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary of the first table. All tables have the same kind."""
        return self.tables[0].config.vocabulary

    @functools.cached_property
    def dim(self) -> int:
        return self.layout.dim

    @functools.cached_property
    def num_rows(self) -> int:
        """Rows in all tables, including the unused rows between them."""
        last = self.tables[-1]
        return last.row_offset + last.num_rows

    @functools.cached_property
    def rows_spec(self) -> PartitionSpec:
        # XLA writes the sharding of its results in this form. If inputs had a different
        # form of the same sharding, programs would be compiled again.
        return (
            PartitionSpec(self.shard_axes) if self.num_shards > 1 else PartitionSpec()
        )

    def first_local_row(self, row: Any, shard: Any, bank: Any) -> Any:
        """Finds the first row in a shard's bank that is at or after a stack row.

        The result is a local row. Works on ints and arrays.
        """
        # A bank's rows are contiguous. In the stack, they have the same remainder
        # modulo `num_ranges`.
        num_ranges = self.num_shards * self.layout.banks
        remainder = bank * self.num_shards + shard
        first_in_bank = (row + (num_ranges - 1 - remainder)) // num_ranges
        return first_in_bank + bank * self.layout.rows_per_bank

    @functools.cached_property
    def array_bytes(self) -> tuple[int, ...]:
        """Bytes per device for rows, then each slot variable, padding included."""
        layout = self.layout
        arrays = [(layout, LANE_BYTES)]
        arrays += [(layout.slot_layout(x), x.dtype.itemsize) for x in self.slots]
        return tuple(rows_bytes(x, self.hardware, itemsize) for x, itemsize in arrays)

    @functools.cached_property
    def sends_ids(self) -> bool:
        """True if a lookup sends unique ids to the devices that own their rows."""
        # A single shard reads its own table, unless the user set a capacity for rounds.
        reads_own_rows = self.num_shards == 1 and self.capacity is None
        return not (reads_own_rows or self.backend.replaces_lookup)

    @functools.cached_property
    def gathers(self) -> Gathers:
        # XLA:TPU compiles and starts one large gather faster than many small gathers,
        # and fuses neither with the sum.
        if self.hardware.is_tpu:
            return "whole"
        # XLA:CPU would write the rows of a shared gather to memory, and copy them from
        # there to the features. Rows of an exchange buffer are in the cache, so they
        # can be gathered together.
        reads_table = self.num_shards == 1
        return "by_feature" if self.hardware.name == "cpu" and reads_table else "fused"

    @functools.cached_property
    def updates(self) -> Updates:
        # Each block is a round, so blocks suit only rules with little cost per round,
        # and must not override a capacity that the user set.
        is_one_cpu = self.hardware.name == "cpu" and self.num_devices == 1
        may_choose_rounds = self.capacity is None and not self.backend.replaces_lookup
        is_cheap_per_round = (
            self.is_trained
            and self.optimizer.driver == Touched()
            and not self.optimizer.takes_totals
        )
        uses_blocks = is_one_cpu and may_choose_rounds and is_cheap_per_round
        return "blocks" if uses_blocks else "whole"

    @functools.cached_property
    def keeps_duplicates(self) -> bool:
        """True if repeated ids travel separately."""
        return self.is_trained and self.optimizer.sees_occurrences

    def round_size(self, max_unique_ids: int) -> RoundSize:
        """Sizes the buffers for one round, given a bound on a shard's unique ids."""
        if self.keeps_duplicates:
            # Rounds end between rows, so all occurrences of a row must fit in one
            # round.
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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingPlan(FeatureNest):
    """Everything about an embedding layer that is fixed before the step.

    It is a static pytree, so you can pass it to functions under `jax.jit`.

    Attributes:
      stacks: the stacked tables.
      features: one plan per feature, in leaf order.
      feature_tree: structure of your nest of features.
      mesh: devices for tables, batches and the dense model.
      hardware: hardware of the mesh devices.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=1000, dim=16, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> plan.stacks[0].num_rows
      1000
    """

    stacks: tuple[StackPlan, ...]
    mesh: Mesh
    hardware: HardwareInfo

    @functools.cached_property
    def num_shards(self) -> int:
        """Devices in the mesh. Each looks up an equal share of the samples."""
        return self.mesh.size

    @functools.cached_property
    def sample_axes(self) -> tuple[str, ...]:
        """All mesh axes. Samples are split over the devices in this order."""
        return tuple(self.mesh.axis_names)

    @functools.cached_property
    def sample_spec(self) -> PartitionSpec:
        """Partition of an array's first axis over all devices, in sample order."""
        return PartitionSpec(self.sample_axes)

    def rows_sharding(self, stack: StackPlan) -> NamedSharding:
        """Builds the sharding for a stacked table and its slot variables."""
        return NamedSharding(self.mesh, stack.rows_spec)

    @functools.cached_property
    def batch_sharding(self) -> NamedSharding:
        """Sharding for batches, activations and cotangents, along their first axis."""
        return NamedSharding(self.mesh, self.sample_spec)

    def sharding_of_samples(self, shape: Sequence[AxisSize]) -> NamedSharding:
        """Chooses the sharding for an array of samples, such as an activation.

        The array is replicated if the device count doesn't divide its first axis.
        Pass the global `shape`.
        """
        divides = len(shape) > 0 and shape[0] % self.num_shards == 0
        return self.batch_sharding if divides else self.replicated

    def process_samples(self, batch_size: int) -> range:
        """Finds the samples in a global batch that this process has to load.

        These are the samples on its own devices. However, every process loads all
        samples if the device count doesn't divide the batch. The same is true if some
        process's samples are not consecutive, or if device counts are unequal.

        Args:
          batch_size: samples in the global batch.

        Example:
          >>> import tpu_embedding as te
          >>> table = te.TableConfig(vocabulary_size=1000, dim=16, name="movie")
          >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
          >>> plan.process_samples(64)  # one process has them all
          range(0, 64)
        """
        shards = self._process_shards
        if shards is None or batch_size % self.num_shards:
            return range(batch_size)
        size = batch_size // self.num_shards
        held = shards[jax.process_index()]
        return range(held.start * size, held.stop * size)

    @functools.cached_property
    def num_process_parts(self) -> int | None:
        """Number of batch parts that different processes load.

        None means that each process loads the global batch, because some process has
        scattered devices in the mesh, or because device counts are unequal. See
        `process_samples`.
        """
        return None if self._process_shards is None else len(self._process_shards)

    @functools.cached_property
    def _process_shards(self) -> dict[int, range] | None:
        devices = self.mesh.devices.flat
        return process_shards([device.process_index for device in devices])

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """Sharding for arrays that every device holds in full."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def compiler_options(self) -> dict[str, str]:
        """XLA options for your train step's `jax.jit(..., compiler_options=)`."""
        return dict(self.hardware.compiler_options)

    @functools.cached_property
    def table_bytes_per_device(self) -> int:
        """Table memory on each device, including padding and vocabularies."""
        return sum(
            stack.array_bytes[0]
            + stack.vocabulary_bytes
            + stack.storage.bytes_per_device
            for stack in self.stacks
        )

    @functools.cached_property
    def slot_bytes_per_device(self) -> int:
        """Slot variable memory on each device, including padding."""
        return sum(sum(stack.array_bytes[1:]) for stack in self.stacks)

    @functools.cached_property
    def trained_stacks(self) -> tuple[StackPlan, ...]:
        """The stacks that have an optimizer."""
        return tuple(stack for stack in self.stacks if stack.is_trained)

    @functools.cached_property
    def used_stacks(self) -> tuple[StackPlan, ...]:
        """The stacks that at least one feature uses."""
        used = {feature.stack_index for feature in self.features}
        return tuple(s for i, s in enumerate(self.stacks) if i in used)

    def features_of(self, stack: StackPlan) -> tuple[int, ...]:
        """Lists the features that look up in a stack, by index."""
        return tuple(
            i
            for i, feature in enumerate(self.features)
            if self.stacks[feature.stack_index] is stack
        )

    def with_features(self, feature_config: Any) -> "EmbeddingPlan":
        """Plans other features on the same tables.

        Both plans read the same arrays. For example, you can evaluate with features
        that the model was not trained with.

        Args:
          feature_config: any nest of `FeatureConfig` whose tables are in this plan.
            Stacks that no feature uses are not read.

        Raises:
          ValueError: if this plan lacks a table, or if the features are inconsistent.

        Example:
          >>> import tpu_embedding as te
          >>> table = te.TableConfig(vocabulary_size=1000, dim=16, name="movie")
          >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
          >>> candidates = te.FeatureConfig(table=table, max_sequence_length=8)
          >>> [f.name for f in plan.with_features({"shown": candidates}).features]
          ['shown']
        """
        features, tree = flatten_config(feature_config)
        table_names = find_tables(features, self.stacks)
        return dataclasses.replace(
            self,
            features=plan_features(features, table_names, self.stacks),
            feature_tree=tree,
        )

    def for_loaders(self) -> InputPlan:
        """Extracts what `prepare_features` needs, for loader processes.

        You can pickle the result, unlike the plan, which holds devices.

        Example:
          >>> import pickle
          >>> import tpu_embedding as te
          >>> table = te.TableConfig(vocabulary_size=1000, dim=16, name="movie")
          >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
          >>> received = pickle.loads(pickle.dumps(plan.for_loaders()))
          >>> batch = te.inputs.prepare_features({"watched": [3, 5]}, received)
          >>> batch["watched"].tolist()
          [3, 5]
        """

        # Pickle rejects lambdas, and loaders need neither initializers nor optimizers.
        def without_functions(feature: FeaturePlan) -> FeaturePlan:
            table = dataclasses.replace(feature.table, initializer=None, optimizer=None)
            config = dataclasses.replace(feature.config, table=table)
            return dataclasses.replace(feature, config=config)

        return InputPlan(
            features=tuple(map(without_functions, self.features)),
            feature_tree=self.feature_tree,
            num_shards=self.num_shards,
            num_process_parts=self.num_process_parts,
        )

    def __reduce__(self):
        raise TypeError(
            "An EmbeddingPlan holds devices and cannot be pickled. Send "
            "plan.for_loaders() to loader processes and pass it to prepare_features."
        )

    # A plan can't change, and devices can't be copied, so copied models share it.
    def __copy__(self) -> "EmbeddingPlan":
        return self

    def __deepcopy__(self, memo: Any) -> "EmbeddingPlan":
        return self

    def __repr__(self) -> str:
        return f"EmbeddingPlan({summarize(self)}; print(plan) shows it all)"

    def __str__(self) -> str:
        return describe(self)


AnyPlan = EmbeddingPlan | InputPlan
"""A plan, or the part of it that loaders need."""


PLAN: Final = ArgumentType(
    EmbeddingPlan, "an EmbeddingPlan, from te.make_plan or the plan of a layer"
)
"""The argument `plan` of public functions."""

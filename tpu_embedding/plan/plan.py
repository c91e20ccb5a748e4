"""The plan: every fact that is fixed before a step, made once from config and mesh.

Stages of the lookup and the update receive arrays and the plan; nothing else is
threaded through them. A plan is frozen and hashable, so it can be static under `jit`,
and prints itself as a table.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tpu_embedding.config import (
    FeatureConfig,
    QuantizationConfig,
    TableConfig,
)
from tpu_embedding.hardware import (
    GIBIBYTE,
    HardwareInfo,
    hardware_of_device,
    num_slices_of,
)
from tpu_embedding.optimizers.analysis.row_local import check_row_local
from tpu_embedding.optimizers.analysis.slots import slot_row_shapes
from tpu_embedding.optimizers.names import optimizer_problem
from tpu_embedding.optimizers.row_optimizer import RowOptimizer, TableOptimizer
from tpu_embedding.plan import memory, stacking
from tpu_embedding.plan.backends import KernelChoice, choose_backend
from tpu_embedding.plan.capacity import (
    EXCHANGE_KINDS,
    KERNEL_LANE_ALIGNMENT_MIN_IDS,
    LANE_ALIGNMENT_MIN_IDS,
    ExchangeKind,
    RoundSize,
    round_size,
)
from tpu_embedding.rows.kernels.backend import KernelBackend
from tpu_embedding.rows.packed_rows import RowLayout
from tpu_embedding.types import PADDING_ROW_ID


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablePlan:
    """A table's place in its stack: rows `row_offset` and on."""

    name: str
    config: TableConfig
    row_offset: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackPlan:
    """Tables that are laid in one array, and how its rows are dealt to the shards.

    Row `q` of the stack (a table's row plus the table's `row_offset`) belongs to shard
    `q % num_shards` ("mod" placement) and is row `q // num_shards` there. So hot
    neighbours spread out, small tables start at different shards, and no number of
    rows or shards has to divide another.

    Attributes:
      name: key of its array in the tables' dict.
      tables: in the order of their rows.
      num_shards: devices of the mesh.
      layout: packing of the rows of one shard.
      optimizer: update rule of all its tables; None where nothing is trained.
      quantization: applied to looked-up rows.
      capacity: the user's ids per destination and round, or None.
      exchange: how rows travel between shards; None: by the size of the buffers.
      slots: row shape and dtype of each slot variable of the optimizer's state.
    """

    name: str
    tables: tuple[TablePlan, ...]
    num_shards: int
    layout: RowLayout
    optimizer: RowOptimizer | None
    quantization: QuantizationConfig | None
    capacity: int | None
    exchange: ExchangeKind | None
    slots: tuple[jax.ShapeDtypeStruct, ...]

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
        return last.row_offset + last.config.vocabulary_size

    @property
    def keeps_duplicates(self) -> bool:
        """Whether each occurrence of an id travels for itself."""
        return self.optimizer is not None and self.optimizer.duplicates != "sum"

    def round_size(self, max_unique_ids: int) -> RoundSize:
        """Returns the sizes of a round for so many ids per shard."""
        rows_per_line = self.layout.buffer_layout(1).rows_per_line
        lane_alignment_min_ids = (
            LANE_ALIGNMENT_MIN_IDS
            if self.layout.runner is None
            else KERNEL_LANE_ALIGNMENT_MIN_IDS
        )
        if self.keeps_duplicates:
            # Rounds are cut between rows, so one row has to fit with all it has.
            num_ids = max(1, max_unique_ids)
            size = round_size(
                num_ids,
                self.num_shards,
                num_ids,
                capacity=num_ids,
                rows_per_line=rows_per_line,
                lane_alignment_min_ids=lane_alignment_min_ids,
            )
            unique_rows = min(size.received_rows, self.rows_per_shard)
            return dataclasses.replace(size, unique_rows=unique_rows)
        return round_size(
            max_unique_ids,
            self.num_shards,
            self.rows_per_shard,
            capacity=self.capacity,
            kind="padded" if self.num_shards == 1 else self.exchange,
            rows_per_line=rows_per_line,
            lane_alignment_min_ids=lane_alignment_min_ids,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturePlan:
    """A feature and where its table lies: stack `stack_index`, from `row_offset`."""

    name: str
    config: FeatureConfig
    stack_index: int
    row_offset: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingPlan:
    """Everything about an embedding layer that is fixed before the step.

    Attributes:
      stacks: the stacked tables.
      features: in the order of the leaves of the user's nest.
      feature_tree: the nest.
      mesh: devices; tables and batches are sharded over all its axes.
      hardware: of these devices.

    Example:
      >>> table = TableConfig(vocabulary_size=1000, dim=16, name="movie")
      >>> plan = make_plan({"watched": FeatureConfig(table=table)})
      >>> plan.stacks[0].num_rows
      1000
    """

    stacks: tuple[StackPlan, ...]
    features: tuple[FeaturePlan, ...]
    feature_tree: Any
    mesh: Mesh
    hardware: HardwareInfo

    @property
    def num_shards(self) -> int:
        """Devices of the mesh, each of which holds one shard."""
        return self.mesh.size

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Mesh axes that tables and batches are sharded over: all of them."""
        return tuple(self.mesh.axis_names)

    @property
    def shard_spec(self) -> PartitionSpec:
        """Partition of the first axis over every device."""
        return PartitionSpec(self.axis_names)

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of tables, slot variables and batches."""
        return NamedSharding(self.mesh, self.shard_spec)

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of what every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def compiler_options(self) -> dict[str, str]:
        """XLA options for `jax.jit(..., compiler_options=)` of a train step."""
        return dict(self.hardware.compiler_options)

    @property
    def table_bytes_per_device(self) -> int:
        """Memory that the tables take on each device, padding included."""
        return sum(memory.rows_bytes(s.layout, self.hardware, 4) for s in self.stacks)

    @property
    def slot_bytes_per_device(self) -> int:
        """Memory that the slot variables take on each device, padding included."""
        return sum(self.slot_bytes_of(stack) for stack in self.stacks)

    def slot_bytes_of(self, stack: StackPlan) -> int:
        """Memory that the slot variables of one stack take on each device."""
        return sum(
            memory.rows_bytes(
                self.slot_layout(stack, slot), self.hardware, slot.dtype.itemsize
            )
            for slot in stack.slots
        )

    def slot_layout(self, stack: StackPlan, slot: jax.ShapeDtypeStruct) -> RowLayout:
        """Returns how the rows of a slot variable are packed."""
        return stack.layout.with_row_shape(slot.shape)

    def features_of(self, stack: StackPlan) -> tuple[int, ...]:
        """Returns the indices of the features that look up in a stack."""
        return tuple(
            i
            for i, feature in enumerate(self.features)
            if self.stacks[feature.stack_index] is stack
        )

    def is_for(self, feature_config: Any) -> bool:
        """Whether the plan was made from this nest of features."""
        leaves, tree = jax.tree.flatten(feature_config)
        return tree == self.feature_tree and leaves == [
            feature.config for feature in self.features
        ]

    def flatten(self, nest: Any, what: str = "features") -> list[Any]:
        """Returns the leaves of a nest that is shaped like `feature_config`.

        Raises:
          ValueError: if the nest has another structure.
        """
        try:
            return self.feature_tree.flatten_up_to(nest)
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{what} must have the structure of feature_config.\n"
                f"  feature_config: {self.feature_tree}\n"
                f"  {what}: {jax.tree.structure(nest)}\n{error}"
            ) from None

    def __str__(self) -> str:
        return _describe(self)


def make_plan(
    feature_config: Any,
    mesh: Mesh | None = None,
    *,
    optimizer: TableOptimizer | None = None,
    capacity: int | None = None,
    exchange: ExchangeKind | None = None,
    kernels: KernelChoice | None = None,
    hardware: HardwareInfo | None = None,
) -> EmbeddingPlan:
    """Makes the plan of an embedding layer.

    Args:
      feature_config: any nest (dict, list, tuple, ...) of `FeatureConfig`.
      mesh: devices with any axes, all of which share tables and batch; None means all
        devices of this process along one axis, `"shard"`.
      optimizer: an optax transformation for the tables that name none themselves; None
        means that those are not trained.
      capacity: ids per destination and round of the exchange, at most; changes speed,
        never results. None: the mean and some standard deviations.
      exchange: how rows travel between devices; changes speed, never results.
        `"padded"`: in parts of equal size. `"ragged"`: one after the other, by XLA's
        ragged all-to-all, within a slice; on CPU and GPU by a slow equivalent. None:
        on TPUs of one slice, ragged where padded parts would be a quarter longer and no
        capacity is given; else padded.
      kernels: what reads and updates rows of 8, 16, 32, 64 or a multiple of 128
        elements; changes speed, and results by no more than rounding. `"sparse_core"`:
        kernels that reach each row for itself, and update it in one go.
        `"interpreter"`: the same kernels, on any device, with the `hardware` of a TPU;
        slow, for tests. Both need jax 0.12. `"none"`: XLA, which moves whole lines, and
        writes what each step makes of them to memory. None: `"sparse_core"` where there
        are SparseCores and that jax; else `"none"`.
      hardware: None means that of the mesh's devices.

    Returns:
      The plan.

    Raises:
      ValueError: if the configuration contradicts itself; the message says where.
    """
    if mesh is None:
        mesh = Mesh(np.asarray(jax.devices()), ("shard",))
    _check_mesh(mesh)
    is_int = isinstance(capacity, int) and not isinstance(capacity, bool)
    if capacity is not None and not (is_int and capacity >= 1):
        raise ValueError(
            f"capacity must be an int of at least 1 or None, got {capacity!r}."
        )
    if exchange is not None and exchange not in EXCHANGE_KINDS:
        raise ValueError(
            f"exchange must be one of {EXCHANGE_KINDS} or None, got {exchange!r}."
        )
    problem = optimizer_problem("optimizer", optimizer)
    if problem is not None:
        raise ValueError(f"{problem}.")
    if hardware is None:
        hardware = hardware_of_device(mesh.devices.flat[0])
    num_slices = num_slices_of(mesh)
    if exchange == "ragged" and num_slices > 1:
        raise ValueError(
            "exchange must be 'padded' or None on a mesh of several slices, got "
            f"'ragged' on {num_slices}."
        )
    if mesh.devices.flat[0].platform != "tpu" or num_slices > 1:
        exchange = exchange or "padded"
    runner = choose_backend(kernels, mesh.devices.flat[0], hardware)
    configs, tree, paths = _flatten_config(feature_config)
    names = stacking.name_features(list(zip(paths, configs, strict=True)))
    tables = stacking.name_tables(configs, optimizer)
    stacks = tuple(
        _plan_stack(
            f"stack_{i}", group, mesh.size, capacity, exchange, runner, hardware
        )
        for i, group in enumerate(stacking.stack_tables(tables))
    )
    places = {
        table.name: (i, table.row_offset)
        for i, stack in enumerate(stacks)
        for table in stack.tables
    }
    return EmbeddingPlan(
        stacks=stacks,
        features=tuple(
            FeaturePlan(
                name=name,
                config=config,
                stack_index=places[table.name][0],
                row_offset=places[table.name][1],
            )
            for name, config, table in zip(names, configs, tables, strict=True)
        ),
        feature_tree=tree,
        mesh=mesh,
        hardware=hardware,
    )


def _check_mesh(mesh: Mesh) -> None:
    explicit = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    ]
    if explicit:
        raise ValueError(
            f"mesh axes must have type Auto, got Explicit for {explicit}. Make the "
            "mesh with jax.sharding.Mesh(devices, axis_names), or give jax.make_mesh "
            "axis_types=(jax.sharding.AxisType.Auto,) * number_of_axes."
        )


def _flatten_config(
    feature_config: Any,
) -> tuple[list[FeatureConfig], Any, list[str]]:
    with_paths, tree = jax.tree_util.tree_flatten_with_path(feature_config)
    if not with_paths:
        raise ValueError(
            "feature_config must hold at least one FeatureConfig, got "
            f"{feature_config!r}."
        )
    paths, configs = [], []
    for path, leaf in with_paths:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "feature"
        if not isinstance(leaf, FeatureConfig):
            raise ValueError(
                f"feature_config must be a nest of FeatureConfig, got {leaf!r} at "
                f"{name!r}."
            )
        paths.append(name)
        configs.append(leaf)
    return configs, tree, paths


def _plan_stack(
    name: str,
    tables: list[stacking.NamedTable],
    num_shards: int,
    capacity: int | None,
    exchange: ExchangeKind | None,
    runner: KernelBackend | None,
    hardware: HardwareInfo,
) -> StackPlan:
    placed, row_offset = [], 0
    for table in tables:
        placed.append(
            TablePlan(name=table.name, config=table.config, row_offset=row_offset)
        )
        row_offset += table.config.vocabulary_size
    rows_per_shard = -(-row_offset // num_shards)
    if rows_per_shard * num_shards >= PADDING_ROW_ID:
        raise ValueError(
            f"TableConfig.vocabulary_size of table {tables[0].name!r} is "
            f"{row_offset}, too near 2**31 for {num_shards} shards; cut it in two."
        )
    first = tables[0]
    slots: list[jax.ShapeDtypeStruct] = []
    if first.optimizer is not None:
        slots = _slots_of_tables(first.optimizer, tables)
    return StackPlan(
        name=name,
        tables=tuple(placed),
        num_shards=num_shards,
        layout=RowLayout(
            num_rows=rows_per_shard,
            row_shape=(first.config.dim,),
            line_lanes=hardware.line_lanes,
            kernels=runner,
            num_spare_rows=0 if runner is None else 1,
        ),
        optimizer=first.optimizer,
        quantization=first.config.quantization_config,
        capacity=capacity,
        exchange=exchange,
        slots=tuple(slots),
    )


def _describe(plan: EmbeddingPlan) -> str:
    head = ("stack", "table", "rows", "dim", "first row", "rows/shard", "packing")
    rows: list[tuple[str, ...]] = [(*head, "bytes/device")]
    for stack in plan.stacks:
        layout = stack.layout
        table_bytes = memory.rows_bytes(layout, plan.hardware, 4)
        for table in stack.tables:
            vocabulary_size = f"{table.config.vocabulary_size:,}"
            cells = (vocabulary_size, str(stack.dim), f"{table.row_offset:,}")
            rows.append((stack.name, table.name, *cells, "", "", ""))
        packing = f"{layout.rows_per_line} x {stack.dim} of {layout.lanes}"
        if layout.runner is not None:
            packing += ", kernels"
        cells = (f"{stack.num_rows:,}", str(stack.dim), "", f"{stack.rows_per_shard:,}")
        size = memory.format_bytes(table_bytes)
        size += f" + {memory.format_bytes(plan.slot_bytes_of(stack))} slots"
        rows.append((stack.name, "(whole stack)", *cells, packing, size))
    total = plan.table_bytes_per_device + plan.slot_bytes_per_device
    summary = (
        f"{plan.num_shards} shards on {plan.hardware.name}; per device: tables "
        f"{memory.format_bytes(plan.table_bytes_per_device)}, slots "
        f"{memory.format_bytes(plan.slot_bytes_per_device)}"
    )
    if plan.hardware.hbm_capacity_bytes is not None:
        hbm = plan.hardware.hbm_capacity_bytes / plan.hardware.devices_per_chip
        summary += f", {100 * total / hbm:.1f} % of {hbm / GIBIBYTE:.0f} GiB HBM"
    return memory.format_table(rows, num_left_aligned=2) + "\n" + summary


def _slots_of_tables(
    optimizer: RowOptimizer, tables: list[stacking.NamedTable]
) -> list[jax.ShapeDtypeStruct]:
    """Returns the slot variables of an optimizer; refuses one that mixes rows."""
    dim = tables[0].config.dim
    try:
        check_row_local(optimizer, dim)
        slots = jax.tree.leaves(slot_row_shapes(optimizer, dim))
    except ValueError as error:
        names = [table.name for table in tables]
        raise type(error)(f"{error} (The optimizer of tables {names}.)") from error
    if optimizer.keeps_gradient:
        slots.append(jax.ShapeDtypeStruct((dim,), jnp.float32))
        slots.append(jax.ShapeDtypeStruct((), jnp.int32))
    return slots

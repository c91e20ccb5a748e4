"""Makes the plan from configuration, mesh and hardware, and rejects contradictions."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_embedding.argument_checks import is_int
from tpu_embedding.config import TableConfig
from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.optimizers.probe import probe_rule
from tpu_embedding.optimizers.resolve import optimizer_problem
from tpu_embedding.optimizers.row_optimizer import KeptGradient, TableOptimizer
from tpu_embedding.placement import ChoosePlacement, Placement
from tpu_embedding.plan import stacking
from tpu_embedding.plan.backend import (
    Backend,
    BackendName,
    BackendOptions,
    backend_options,
)
from tpu_embedding.plan.capacity import choose_gathers, choose_updates
from tpu_embedding.plan.features import flatten_config, plan_features
from tpu_embedding.plan.mesh_options import (
    choose_hardware,
    choose_mesh,
)
from tpu_embedding.plan.plan import (
    EmbeddingPlan,
    StackPlan,
    TablePlan,
    TrainedStackPlan,
)
from tpu_embedding.plan.stacking import place_tables
from tpu_embedding.rows.narrow_rows import NARROW_DTYPES, NarrowDtype
from tpu_embedding.rows.packed_rows import (
    RowLayout,
    StackContents,
    TableRange,
)
from tpu_embedding.types import PADDING_ROW_ID


def make_plan(
    feature_config: Any,
    mesh: Mesh | None = None,
    *,
    optimizer: TableOptimizer | None = None,
    capacity: int | None = None,
    placement: Placement | ChoosePlacement | None = None,
    hardware: HardwareInfo | None = None,
    backend: BackendName | BackendOptions = "xla",
) -> EmbeddingPlan:
    """Makes the plan of an embedding layer.

    Args:
      feature_config: any nest (dict, list, tuple, ...) of `FeatureConfig`.
      mesh: devices with any axes, of type `Auto` or `Explicit`. None means the mesh of
        `jax.set_mesh`, or else all devices along one axis, `"shard"`.
      optimizer: an optax transformation, a name or a Keras optimizer, as
        `TableConfig` takes, for the tables that name none themselves; None means that
        those are not trained.
      capacity: ids per destination and round of the exchange, at most; changes speed,
        never results. None: the mean and some standard deviations.
      placement: where the rows of tables live that set no `TableConfig.placement`. It
        changes memory and traffic, never results. `te.Sharded()`, the default, splits
        rows over all devices. `te.Sharded(axes=...)` splits them over some mesh axes,
        and copies them along the rest. `te.Replicated()` copies them to every device. A
        function of a table's name and number of rows chooses per table.
      hardware: None means that of the mesh's devices.
      backend: what looks up and updates rows; it changes speed, never results.
        `"xla"`: gathers and scatters. `"sparse_core"` or `te.SparseCore(...)`: XLA's
        embedding operations for SparseCores, for each stack that they can serve;
        `print(plan)` says which, and why. `tpu-embedding doctor` compares both on the
        devices that are there.

    Returns:
      The plan.

    Raises:
      TypeError: if an option has a wrong type.
      ValueError: if the configuration contradicts itself; the message says where.
    """
    mesh = choose_mesh(mesh)
    hardware = choose_hardware(hardware, mesh)
    _check_options(capacity, optimizer)
    capacity = None if capacity is None else int(capacity)
    options = backend_options(backend)
    features, tree = flatten_config(feature_config)
    configs = list(features.values())
    tables = stacking.name_tables([config.table for config in configs], optimizer)
    placed = place_tables(tables, placement, mesh)
    stacks = tuple(
        _plan_stack(f"stack_{i}", group, mesh, capacity, hardware, options)
        for i, group in enumerate(stacking.stack_tables(placed))
    )
    return EmbeddingPlan(
        stacks=stacks,
        features=plan_features(features, [table.name for table in tables], stacks),
        feature_tree=tree,
        mesh=mesh,
        hardware=hardware,
    )


def _check_options(
    capacity: int | None,
    optimizer: TableOptimizer | None,
) -> None:
    if capacity is not None and not (is_int(capacity) and capacity >= 1):
        raise ValueError(
            f"capacity must be an int of at least 1 or None, got {capacity!r}."
        )
    problem = optimizer_problem("optimizer", optimizer)
    if problem is not None:
        raise ValueError(f"{problem}.")


def _plan_stack(
    name: str,
    tables: list[stacking.NamedTable],
    mesh: Mesh,
    capacity: int | None,
    hardware: HardwareInfo,
    options: BackendOptions,
) -> StackPlan:
    first = tables[0]
    num_rows = sum(table.num_rows for table in tables)
    backend = options.choose(first, num_rows, mesh, hardware)
    placed = _tables_of_stack(tables)
    facts: dict[str, Any] = dict(
        name=name,
        tables=placed,
        shard_axes=first.shard_axes,
        sample_axes=tuple(mesh.axis_names),
        num_shards=first.num_shards,
        num_replicas=mesh.size // first.num_shards,
        layout=_layout_of_stack(placed, first.num_shards, hardware, backend),
        quantization=first.config.quantization_config,
        capacity=capacity,
        gathers=choose_gathers(hardware),
        updates=choose_updates(
            hardware,
            first.optimizer,
            num_devices=mesh.size,
            capacity=capacity,
            backend=backend,
        ),
        backend=backend,
        hardware=hardware,
        slots=_slots_of(first),
    )
    if first.optimizer is None:
        return StackPlan(**facts, optimizer=None)
    return TrainedStackPlan(**facts, optimizer=first.optimizer)


def _tables_of_stack(tables: list[stacking.NamedTable]) -> tuple[TablePlan, ...]:
    """Returns plans of tables that lie one after the other."""
    ends = itertools.accumulate(table.num_rows for table in tables)
    return tuple(
        TablePlan(
            name=table.name,
            config=table.config,
            row_offset=end - table.num_rows,
            num_rows=table.num_rows,
            placement_reason=table.placement_reason,
        )
        for table, end in zip(tables, ends, strict=True)
    )


def _layout_of_stack(
    tables: tuple[TablePlan, ...],
    num_shards: int,
    hardware: HardwareInfo,
    backend: Backend,
) -> RowLayout:
    """Returns the layout of a shard of tables that lie one after the other."""
    first, last = tables[0], tables[-1]
    num_rows = last.row_offset + last.num_rows
    ranges = tuple(TableRange(t.name, t.row_offset, t.num_rows) for t in tables)
    layout = backend.arrange(
        RowLayout(
            num_rows=-(-num_rows // num_shards),
            row_shape=(first.config.dim,),
            line_lanes=hardware.line_lanes,
            contents=StackContents(ranges, num_shards),
            narrow_dtype=_narrow_dtype(first.config),
        )
    )
    if layout.num_rows * num_shards >= PADDING_ROW_ID:
        raise ValueError(
            f"TableConfig.vocabulary_size of table {first.name!r} is "
            f"{num_rows}, too near 2**31 for {num_shards} shards; cut it in two."
        )
    return layout


def _narrow_dtype(config: TableConfig) -> NarrowDtype | None:
    name = config.dtype_name
    return next((dtype for dtype in NARROW_DTYPES if dtype == name), None)


def _slots_of(table: stacking.NamedTable) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the slot variables of a table's optimizer."""
    optimizer, dim = table.optimizer, table.config.dim
    if optimizer is None:
        return ()
    slots = [slot.row for slot in probe_rule(optimizer, dim).slots]
    if isinstance(optimizer.driver, KeptGradient):
        slots.append(jax.ShapeDtypeStruct((dim,), jnp.float32))
        slots.append(jax.ShapeDtypeStruct((), jnp.int32))
    return tuple(slots)

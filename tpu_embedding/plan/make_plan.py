"""Makes the plan from configuration, mesh and hardware, and rejects contradictions.

Tables are placed on the mesh and grouped into stacks, one array each. Tables with equal
dim, dtype, quantization, optimizer, placement and kind of vocabulary share one dedup,
one exchange and one gather. Within a stack, tables are sorted by name and begin at
different shards.

`TableConfig.placement` takes precedence over `make_plan(placement=...)`.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_embedding.argument_checks import invalid, is_int, raise_all
from tpu_embedding.config import ChoosePlacement, Placement, Sharded, TableConfig
from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.optimizers.probe import probe_rule
from tpu_embedding.optimizers.resolve import optimizer_problems, resolve_optimizer
from tpu_embedding.optimizers.row_optimizer import (
    KeptGradient,
    RowOptimizer,
    TableOptimizer,
)
from tpu_embedding.plan.backend import (
    Backend,
    BackendName,
    BackendOptions,
    backend_options,
)
from tpu_embedding.plan.capacity import choose_gathers, choose_updates
from tpu_embedding.plan.features import flatten_config, plan_features
from tpu_embedding.plan.mesh_options import choose_hardware, choose_mesh
from tpu_embedding.plan.plan import (
    EmbeddingPlan,
    StackPlan,
    TablePlan,
)
from tpu_embedding.rows.narrow_rows import NARROW_DTYPES
from tpu_embedding.rows.packed_rows import RowLayout, StackContents, TableRange
from tpu_embedding.rows.row_storage import RowStorage
from tpu_embedding.types import PADDING_ROW_ID

_MAX_ROWS_OF_STACK: Final = PADDING_ROW_ID - 2**20
"""Maximum rows of a stack.

An int32 identifies each row of all shards. Dividing rows among shards rounds up, so the
margin leaves room for one more row on each of 2**20 shards."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedTable:
    """A table with its name, its optimizer and its placement.

    Attributes:
      name: the user's name for the table, or a generated one.
      config: the table as the user declared it.
      optimizer: the table's own optimizer, or else the shared one. None if the table is
        not trained.
      shard_axes: mesh axes that split its rows, in the order of the mesh. Empty if
        every device has all rows.
      num_shards: devices along the `shard_axes`.
      placement_reason: the setting that chose the axes.
      storage: where the placement stores its rows.
      num_rows: rows in its stack, including spare rows.
    """

    name: str
    config: TableConfig
    optimizer: RowOptimizer | None
    shard_axes: tuple[str, ...] = ()
    num_shards: int = 1
    placement_reason: str = ""
    storage: RowStorage = RowStorage()
    num_rows: int = 0


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
      mesh: devices, with any axes of type `Auto` or `Explicit`. Defaults to the mesh
        of `jax.set_mesh`, or else to `te.device_mesh()`.
      optimizer: optimizer for tables that don't set `TableConfig.optimizer`: an optax
        transformation, a name or a Keras optimizer. Without it, these tables are not
        trained.
      capacity: maximum number of ids per destination and round of the exchange. It
        changes speed, never results. Defaults to the mean plus four standard
        deviations.
      placement: where to store the rows of tables that don't set
        `TableConfig.placement`. It changes memory and traffic, never results.
        `te.Sharded()`, the default, splits rows over all devices.
        `te.Sharded(axes=...)` splits them over some mesh axes and copies them along the
        rest. `te.Replicated()` copies them to every device. A function of a table's
        name and number of rows chooses per table.
      hardware: hardware to plan for. Defaults to the kind of the mesh's devices.
      backend: how rows are looked up and updated. It changes speed, never results.
        `"xla"` uses gathers and scatters. `"sparse_core"` or `te.SparseCore(...)` uses
        XLA's embedding operations for SparseCores, for each stack that they support;
        `print(plan)` shows which, and why. `tpu-embedding doctor` compares the two
        backends on your devices.

    Raises:
      TypeError: if an option has the wrong type.
      ValueError: if the configuration is inconsistent. The message says where.

    Example:
      >>> import tpu_embedding as te
      >>> movie = te.TableConfig(vocabulary_size=1000, dim=16, name="movie")
      >>> features = {"watched": te.FeatureConfig(table=movie)}
      >>> plan = te.make_plan(features, te.device_mesh(), optimizer="adagrad")
      >>> [table.name for table in plan.stacks[0].tables]
      ['movie']
    """
    mesh = choose_mesh(mesh)
    hardware = choose_hardware(hardware, mesh)
    if capacity is not None and not (is_int(capacity) and capacity >= 1):
        raise invalid("capacity", "be an int of at least 1 or None", capacity)
    capacity = None if capacity is None else int(capacity)
    raise_all(optimizer_problems("optimizer", optimizer))
    options = backend_options(backend)
    features, tree = flatten_config(feature_config)
    configs = list(features.values())
    tables = name_tables([config.table for config in configs], optimizer)
    placed = _place_tables(tables, placement, mesh)
    stacks = tuple(
        _plan_stack(f"stack_{i}", group, mesh, capacity, hardware, options)
        for i, group in enumerate(stack_tables(placed))
    )
    return EmbeddingPlan(
        stacks=stacks,
        features=plan_features(features, [table.name for table in tables], stacks),
        feature_tree=tree,
        mesh=mesh,
        hardware=hardware,
    )


def name_tables(
    tables: Sequence[TableConfig],
    optimizer: TableOptimizer | None,
) -> list[NamedTable]:
    """Returns the table of each lookup. Lookups in one table get equal entries.

    Raises:
      ValueError: if two different tables have the same name.
    """
    by_name: dict[str, TableConfig] = {}
    unnamed: list[TableConfig] = []
    named = []
    for config in tables:
        if config.name is None:
            if not any(config is other for other in unnamed):
                unnamed.append(config)
            index = next(i for i, other in enumerate(unnamed) if other is config)
            name = f"table_{index}"
        else:
            name = config.name
        other = by_name.setdefault(name, config)
        if other != config or (other.name is None) != (config.name is None):
            fields = [field.name for field in dataclasses.fields(config)]
            pairs = [(x, getattr(other, x), getattr(config, x)) for x in fields]
            unequal = "; ".join(f"{x} {a!r} and {b!r}" for x, a, b in pairs if a != b)
            rule = f"be unique, unlike two tables with different settings: {unequal}"
            fix = "Rename one of them, or use one TableConfig to share a table."
            raise invalid("TableConfig.name", rule, name, fix)
        resolved = _resolved_optimizer(name, config, optimizer)
        if resolved is None and config.optimizer is None:
            # The layer's `optax.set_to_zero()` keeps it fixed, unlike no optimizer.
            config = dataclasses.replace(config, optimizer=optimizer)
        named.append(NamedTable(name=name, config=config, optimizer=resolved))
    return named


def _resolved_optimizer(
    name: str, config: TableConfig, optimizer: TableOptimizer | None
) -> RowOptimizer | None:
    """Returns the table's own optimizer, or else the shared one."""
    own_or_shared = config.optimizer or optimizer
    resolved = resolve_optimizer(own_or_shared, name, config.dim)
    if config.dtype_name == "int8" and resolved is not None:
        source = "its own" if config.optimizer else "the layer's"
        raise invalid(
            "TableConfig.dtype",
            f"not be int8 for table {name!r}, which {source} optimizer trains",
            config.dtype_name,
            "int8 rows are for lookup only. Use bfloat16 to train this table. To keep "
            "it fixed, set its TableConfig.optimizer to optax.set_to_zero().",
        )
    return resolved


def _place_tables(
    tables: Sequence[NamedTable],
    placement: Placement | ChoosePlacement | None,
    mesh: Mesh,
) -> list[NamedTable]:
    """Returns each table once, with the mesh axes that split its rows.

    `placement` is for tables that don't set their own. If it is a function, it chooses
    by a table's name and number of rows. By default, rows are split over the whole
    mesh.

    Raises:
      TypeError: if `placement` is not a placement or a function that returns one.
      ValueError: if a placement names an axis that the mesh doesn't have.
    """
    if isinstance(placement, Placement):
        placement.shard_axes(mesh.axis_names, "placement")
    elif placement is not None and (
        isinstance(placement, type) or not callable(placement)
    ):
        raise _wrong_type("placement must be", placement)
    return [
        _place(table, placement, mesh)
        for table in {table.name: table for table in tables}.values()
    ]


def _place(
    table: NamedTable, placement: Placement | ChoosePlacement | None, mesh: Mesh
) -> NamedTable:
    """Returns a table with its own placement, or else the shared one."""
    reason = "make_plan(placement=...)"
    if table.config.placement is not None:
        chosen, reason = table.config.placement, "TableConfig.placement"
    elif placement is None:
        chosen, reason = Sharded(), "the default"
    elif isinstance(placement, Placement):
        chosen = placement
    else:
        chosen = placement(table.name, table.config.max_rows)
        if not isinstance(chosen, Placement):
            raise _wrong_type(f"placement of table {table.name!r} must return", chosen)
    axes = chosen.shard_axes(mesh.axis_names, f"{reason} of table {table.name!r}")
    num_shards = math.prod(mesh.shape[axis] for axis in axes)
    vocabulary, optimizer = table.config.vocabulary, table.optimizer
    problem = optimizer is not None and vocabulary.optimizer_problem(optimizer)
    if problem:
        raise ValueError(f"TableConfig.optimizer of table {table.name!r} {problem}")
    return dataclasses.replace(
        table,
        shard_axes=axes,
        num_shards=num_shards,
        placement_reason=reason,
        storage=chosen.storage(table.config.max_rows),
        num_rows=vocabulary.rows_over(num_shards),
    )


def _wrong_type(rule: str, value: Any) -> TypeError:
    return TypeError(
        f"{rule} a te.Sharded or te.Replicated, got {value!r}. Or choose per table: "
        "placement=lambda name, num_rows: te.Replicated() if num_rows <= 10_000 "
        "else te.Sharded()."
    )


def stack_tables(tables: Sequence[NamedTable]) -> list[list[NamedTable]]:
    """Groups tables into stacks.

    An int32 must identify each row of a stack, so a group with too many rows is split
    into several stacks. Each table goes into the first stack that has room.
    """
    groups: dict[Any, list[list[NamedTable]]] = {}
    for table in sorted(tables, key=lambda table: table.name):
        config = table.config
        key = (
            config.dim,
            config.dtype_name,
            config.quantization_config,
            table.optimizer,
            table.shard_axes,
            type(config.vocabulary),
            config.vocabulary.stacking_key,
            type(table.storage),
            table.storage.stacking_key,
        )
        stacks = groups.setdefault(key, [])
        for stack in stacks:
            unused = len(stack) * _MAX_OWNERS  # At most, between the tables.
            num_rows = sum(t.num_rows for t in (*stack, table)) + unused
            if num_rows <= _MAX_ROWS_OF_STACK:
                stack.append(table)
                break
        else:
            stacks.append([table])
    return [stack for stacks in groups.values() for stack in stacks]


_MAX_OWNERS: Final = 8192
"""Maximum owners that a stack's tables are spread over. It bounds the unused rows."""

_GOLDEN_RATIO: Final = (math.sqrt(5) - 1) / 2


def _row_offsets(tables: Sequence[NamedTable], num_owners: int) -> list[int]:
    """Returns the first row of each table in its stack.

    Row `q` of a stack belongs to owner `q % num_owners`, and low ids are often the most
    frequent, so tables begin at different owners. Multiples of the golden ratio, modulo
    1, are far apart for any number of tables. The stride is the next integer that
    reaches all owners. Up to `num_owners - 1` rows before a table stay unused.

    Owners are shards, or the SparseCores of all shards.

    Example:
      >>> table = TableConfig(vocabulary_size=100, dim=2)
      >>> table = NamedTable(name="t", config=table, optimizer=None, num_rows=100)
      >>> _row_offsets([table] * 4, num_owners=8)
      [0, 101, 202, 303]
    """
    stride = round(_GOLDEN_RATIO * num_owners)
    while math.gcd(stride, num_owners) > 1:
        stride += 1
    offsets, end = [], 0
    for i, table in enumerate(tables):
        unused = 0
        if table.config.vocabulary.ids_are_rows:  # Others spread ids themselves.
            unused = (i * stride - end) % num_owners
        offsets.append(end + unused)
        end += unused + table.num_rows
    return offsets


def _plan_stack(
    name: str,
    tables: list[NamedTable],
    mesh: Mesh,
    capacity: int | None,
    hardware: HardwareInfo,
    options: BackendOptions,
) -> StackPlan:
    """Returns the plan of tables that share one array."""
    first = tables[0]
    num_owners = first.num_shards * max(1, hardware.cores_per_device)
    num_owners = min(num_owners, _MAX_OWNERS)
    offsets = _row_offsets(tables, num_owners)
    table_plans = tuple(
        TablePlan(
            name=table.name,
            config=table.config,
            row_offset=offset,
            num_rows=table.num_rows,
            placement_reason=table.placement_reason,
        )
        for table, offset in zip(tables, offsets, strict=True)
    )
    num_rows = offsets[-1] + tables[-1].num_rows
    backend = options.choose(first, num_rows, mesh, hardware)
    storages = [table.storage for table in tables]
    storage = functools.reduce(lambda joined, x: joined.joined(x), storages)
    for table in tables:
        if problem := table.storage.problem(table, backend):
            raise ValueError(f"{problem} (table {table.name!r}).")
    return StackPlan(
        name=name,
        tables=table_plans,
        shard_axes=first.shard_axes,
        sample_axes=tuple(mesh.axis_names),
        num_shards=first.num_shards,
        num_replicas=mesh.size // first.num_shards,
        layout=_layout(table_plans, first.num_shards, hardware, backend),
        quantization=first.config.quantization_config,
        capacity=capacity,
        gathers=choose_gathers(hardware, first.num_shards),
        updates=choose_updates(
            hardware,
            first.optimizer,
            num_devices=mesh.size,
            capacity=capacity,
            backend=backend,
        ),
        backend=backend,
        hardware=hardware,
        storage=storage,
        trained_by=first.optimizer,
        slots=_slot_rows(first),
    )


def _layout(
    tables: tuple[TablePlan, ...],
    num_shards: int,
    hardware: HardwareInfo,
    backend: Backend,
) -> RowLayout:
    """Returns the layout of a shard of tables that share one array."""
    config, last = tables[0].config, tables[-1]
    num_rows = last.row_offset + last.num_rows
    ranges = tuple(TableRange(t.name, t.row_offset, t.num_rows) for t in tables)
    name = config.dtype_name
    layout = backend.arrange(
        RowLayout(
            num_rows=-(-num_rows // num_shards),
            row_shape=(config.dim,),
            tile_lanes=hardware.line_lanes,
            contents=StackContents(ranges, num_shards),
            narrow_dtype=next((d for d in NARROW_DTYPES if d == name), None),
        )
    )
    if layout.num_rows * num_shards >= PADDING_ROW_ID:
        raise ValueError(
            f"TableConfig.vocabulary_size of table {tables[0].name!r} is "
            f"{num_rows}, which exceeds the limit of 2**31 rows in {num_shards} "
            "shards; split the table in two."
        )
    return layout


def _slot_rows(table: NamedTable) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the row shape and dtype of each slot variable of a table."""
    optimizer, dim = table.optimizer, table.config.dim
    if optimizer is None:
        return ()
    slots = [slot.row for slot in probe_rule(optimizer, dim).slots]
    if isinstance(optimizer.driver, KeptGradient):
        slots.append(jax.ShapeDtypeStruct((dim,), jnp.float32))
        slots.append(jax.ShapeDtypeStruct((), jnp.int32))
    return tuple(slots)

"""Makes the plan from configuration, mesh and hardware, and rejects contradictions.

Tables are named, placed on the mesh, and grouped into stacks. Each stack is one array,
and its tables share one dedup, one exchange and one gather; see
docs/concepts/stacking.md.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

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
from tpu_embedding.plan.features import flatten_config, plan_features
from tpu_embedding.plan.mesh_options import choose_hardware, choose_mesh
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan, TablePlan
from tpu_embedding.rows.narrow_rows import NARROW_DTYPES
from tpu_embedding.rows.packed_rows import RowLayout, StackContents, TableRange
from tpu_embedding.rows.row_storage import RowStorage
from tpu_embedding.types import PADDING_ROW_ID

# The rows of all shards are numbered in int32. Dividing rows among shards rounds up, so
# the margin leaves room for one more row on each of 2**20 shards.
_MAX_ROWS_OF_STACK: Final = PADDING_ROW_ID - 2**20


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
    """Plans an embedding layer: which device stores which rows, and how they travel.

    Args:
      feature_config: any nest (dict, list, tuple, ...) of `FeatureConfig`.
      mesh: devices, with any axes of type `Auto` or `Explicit`. Defaults to the mesh
        from `jax.set_mesh`, or else to `te.device_mesh()`.
      optimizer: optimizer for tables that don't set `TableConfig.optimizer`: an optax
        transformation, a name or a Keras optimizer. Without it, these tables are not
        trained.
      capacity: maximum ids per destination and exchange round. It changes speed, never
        results. Defaults to the mean plus four standard deviations.
      placement: where to store rows if you don't set `TableConfig.placement`. It
        changes memory and traffic, never results. `te.Sharded()`, the default, splits
        rows over all devices. `te.Sharded(axes=...)` splits rows over the given mesh
        axes and copies them along the rest. `te.Replicated()` copies rows to every
        device. Pass a function `(table name, number of rows)` to choose per table.
      hardware: hardware to plan for. Defaults to the kind of devices in the mesh.
      backend: how rows are looked up and updated. It changes speed, never results.
        `"xla"` uses gathers and scatters. `"sparse_core"` or `te.SparseCore(...)` uses
        XLA's embedding operations for SparseCores, for each stack that they support.
        `print(plan)` shows each stack's backend and the reason. `tpu-embedding doctor`
        compares the two backends on your devices.

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
    configs = [feature.table for feature in features.values()]
    names = _name_tables(configs)
    if isinstance(placement, Placement):
        # Find unknown axes even if every table has its own placement.
        placement.shard_axes(mesh.axis_names, "placement")
    # A class is callable, so `te.Sharded` without parentheses would pass as a function.
    elif isinstance(placement, type) or not (placement is None or callable(placement)):
        raise _wrong_type("placement must be", placement)
    tables = [
        _place_table(name, config, optimizer, placement, mesh)
        for name, config in dict(zip(names, configs, strict=True)).items()
    ]
    stacks = tuple(
        _plan_stack(f"stack_{i}", group, mesh, capacity, hardware, options)
        for i, group in enumerate(_group_tables(tables))
    )
    return EmbeddingPlan(
        stacks=stacks,
        features=plan_features(features, names, stacks),
        feature_tree=tree,
        mesh=mesh,
        hardware=hardware,
    )


def _name_tables(configs: Sequence[TableConfig]) -> list[str]:
    """Names each feature's table. Two tables can't share a name."""
    by_name: dict[str, TableConfig] = {}
    names_of_unnamed: dict[int, str] = {}
    names = []
    for config in configs:
        name = config.name
        if name is None:
            # Equal unnamed configs are different tables, unless they are one object.
            next_name = f"table_{len(names_of_unnamed)}"
            name = names_of_unnamed.setdefault(id(config), next_name)
        other = by_name.setdefault(name, config)
        # A user may have given a table the name that an unnamed table gets here.
        if other != config or (other.name is None) != (config.name is None):
            fields = [field.name for field in dataclasses.fields(config)]
            pairs = [(x, getattr(other, x), getattr(config, x)) for x in fields]
            unequal = "; ".join(f"{x} {a!r} and {b!r}" for x, a, b in pairs if a != b)
            rule = f"be unique, unlike two tables with different settings: {unequal}"
            fix = "Rename one of them, or use one TableConfig to share a table."
            raise invalid("TableConfig.name", rule, name, fix)
        names.append(name)
    return names


class _PlacedTable(NamedTuple):
    """A table, and the settings that decide which stack it joins.

    Attributes:
      plan: the table's plan, without its row offset.
      optimizer: None means that the table is not trained.
      shard_axes: in mesh order. Empty if every device has all rows.
    """

    plan: TablePlan
    optimizer: RowOptimizer | None
    shard_axes: tuple[str, ...]
    placement: Placement


def _place_table(
    name: str,
    config: TableConfig,
    shared_optimizer: TableOptimizer | None,
    shared_placement: Placement | ChoosePlacement | None,
    mesh: Mesh,
) -> _PlacedTable:
    """Resolves a table's optimizer and placement. Its own settings take precedence."""
    own_or_shared = config.optimizer or shared_optimizer
    optimizer = resolve_optimizer(own_or_shared, name, config.dim)
    if optimizer is not None:
        if config.dtype_name == "int8":
            source = "its own" if config.optimizer else "the layer's"
            raise invalid(
                "TableConfig.dtype",
                f"not be int8 for table {name!r}, which {source} optimizer trains",
                config.dtype_name,
                "int8 rows are for lookup only. Use bfloat16 to train this table. To "
                "keep it fixed, set its TableConfig.optimizer to optax.set_to_zero().",
            )
        problem = config.vocabulary.every_row_problem
        if problem and optimizer.moves_every_row:
            raise ValueError(f"TableConfig.optimizer of table {name!r} {problem}")
    elif config.optimizer is None and shared_optimizer is not None:
        # The shared optimizer is `optax.set_to_zero()`, which resolves to None. Unlike
        # a missing optimizer, it says that the table is meant to stay fixed.
        config = dataclasses.replace(config, optimizer=shared_optimizer)
    if config.placement is not None:
        placement, reason = config.placement, "TableConfig.placement"
    elif shared_placement is None:
        placement, reason = Sharded(), "the default"
    elif isinstance(shared_placement, Placement):
        placement, reason = shared_placement, "make_plan(placement=...)"
    else:
        placement = shared_placement(name, config.max_rows)
        reason = "make_plan(placement=...)"
        if not isinstance(placement, Placement):
            raise _wrong_type(f"placement of table {name!r} must return", placement)
    axes = placement.shard_axes(mesh.axis_names, f"{reason} of table {name!r}")
    plan = TablePlan(
        name=name,
        config=config,
        row_offset=0,  # `_plan_stack` sets it.
        num_rows=config.vocabulary.rows_over(_num_shards(axes, mesh)),
        placement_reason=reason,
    )
    return _PlacedTable(plan, optimizer, axes, placement)


def _num_shards(axes: Sequence[str], mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _wrong_type(rule: str, value: Any) -> TypeError:
    return TypeError(
        f"{rule} a te.Sharded or te.Replicated, got {value!r}. Or choose per table: "
        "placement=lambda name, num_rows: te.Replicated() if num_rows <= 10_000 "
        "else te.Sharded()."
    )


def _group_tables(tables: Sequence[_PlacedTable]) -> list[list[_PlacedTable]]:
    # If tables with equal keys have too many rows for one stack, each goes into the
    # first stack that has room.
    groups: dict[Any, list[list[_PlacedTable]]] = {}
    # Sort by name. If all tables are named, the layout doesn't depend on the feature
    # order.
    for table in sorted(tables, key=lambda table: table.plan.name):
        config = table.plan.config
        key = (
            config.dim,
            config.dtype_name,
            config.quantization_config,
            table.optimizer,
            table.shard_axes,
            # A stack uses its first table's vocabulary, so classes must be equal.
            type(config.vocabulary),
            config.vocabulary.stacking_key,
            table.placement.stacking_key,
        )
        stacks = groups.setdefault(key, [])
        for stack in stacks:
            unused = len(stack) * _MAX_OWNERS  # Upper bound on rows between tables.
            num_rows = sum(t.plan.num_rows for t in (*stack, table)) + unused
            if num_rows <= _MAX_ROWS_OF_STACK:
                stack.append(table)
                break
        else:
            stacks.append([table])
    return [stack for stacks in groups.values() for stack in stacks]


_MAX_OWNERS: Final = 8192
"""Maximum number of owners where a stack's tables begin. It bounds unused rows."""

_GOLDEN_RATIO: Final = (math.sqrt(5) - 1) / 2


def _row_offsets(tables: Sequence[TablePlan], num_owners: int) -> list[int]:
    """Lets tables begin at different owners, since low ids are often the most frequent.

    Stack row `q` belongs to owner `q % num_owners`: a shard, or a SparseCore in a
    shard. Up to `num_owners - 1` rows before a table stay unused.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=100, dim=2)
      >>> (stack,) = te.make_plan(te.FeatureConfig(table=table)).stacks
      >>> _row_offsets(stack.tables * 4, num_owners=8)
      [0, 101, 202, 303]
    """
    # Multiples of the golden ratio, modulo 1, are far apart for any number of tables.
    # The stride is the next integer whose multiples reach all owners.
    stride = round(_GOLDEN_RATIO * num_owners)
    while math.gcd(stride, num_owners) > 1:
        stride += 1
    offsets, end = [], 0
    for i, table in enumerate(tables):
        unused = 0
        if table.config.vocabulary.ids_are_rows:  # Other vocabularies spread ids.
            unused = (i * stride - end) % num_owners
        offsets.append(end + unused)
        end += unused + table.num_rows
    return offsets


def _plan_stack(
    name: str,
    tables: Sequence[_PlacedTable],
    mesh: Mesh,
    capacity: int | None,
    hardware: HardwareInfo,
    options: BackendOptions,
) -> StackPlan:
    first, plans = tables[0], [table.plan for table in tables]
    config = first.plan.config
    num_shards = _num_shards(first.shard_axes, mesh)
    num_owners = min(num_shards * max(1, hardware.cores_per_device), _MAX_OWNERS)
    plans = tuple(
        dataclasses.replace(plan, row_offset=offset)
        for plan, offset in zip(plans, _row_offsets(plans, num_owners), strict=True)
    )
    ranges = tuple(TableRange(t.name, t.row_offset, t.num_rows) for t in plans)
    num_rows = plans[-1].row_offset + plans[-1].num_rows
    layout = RowLayout(
        num_rows=-(-num_rows // num_shards),
        row_shape=(config.dim,),
        tile_lanes=hardware.line_lanes,
        contents=StackContents(ranges, num_shards),
        narrow_dtype=next((d for d in NARROW_DTYPES if d == config.dtype_name), None),
    )
    stack = StackPlan(
        name=name,
        tables=plans,
        sample_axes=tuple(mesh.axis_names),
        shard_axes=first.shard_axes,
        num_shards=num_shards,
        num_replicas=mesh.size // num_shards,
        rows_per_shard=layout.num_rows,
        layout=layout,
        quantization=config.quantization_config,
        capacity=capacity,
        backend=Backend(),
        hardware=hardware,
        storage=RowStorage(),
        trained_by=first.optimizer,
        slots=_slot_rows(first.optimizer, config.dim),
    )
    stack = options.choose(stack, mesh)
    # Checked only now, because the backend may pad the shards.
    if stack.rows_per_shard * num_shards >= PADDING_ROW_ID:
        raise ValueError(
            f"TableConfig.vocabulary_size of table {plans[0].name!r} is {num_rows}, "
            f"which exceeds the limit of 2**31 rows in {num_shards} shards; split the "
            "table in two."
        )
    stack = stack.vocabulary.stacks.plan_stack(stack)
    return first.placement.store(stack, [table.placement for table in tables])


def _slot_rows(
    optimizer: RowOptimizer | None, dim: int
) -> tuple[jax.ShapeDtypeStruct, ...]:
    if optimizer is None:
        return ()
    slots = [slot.row for slot in probe_rule(optimizer, dim).slots]
    if isinstance(optimizer.driver, KeptGradient):
        # The dense gradient, and how often each row was touched.
        slots.append(jax.ShapeDtypeStruct((dim,), jnp.float32))
        slots.append(jax.ShapeDtypeStruct((), jnp.int32))
    return tuple(slots)

"""Places tables on the mesh, and groups them into stacks, which are one array each.

Tables of equal dim, dtype, quantization, optimizer and placement share one dedup, one
exchange and one gather. The grouping depends on nothing else. Within a stack, tables
are in the order of their names, and their rows follow one another without a gap.

A table's own placement comes first, then what `make_plan(placement=...)` says.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

from jax.sharding import Mesh

from tpu_embedding.config import TableConfig
from tpu_embedding.optimizers.resolve import resolve_optimizer
from tpu_embedding.optimizers.row_optimizer import RowOptimizer, TableOptimizer
from tpu_embedding.placement import ChoosePlacement, Placement, Sharded
from tpu_embedding.types import PADDING_ROW_ID

_MAX_ROWS_OF_STACK: Final = PADDING_ROW_ID - 2**20
"""Maximum rows of a stack.

An int32 identifies each row of all shards. Dividing rows among shards rounds up, so the
margin leaves space for one more row on each of 2**20 shards."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedTable:
    """A table with its name, its optimizer and its placement.

    Attributes:
      name: the user's name for the table, or a generated one.
      config: the table as the user declared it.
      optimizer: the table's own optimizer, or else the shared one; None if the table is
        not trained.
      shard_axes: mesh axes that its rows are split over, in the order of the mesh; none
        if every device has all rows.
      num_shards: devices along these axes.
      placement_reason: the setting that chose the axes.
      num_rows: rows in its stack, spare ones included.
    """

    name: str
    config: TableConfig
    optimizer: RowOptimizer | None
    shard_axes: tuple[str, ...] = ()
    num_shards: int = 1
    placement_reason: str = ""
    num_rows: int = 0


def name_tables(
    tables: Sequence[TableConfig],
    optimizer: TableOptimizer | None,
) -> list[NamedTable]:
    """Returns the table of each lookup; lookups in one table get equal entries.

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
            raise ValueError(
                f"TableConfig.name must be unique, got two different tables named "
                f"{name!r}:\n  {other}\n  {config}\nGive one of them another name, "
                "or the same settings to share one table."
            )
        named.append((name, config))
    return [
        NamedTable(
            name=name,
            config=config,
            optimizer=_optimizer_of(name, config, optimizer),
        )
        for name, config in named
    ]


def _optimizer_of(
    name: str, config: TableConfig, optimizer: TableOptimizer | None
) -> RowOptimizer | None:
    """Returns the table's own optimizer, or else the shared one."""
    own_or_shared = config.optimizer or optimizer
    if config.dtype_name == "int8" and own_or_shared is not None:
        source = "its own" if config.optimizer else "that of the layer"
        raise ValueError(
            "TableConfig.dtype must not be int8 for a table with an optimizer, got "
            f"{source} for table {name!r}: int8 rows are for lookup only. Store a "
            "trained table in bfloat16. To train the other tables only, set "
            "TableConfig.optimizer of each, and give the layer none."
        )
    return resolve_optimizer(own_or_shared, name, config.dim)


def stack_tables(tables: Sequence[NamedTable]) -> list[list[NamedTable]]:
    """Groups tables into stacks.

    No stack has more rows than an int32 can identify. A larger group is split into
    several stacks; each table goes into the first that has room.

    Args:
      tables: different tables, placed on the mesh.
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
        )
        stacks = groups.setdefault(key, [])
        for stack in stacks:
            if sum(t.num_rows for t in (*stack, table)) <= _MAX_ROWS_OF_STACK:
                stack.append(table)
                break
        else:
            stacks.append([table])
    return [stack for stacks in groups.values() for stack in stacks]


_DEFAULT: Final = "the default"
_BY_TABLE: Final = "TableConfig.placement"
_BY_PLAN: Final = "make_plan(placement=...)"


def place_tables(
    tables: Sequence[NamedTable],
    placement: Placement | ChoosePlacement | None,
    mesh: Mesh,
) -> list[NamedTable]:
    """Returns each table once, with the mesh axes that its rows are split over.

    Args:
      tables: the table of each lookup.
      placement: of tables without a placement of their own. A function places each by
        its name and rows. None splits them over the whole mesh.
      mesh: devices of the layer.

    Raises:
      TypeError: if `placement` is not a placement or a function that returns one.
      ValueError: if a placement names an axis that the mesh lacks.
    """
    if isinstance(placement, Placement):
        _check_axes("placement", placement, mesh)
    elif placement is not None and (
        isinstance(placement, type) or not callable(placement)
    ):
        raise _wrong_type("placement must be", placement)
    return [
        _place(table, *_choose(table, placement), mesh)
        for table in {table.name: table for table in tables}.values()
    ]


def _choose(
    table: NamedTable, placement: Placement | ChoosePlacement | None
) -> tuple[Placement, str]:
    """Returns the placement of a table, and what chose it."""
    if table.config.placement is not None:
        return table.config.placement, _BY_TABLE
    if placement is None:
        return Sharded(), _DEFAULT
    if isinstance(placement, Placement):
        return placement, _BY_PLAN
    chosen = placement(table.name, table.config.max_rows)
    if not isinstance(chosen, Placement):
        raise _wrong_type(f"placement of table {table.name!r} must return", chosen)
    return chosen, _BY_PLAN


def _wrong_type(rule: str, value: Any) -> TypeError:
    return TypeError(
        f"{rule} a te.Sharded or te.Replicated, got {value!r}. A function chooses per "
        "table: placement=lambda name, num_rows: te.Replicated() if num_rows <= 10_000 "
        "else te.Sharded()."
    )


def _place(
    table: NamedTable, placement: Placement, reason: str, mesh: Mesh
) -> NamedTable:
    _check_axes(f"{reason} of table {table.name!r}", placement, mesh)
    axes = ()
    if isinstance(placement, Sharded):
        axes = placement.axes or mesh.axis_names
    # The order of the mesh, so that equal placements share a stack.
    shard_axes = tuple(axis for axis in mesh.axis_names if axis in axes)
    num_shards = math.prod(mesh.shape[axis] for axis in shard_axes)
    vocabulary, optimizer = table.config.vocabulary, table.optimizer
    problem = optimizer is not None and vocabulary.optimizer_problem(optimizer)
    if problem:
        raise ValueError(f"TableConfig.optimizer of table {table.name!r} {problem}")
    return dataclasses.replace(
        table,
        shard_axes=shard_axes,
        num_shards=num_shards,
        placement_reason=reason,
        num_rows=vocabulary.rows_over(num_shards),
    )


def _check_axes(owner: str, placement: Placement, mesh: Mesh) -> None:
    axes = placement.axes if isinstance(placement, Sharded) else None
    unknown = [axis for axis in axes or () if axis not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"{owner} must name axes of the mesh, {list(mesh.axis_names)}, got "
            f"{unknown} in {placement!r}; correct the names, or leave axes out for the "
            "whole mesh."
        )

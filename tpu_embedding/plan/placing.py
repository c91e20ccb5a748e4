"""Places each table: the mesh axes that its rows are split over, and the reason.

A table's own placement comes first, then what `make_plan(placement=...)` says.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Final

from jax.sharding import Mesh

from tpu_embedding.placement import ChoosePlacement, Placement, Sharded
from tpu_embedding.plan.stacking import NamedTable

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

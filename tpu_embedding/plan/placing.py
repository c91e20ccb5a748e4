"""Chooses the mesh axes that the rows of each table are split over, and says why.

`placement.py` holds the values that users choose from. A table's own placement comes
first, then that of `make_plan`, or its policy's decision for the table.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from jax.sharding import Mesh

from tpu_embedding.config import FeatureConfig
from tpu_embedding.placement import (
    AutoPlacement,
    Placement,
    PlacementPolicy,
    Replicated,
    ReplicateSmall,
    Sharded,
)
from tpu_embedding.plan.dynamic_rows import refuse_unsuited, rows_of_dynamic_table
from tpu_embedding.plan.stacking import NamedTable

_DEFAULT: Final = "the default"
_BY_TABLE: Final = "TableConfig.placement"
_BY_PLAN: Final = "make_plan(placement=...)"

RowBytesOf = Callable[[NamedTable], int]
"""Returns the bytes of a row of a table and of its slot variables."""


def check_policy(policy: Any, mesh: Mesh) -> None:
    """Refuses a `make_plan(placement=...)` that is none, or names unknown axes.

    Raises:
      TypeError: if it is no placement and no policy.
      ValueError: if the mesh lacks one of its axes.
    """
    if not isinstance(policy, PlacementPolicy | None):
        raise TypeError(
            "placement must be a te.Sharded, te.Replicated, te.ReplicateSmall, "
            f"te.AutoPlacement or None, got {policy!r}; te.Sharded() is the default."
        )
    sharded = getattr(policy, "otherwise", policy)
    if isinstance(sharded, Sharded):
        _check_axes("placement", sharded, mesh)


def place_tables(
    tables: Sequence[NamedTable],
    features: Sequence[FeatureConfig],
    policy: PlacementPolicy | None,
    mesh: Mesh,
    row_bytes_of: RowBytesOf,
) -> list[NamedTable]:
    """Returns each table once, with the mesh axes that its rows are split over.

    Args:
      tables: the table of each lookup.
      features: the feature of each lookup.
      policy: chooses for tables without a placement of their own.
      mesh: devices of the layer.
      row_bytes_of: memory of a row.

    Raises:
      ValueError: if a table's placement names an axis that the mesh lacks.
    """
    unique = {table.name: table for table in tables}
    free = [table for table in unique.values() if table.config.placement is None]
    match policy:
        case None:
            chosen = {table.name: (Sharded(), _DEFAULT) for table in free}
        case ReplicateSmall():
            chosen = {table.name: _by_size(table, policy) for table in free}
        case AutoPlacement():
            lookups = _lookups_per_device(tables, features, policy, mesh)
            chosen = _by_traffic(free, lookups, policy, row_bytes_of)
        case _:
            chosen = {table.name: (policy, _BY_PLAN) for table in free}
    return [
        _place(table, *chosen.get(name, (table.config.placement, _BY_TABLE)), mesh)
        for name, table in unique.items()
    ]


def _place(
    table: NamedTable, placement: Placement | None, reason: str, mesh: Mesh
) -> NamedTable:
    axes = ()
    if isinstance(placement, Sharded):
        _check_axes(f"TableConfig.placement of table {table.name!r}", placement, mesh)
        axes = placement.axes or mesh.axis_names
    # The order of the mesh, so that equal placements share a stack.
    shard_axes = tuple(axis for axis in mesh.axis_names if axis in axes)
    num_shards = math.prod(mesh.shape[axis] for axis in shard_axes)
    dynamic, num_rows = table.config.dynamic, table.config.max_rows
    if dynamic is not None:
        refuse_unsuited(table)
        num_rows = rows_of_dynamic_table(dynamic, num_shards)
    return dataclasses.replace(
        table,
        shard_axes=shard_axes,
        num_shards=num_shards,
        placement_reason=reason,
        num_rows=num_rows,
    )


def _by_size(table: NamedTable, policy: ReplicateSmall) -> tuple[Placement, str]:
    if table.config.max_rows <= policy.max_rows:
        return Replicated(), f"ReplicateSmall: at most {policy.max_rows:,} rows"
    return policy.otherwise, f"ReplicateSmall: more than {policy.max_rows:,} rows"


def _by_traffic(
    tables: Sequence[NamedTable],
    lookups: dict[str, int],
    policy: AutoPlacement,
    row_bytes_of: RowBytesOf,
) -> dict[str, tuple[Placement, str]]:
    """Applies the rule of `AutoPlacement`, to the smallest tables first."""
    chosen: dict[str, tuple[Placement, str]] = {}
    remaining_bytes = policy.max_bytes
    for table in sorted(tables, key=lambda t: (t.config.max_rows, t.name)):
        num_rows = table.config.max_rows
        num_bytes = num_rows * row_bytes_of(table)
        placement: Placement = policy.otherwise
        if num_rows > lookups[table.name]:
            reason = "AutoPlacement: more rows than a device looks up in a step"
        elif num_bytes > remaining_bytes:
            reason = f"AutoPlacement: max_bytes={policy.max_bytes:,} is used up"
        else:
            placement = Replicated()
            reason = "AutoPlacement: at most as many rows as lookups per device"
            remaining_bytes -= num_bytes
        chosen[table.name] = placement, reason
    return chosen


def _lookups_per_device(
    tables: Sequence[NamedTable],
    features: Sequence[FeatureConfig],
    policy: AutoPlacement,
    mesh: Mesh,
) -> dict[str, int]:
    """Returns how many ids a device looks up per step, by table."""
    per_sample = dict.fromkeys((table.name for table in tables), 0.0)
    for table, feature in zip(tables, features, strict=True):
        per_sample[table.name] += _ids_per_sample(feature, policy.batch_size)
    samples = -(-policy.batch_size // mesh.size)
    return {name: math.ceil(samples * ids) for name, ids in per_sample.items()}


def _ids_per_sample(feature: FeatureConfig, batch_size: int) -> float:
    if feature.expected_valence is not None:
        return feature.expected_valence
    if feature.output_shape is not None:
        return max(1.0, float(np.prod(feature.output_shape)) / batch_size)
    return max(1, feature.max_sequence_length)


def _check_axes(owner: str, placement: Sharded, mesh: Mesh) -> None:
    unknown = [axis for axis in placement.axes or () if axis not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"{owner} must name axes of the mesh, {list(mesh.axis_names)}, got "
            f"{unknown} in {placement!r}; correct the names, or leave axes out for the "
            "whole mesh."
        )

"""Reads the ids that TorchRec's managed collision modules keep beside a table.

`HashZchManagedCollisionModule` (MPZCH) has the id of each row, -1 for rows without an
id, and perhaps hours. `MCHManagedCollisionModule` has sorted ids with the numbers of
their rows, the largest int64 in places without an id, and perhaps counts and steps of
the last uses. Ids are those that the module stores: behind its hash of inputs, if any.

Source: github.com/pytorch/torchrec at a48cef7, `torchrec/modules/hash_mc_modules.py`,
`hash_mc_evictions.py` and `mc_modules.py`. All ranks' parts lie one after the other in
a full state dict, and rows are numbered over all ranks.
"""

import re
from collections.abc import Mapping
from typing import Final

import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.row_ids import (
    as_counts,
    checked_ids,
    clock_of,
)
from tpu_embedding.checkpoint.imports.source import RowArray, SourceIds, SourceTable

_BUFFER: Final = re.compile(
    r"(.*\.)?_managed_collision_collection\._managed_collision_modules\.(.+)"
    r"\.(_hash_zch_\w+|_mch_\w+|_current_iter_tensor|_output_segments_tensor)"
)
_NO_ID: Final = np.iinfo(np.int64).max


def is_buffer(name: str) -> bool:
    """Returns True for the name of an array of a managed collision module."""
    return _BUFFER.fullmatch(name) is not None


def with_ids(
    table: SourceTable, key: str, name: str, arrays: Mapping[str, RowArray]
) -> SourceTable:
    """Returns a table with the rows that have ids only, if its state dict has ids.

    Args:
      table: the table and its slot variables.
      key: name of its weight in the state dict.
      name: name of the table in its collection.
      arrays: all arrays of the state dict.

    Raises:
      CheckpointError: if the arrays of the ids contradict each other.
    """
    buffers = {}
    for other, array in arrays.items():
        match = _BUFFER.fullmatch(other)
        if match and match[2] == name and key.startswith(match[1] or ""):
            buffers[match[3]] = np.asarray(array).reshape(-1)
    owner = f"TorchRec table {key!r}"
    if "_hash_zch_identities" in buffers:
        rows, ids = _hashed(buffers, table.values.shape[0], owner)
    elif "_mch_sorted_raw_ids" in buffers:
        rows, ids = _sorted(buffers, table.values.shape[0], owner)
    else:
        return table
    return SourceTable(
        values=_chosen(table.values, rows),
        slots={name: _chosen(slot, rows) for name, slot in table.slots.items()},
        ids=ids,
    )


def _hashed(
    buffers: Mapping[str, np.ndarray], num_rows: int, owner: str
) -> tuple[np.ndarray, SourceIds]:
    """Returns the rows with an id, and the ids, of the module that hashes."""
    identities = buffers["_hash_zch_identities"]
    hours = buffers.get("_hash_zch_metadata")
    if len(identities) != num_rows or hours is not None and len(hours) != num_rows:
        raise CheckpointError(
            f"{owner} must have one id and one hour for each of its {num_rows} rows, "
            f"got {len(identities)} ids and {0 if hours is None else len(hours)} "
            "hours; save the full state dict of all ranks."
        )
    rows = np.flatnonzero(identities != -1)
    last_used, clock = None, 1
    if hours is not None and len(rows):
        # Hours since 1970, perhaps with the time to live on top: here from 1 on.
        since_first = hours[rows].astype(np.int64) - hours[rows].min()
        last_used, clock = clock_of(since_first + 1)
    ids = checked_ids(identities[rows], owner)
    return rows, SourceIds(ids=ids, last_used=last_used, clock=clock)


def _sorted(
    buffers: Mapping[str, np.ndarray], num_rows: int, owner: str
) -> tuple[np.ndarray, SourceIds]:
    """Returns the rows with an id, and the ids, of the module that sorts."""
    raw_ids = buffers["_mch_sorted_raw_ids"]
    row_of = buffers.get("_mch_remapped_ids_mapping", np.zeros(0, np.int64))
    if len(row_of) != len(raw_ids):
        raise CheckpointError(
            f"{owner} must have one row for each of its {len(raw_ids)} ids, got "
            f"{len(row_of)}; save the full state dict of all ranks."
        )
    places = np.flatnonzero(raw_ids != _NO_ID)
    places = places[np.argsort(row_of[places], kind="stable")]
    rows = row_of[places]
    if len(rows) and (rows[0] < 0 or rows[-1] >= num_rows or not np.diff(rows).all()):
        raise CheckpointError(
            f"{owner} must have distinct rows below {num_rows} for its ids, got rows "
            f"from {rows[0]} to {rows[-1]}, {len(rows) - len(np.unique(rows))} twice; "
            "gather the state dict by a TorchRec that numbers rows over all ranks."
        )
    steps = buffers.get("_mch_last_access_iter")
    now = buffers.get("_current_iter_tensor")
    last_used, clock = None, 1
    if steps is not None:
        last_used, clock = clock_of(steps[places], None if now is None else int(now[0]))
    counts = buffers.get("_mch_counts")
    return rows, SourceIds(
        ids=checked_ids(raw_ids[places], owner),
        last_used=last_used,
        counts=None if counts is None else as_counts(counts[places]),
        clock=clock,
    )


def _chosen(array: RowArray, rows: np.ndarray) -> RowArray:
    """Returns some rows of an array; their numbers rise."""

    def read(start: int, num_rows: int) -> np.ndarray:
        wanted = rows[start : start + num_rows]
        if not len(wanted):
            return np.zeros((0, *array.shape[1:]), array.dtype)
        first = int(wanted[0])
        return array.read(first, int(wanted[-1]) + 1 - first)[wanted - first]

    return RowArray((len(rows), *array.shape[1:]), array.dtype, read, array.check)

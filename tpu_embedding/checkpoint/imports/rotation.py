"""Finds the rotation of stacked tables from their padding rows.

Tables of a stack start in different shards, by the number of SparseCores of a device. A
wrong number permutes the rows of every table but the first, and no shape tells. Padding
rows tell, unless a table fills its shards: at the last row of a table, some shards hold
one row more than others, and the padding of the others equals the padding below it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.source import RowArray, SourceTable
from tpu_embedding.checkpoint.imports.sparse_core import StackedTable, rows_in_shard

_NUMBERS_SHOWN: Final = 4
"""Numbers of a row that are shown to be compared."""

Rotations = Mapping[int, Sequence[StackedTable]]
"""SparseCores of a device to the places of all tables under it."""


def divisors(num_sparse_cores: int) -> list[int]:
    """Returns the numbers of SparseCores that a device may have had.

    Raises:
      ValueError: if there is no SparseCore.
    """
    if num_sparse_cores < 1:
        raise ValueError(
            f"num_sparse_cores must be at least 1, got {num_sparse_cores}."
        )
    return [n for n in range(1, num_sparse_cores + 1) if num_sparse_cores % n == 0]


def chosen_cores(
    given: int | None,
    rotations: Rotations,
    stacks: Mapping[str, SourceTable],
    path: object,
) -> tuple[int, bool]:
    """Returns the SparseCores per device, and True if the padding rows tell them.

    Args:
      given: number that the user gave; None: the padding rows must tell.
      rotations: places of all tables, by the SparseCores of a device.
      stacks: stacks by name.
      path: checkpoint, for errors.

    Raises:
      CheckpointError: if the padding contradicts the number, or tells none.
    """
    if given is not None and given not in rotations:
        raise CheckpointError(
            f"sparse_cores_per_device must divide num_sparse_cores, so it is one of "
            f"{list(rotations)}, got {given}."
        )
    by_table = {place.name: place for place in rotations[1]}
    allowed = {
        name: _allowed_rotations(stacks[place.stack_name], place)
        for name, place in by_table.items()
    }
    fitting = [
        cores
        for cores, places in rotations.items()
        if all(place.rotation in allowed[place.name] for place in places)
    ]
    owners = [n for n, place in by_table.items() if len(allowed[n]) < place.num_shards]
    if not fitting or (given is not None and given not in fitting):
        way_out = f"Give sparse_cores_per_device={' or '.join(map(str, fitting))}."
        if not fitting:
            way_out = (
                "Check num_sparse_cores, and the order and vocabulary sizes of tables."
            )
        raise CheckpointError(
            f"{path}: the padding rows of tables {owners} contradict "
            f"sparse_cores_per_device={given or list(rotations)}. {way_out}"
        )
    cores = fitting[0] if given is None else given
    is_told = all(rotations[other] == rotations[cores] for other in fitting)
    if given is None and not is_told:
        raise CheckpointError(
            f"{path}: the padding rows do not tell sparse_cores_per_device; it may be "
            f"{' or '.join(map(str, fitting))}. Give that of the TPU that trained it."
        )
    return cores, is_told


def rows_to_compare(array: RowArray) -> str:
    """Returns three rows of a table, to compare with those of the trained model."""
    num_rows = array.shape[0]
    texts = []
    for row in sorted({0, num_rows // 2, num_rows - 1}):
        numbers = np.ravel(array.read(row, 1))[:_NUMBERS_SHOWN].astype(np.float32)
        texts.append(f"row {row}: [{', '.join(f'{x:.6g}' for x in numbers)}, ...]")
    return "; ".join(texts)


def _allowed_rotations(stack: SourceTable, place: StackedTable) -> set[int]:
    """Returns the shards that may hold row 0 of a table, by its padding."""
    rotations = set(range(place.num_shards))
    for array in (stack.values, *stack.slots.values()):
        if len(rotations) == 1 or len(array.shape) != 2:
            continue
        size = array.shape[0] // place.num_shards

        def rows(position: int, array=array, size=size) -> np.ndarray:
            first = place.row_offset + position
            starts = (shard * size + first for shard in range(place.num_shards))
            return np.concatenate([array.read(start, 1) for start in starts])

        for is_padding in _padding(rows, place):
            found = {r for r in rotations if _fits(is_padding, place, r)}
            rotations = found or rotations
    return rotations


def _padding(
    rows: Callable[[int], np.ndarray], place: StackedTable
) -> Iterator[np.ndarray]:
    """Yields which shards have a padding row where others have the last of a table."""
    last, num_last = divmod(place.vocabulary_size, place.num_shards)
    if num_last == 0:
        return
    if last + 1 < rows_in_shard(place.vocabulary_size, place.num_shards):
        below = rows(last + 1)
        if _equal(below, below[:1]).all():
            yield _equal(rows(last), below[:1])
        return
    found = rows(last)
    for value in (np.nan, 0):
        yield _equal(found, np.full_like(found[:1], value))


def _equal(rows: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Returns which rows are equal to one; NaN equals NaN."""
    rows, row = rows.astype(np.float32), row.astype(np.float32)
    return ((rows == row) | (np.isnan(rows) & np.isnan(row))).all(axis=1)


def _fits(is_padding: np.ndarray, place: StackedTable, rotation: int) -> bool:
    """Returns True if all shards without a last row have padding there."""
    num_last = place.vocabulary_size % place.num_shards
    shards = np.arange(place.num_shards)
    return bool(is_padding[(shards - rotation) % place.num_shards >= num_last].all())

"""Opens checkpoints of this package, whose tables may get ids by an import."""

import os
import pathlib

import numpy as np

from tpu_embedding.checkpoint.arrays import ArrayFile
from tpu_embedding.checkpoint.dynamic_tables import CLOCK, COUNTS, IDS, LAST_USED
from tpu_embedding.checkpoint.format import (
    STATE_ITEMS,
    TABLES,
    TABLES_FILE,
    ArrayRecord,
    TableRecord,
    array_name,
    check_files,
    describe,
    state_directory,
)
from tpu_embedding.checkpoint.imports.source import (
    RowArray,
    SourceIds,
    SourceTable,
    TableSource,
)


def find_checkpoint(path: pathlib.Path) -> pathlib.Path | None:
    """Returns the checkpoint of this package that a path means, or None.

    Args:
      path: directory of a checkpoint, or of the checkpoints of a run, whose latest one
        is meant.
    """
    steps = [x for x in path.glob("*") if x.name.isdigit()]
    latest = max(steps, key=lambda step: int(step.name), default=path)
    for directory in (path, latest):
        for item in STATE_ITEMS:
            if (directory / item / TABLES / TABLES_FILE).is_file():
                return directory
    return None


def tables_of_checkpoint(directory: str | os.PathLike[str]) -> TableSource:
    """Returns the tables of a checkpoint and their slot variables.

    The ids of dynamic tables are read; a learned default row is left out.

    Args:
      directory: from `te.save`.

    Raises:
      CheckpointError: if it is damaged.
    """
    record = describe(directory)
    return TableSource(
        origin=f"checkpoint {directory}",
        tables={
            name: _table(directory, name, table)
            for name, table in record.tables.items()
        },
    )


def _table(
    directory: str | os.PathLike[str], name: str, table: TableRecord
) -> SourceTable:
    def rows_of(slot: str | None) -> RowArray:
        return _rows(directory, array_name(name, slot), table.arrays[slot], num_rows)

    def read(part: str) -> np.ndarray:
        array = table.arrays[part]
        return _checked_file(directory, array_name(name, part), array).read()

    ids, num_rows = None, table.vocabulary_size
    if table.dynamic is not None:
        ids = SourceIds(
            ids=read(IDS),
            last_used=read(LAST_USED),
            counts=read(COUNTS),
            clock=int(read(CLOCK)),
        )
        num_rows = len(ids.ids)
    slots = [name for name, x in table.slots.items() if x.chunk_rows is not None]
    return SourceTable(
        values=rows_of(None), slots={slot: rows_of(slot) for slot in slots}, ids=ids
    )


def _rows(
    directory: str | os.PathLike[str], name: str, array: ArrayRecord, num_rows: int
) -> RowArray:
    file = ArrayFile(state_directory(directory) / TABLES, name, array)
    return RowArray(
        (num_rows, *array.shape[1:]),
        np.dtype(array.dtype),
        lambda start, n: file.read(slice(start, start + n)),
        lambda: _checked_file(directory, name, array),
    )


def _checked_file(
    directory: str | os.PathLike[str], name: str, array: ArrayRecord
) -> ArrayFile:
    """Returns the file of an array after comparing it with the manifest."""
    root = state_directory(directory)
    check_files(root, lambda file: file.startswith(f"{TABLES}/{name}/"))
    return ArrayFile(root / TABLES, name, array)

"""The command `tpu-embedding inspect`: the tables of a checkpoint, and one row."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Annotated

import numpy as np
import orbax.checkpoint as ocp
import tyro

from tpu_embedding.checkpoint.arrays import read_table
from tpu_embedding.checkpoint.records import TableRecord
from tpu_embedding.checkpoint.state_file import describe
from tpu_embedding.paths import local_path
from tpu_embedding.plan.memory import format_table
from tpu_embedding.tools.cli.arguments import UsageError
from tpu_embedding.tools.train.run import CHECKPOINTS_DIR


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Lists the tables of a checkpoint, or prints one row by its id.

    Reads the files without devices and without the model.
    """

    checkpoint: Annotated[pathlib.Path, tyro.conf.Positional]
    """Directory of a checkpoint, or of a run, whose latest one is read."""

    row: tuple[str, int] | None = None
    """Prints the row of a table and an id, such as user 17, and its slot variables."""

    def run(self) -> int:
        """Prints the tables, or a row; returns the exit status."""
        directory = _find_checkpoint(local_path(self.checkpoint))
        tables = describe(directory).tables
        if self.row is None:
            print(f"{directory}\n{_format_tables(tables)}")
            return 0
        name, id_ = self.row
        if name not in tables:
            raise UsageError(
                f"--row {name}: the checkpoint {directory} has the tables "
                f"{', '.join(tables)}."
            )
        row = _row_of_id(directory, name, tables[name], id_)
        for slot, array in tables[name].arrays.items():
            if array.has_rows:
                (values,) = read_table(directory, name, [row], slot=slot)
                print(f"{slot or 'values'}: {np.asarray(values).tolist()}")
        return 0


def _find_checkpoint(path: pathlib.Path) -> pathlib.Path:
    """Returns a checkpoint: the given one, or the latest one of a run."""
    for directory in (path / CHECKPOINTS_DIR, path):
        if steps := ocp.utils.checkpoint_steps(directory):
            return directory / str(max(steps))
    return path


def _format_tables(tables: Mapping[str, TableRecord]) -> str:
    rows = [("table", "slot variables", "rows", "dim", "dtype")]
    for name, table in tables.items():
        slots = ", ".join(table.slots) or "-"
        size = f"{table.vocabulary_size:,}"
        rows.append((name, slots, size, str(table.dim), table.dtype))
    return format_table(rows, num_left_aligned=2)


def _row_of_id(directory: pathlib.Path, name: str, table: TableRecord, id_: int) -> int:
    """Returns the row of an id in the files; of a static table, it is the id."""
    if table.dynamic is None:
        if not 0 <= id_ < table.vocabulary_size:
            raise UsageError(
                f"--row: the id must be a row of table {name!r}, from 0 to "
                f"{table.vocabulary_size - 1}, got {id_}."
            )
        return id_
    ids = read_table(directory, name, slot=":ids")
    (rows,) = np.nonzero(ids == np.uint64(id_ % 2**64))
    if not rows.size:
        raise UsageError(f"--row: {id_} is none of the {len(ids)} ids of {name!r}.")
    return int(rows[0])

"""The command `tpu-embedding inspect`."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Annotated

import numpy as np
import tyro

from tpu_embedding.checkpoint.arrays import read_table
from tpu_embedding.checkpoint.records import TableRecord
from tpu_embedding.checkpoint.state_file import describe
from tpu_embedding.paths import local_path
from tpu_embedding.plan.memory import format_table
from tpu_embedding.strings.string_ids import Vocabulary
from tpu_embedding.tools.cli.arguments import UsageError
from tpu_embedding.tools.train.run_directory import (
    CHECKPOINTS_DIR,
    check_files,
    newest_checkpoint,
    result_checkpoint,
    vocabularies_of,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Lists a checkpoint's tables, or prints the row of one id or string.

    The command reads only files, and needs neither devices nor the model.
    """

    checkpoint: Annotated[pathlib.Path, tyro.conf.Positional]
    """Directory of a checkpoint or a run.
    For a run, reads the best or newest checkpoint."""

    row: tuple[str, str] | None = None
    """Prints an id's row and its slot variables.
    Pass a table and an id, such as user 17.
    If the run has a vocabulary for the table, pass a string instead of the id."""

    def run(self) -> int:
        directory, run_dir = _find_checkpoint(local_path(self.checkpoint))
        tables = describe(directory).tables
        if self.row is None:
            print(f"{directory}\n{_format_tables(tables)}")
            return 0
        name, text = self.row
        if name not in tables:
            raise UsageError(
                f"--row: {name!r} is not a table of {directory}, which has the tables "
                f"{', '.join(tables)}."
            )
        vocabularies = vocabularies_of(run_dir) if run_dir is not None else {}
        id_ = _parse_id(text, name, vocabularies.get(name))
        row = _find_row(directory, name, tables[name], id_)
        print(f"{name} {text}: row {row}")
        for slot, array in tables[name].arrays.items():
            if array.has_rows:
                (values,) = read_table(directory, name, [row], slot=slot)
                print(f"{slot or 'values'}: {np.asarray(values).tolist()}")
        return 0


def _find_checkpoint(path: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path | None]:
    """Finds a checkpoint, and its run's directory if it belongs to a run."""
    # The path can be a run, its checkpoints directory, or a checkpoint. A link to a run
    # is allowed, so the path is resolved. Links inside a run are not allowed.
    checkpoint = path = path.resolve()
    if (path / CHECKPOINTS_DIR).is_dir():
        check_files(path)
        checkpoint = result_checkpoint(path) or path
    else:
        checkpoint = newest_checkpoint(path) or path
    if checkpoint.parent.name == CHECKPOINTS_DIR:
        run_dir = checkpoint.parent.parent
        check_files(run_dir)
        return checkpoint, run_dir
    check_files(checkpoint, [""])
    return checkpoint, None


def _format_tables(tables: Mapping[str, TableRecord]) -> str:
    rows = [("table", "slot variables", "rows", "dim", "dtype")]
    for name, table in tables.items():
        slots = ", ".join(table.slots) or "-"
        size = f"{table.vocabulary_size:,}"
        rows.append((name, slots, size, str(table.dim), table.dtype))
    return format_table(rows, num_left_aligned=2)


def _parse_id(text: str, name: str, vocabulary: Vocabulary | None) -> int:
    """Looks up a string in the vocabulary. Without a vocabulary, parses an integer."""
    if vocabulary is None:
        # `int` would also accept spaces and underscores.
        if not re.fullmatch("-?[0-9]{1,20}", text):
            raise UsageError(
                f"--row: an id of table {name!r} must be an integer, got {text!r}; the "
                "run has no vocabulary for the table."
            )
        return int(text)
    if text not in vocabulary.tokens:
        raise UsageError(
            f"--row: {text!r} is not one of the {len(vocabulary)} strings of table "
            f"{name!r}, such as {vocabulary.tokens[0]!r}; unknown strings share a row."
        )
    return int(vocabulary.ids([text])[0])


def _find_row(directory: pathlib.Path, name: str, table: TableRecord, id_: int) -> int:
    """Finds an id's row in the files. In a static table, the id is the row."""
    if table.dynamic is None:
        if not 0 <= id_ < table.vocabulary_size:
            raise UsageError(
                f"--row: an id of table {name!r} must be from 0 to "
                f"{table.vocabulary_size - 1}, got {id_}."
            )
        return id_
    # Ids are stored as uint64. Negative ids are stored modulo 2**64.
    ids = read_table(directory, name, slot=":ids")
    (rows,) = np.nonzero(ids == np.uint64(id_ % 2**64))
    if not rows.size:
        raise UsageError(f"--row: {id_} is not one of the {len(ids)} ids of {name!r}.")
    return int(rows[0])

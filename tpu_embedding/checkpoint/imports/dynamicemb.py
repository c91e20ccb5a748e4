"""Reads the files that dynamicemb dumps: keys and values of dynamic tables.

Each rank of a job writes binary files of its own, without headers: keys (int64), values
(float32) and perhaps slot variables (float32), all in one order. A file of JSON names
the optimizer. Scores are not read: all ids count as just used. Like all rows of dynamic
tables, they are held by the host as a whole.

Source: github.com/NVIDIA/recsys-examples at 43465ae,
`corelib/dynamicemb/dynamicemb/batched_dynamicemb_tables.py`, `key_value_table.py` and
`optimizer.py`. Older versions, such as 0c45b80, name the slot variables `_opt_values`.
"""

import json
import pathlib
import re
from typing import Any, Final

import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.source import (
    RowArray,
    SourceTable,
    TableSource,
    array_of,
    by_shortest_names,
)

_FIRST_KEYS: Final = re.compile(r"(.+)_emb_keys\.rank_0\.world_size_(\d+)")
_SLOTS: Final = ("emb_opt_values", "opt_values")


def tables_of_dump(directory: pathlib.Path) -> TableSource | None:
    """Opens the tables of a dump; None if there is none.

    Tables of one name in two collections get the paths of their files.

    Args:
      directory: directory that was dumped, or a part of it.

    Raises:
      CheckpointError: if sizes of files contradict the keys.
      OSError: if a rank's file is missing.
    """
    tables: dict[tuple[str, ...], SourceTable] = {}
    for file in sorted(directory.rglob("*_emb_keys.rank_0.*")):
        if match := _FIRST_KEYS.fullmatch(file.name):
            path = file.with_name(match[1])
            parts = path.relative_to(directory).parts
            tables[parts] = _table(path, int(match[2]))
    if not tables:
        return None
    return TableSource(
        origin=f"dynamicemb dump {directory}", tables=by_shortest_names(tables)
    )


def _table(path: pathlib.Path, num_ranks: int) -> SourceTable:
    keys = _read(path, "emb_keys", num_ranks, np.int64)
    values = _rows(path, "emb_values", num_ranks, len(keys))
    for item in _SLOTS:
        if path.with_name(f"{path.name}_{item}.rank_0.world_size_{num_ranks}").exists():
            rows = _rows(path, item, num_ranks, len(keys))
            return SourceTable(
                values=array_of(values), slots=_slots(rows, path), ids=keys
            )
    return SourceTable(values=array_of(values), ids=keys)


def _read(path: pathlib.Path, item: str, num_ranks: int, dtype: Any) -> np.ndarray:
    """Returns the numbers in the files of all ranks."""
    # Not lists: the number comes from a file's name, and may be any.
    names = (f"_{item}.rank_{i}.world_size_{num_ranks}" for i in range(num_ranks))
    files = (path.with_name(path.name + name) for name in names)
    return np.concatenate([np.fromfile(file, dtype) for file in files])


def _rows(path: pathlib.Path, item: str, num_ranks: int, num_keys: int) -> np.ndarray:
    """Returns float32 rows, one for each key.

    Raises:
      CheckpointError: if the numbers are not equally many for each key.
    """
    numbers = _read(path, item, num_ranks, np.float32)
    if numbers.size % max(1, num_keys):
        raise CheckpointError(
            f"{path}_{item} must have equally many numbers for each of {num_keys} "
            f"keys, got {numbers.size} numbers; copy all files of the dump again."
        )
    return numbers.reshape(num_keys, numbers.size // max(1, num_keys))


def _slots(rows: np.ndarray, path: pathlib.Path) -> dict[str, RowArray]:
    """Returns the slot variables of the optimizer that a file names.

    Raises:
      CheckpointError: if that file is no JSON.
    """
    file = path.with_name(f"{path.name}_opt_args.json")
    try:
        rule = json.loads(file.read_text())["opt_type"]
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}.") from None
    match rule:
        case "adam":
            first, second = np.split(rows, 2, axis=1)
            return {"m": array_of(first), "v": array_of(second)}
        case "exact_adagrad":
            return {"accumulator": array_of(rows)}
        case "exact_row_wise_adagrad":
            # Older versions write the columns that fill up a line, too.
            return {"accumulator": array_of(rows[:, 0])}
    return {"opt_values": array_of(rows)}

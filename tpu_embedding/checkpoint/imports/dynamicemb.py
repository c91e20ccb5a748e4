"""Reads the files that dynamicemb dumps: keys and values of dynamic tables.

Each rank of a job writes binary files of its own, without headers: keys (int64), values
(float32) and perhaps slot variables (float32), all in one order. A file of JSON names
the optimizer. Scores are not read: all ids count as just used.

Source: github.com/NVIDIA/recsys-examples at 43465ae,
`corelib/dynamicemb/dynamicemb/batched_dynamicemb_tables.py`, `key_value_table.py` and
`optimizer.py`. Older versions, such as 0c45b80, name the slot variables `_opt_values`.
"""

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.source import RowArray, SourceTable, TableSource

_KEYS: Final = re.compile(r"(.+)_emb_keys\.rank_(\d+)\.world_size_(\d+)")
_SLOTS: Final = ("emb_opt_values", "opt_values")


def find_dumps(directory: pathlib.Path) -> dict[pathlib.Path, int]:
    """Returns the path of each dumped table, without its ending, and its ranks.

    Raises:
      CheckpointError: if a table was dumped by jobs of different sizes.
    """
    found: dict[pathlib.Path, int] = {}
    for path in sorted(directory.rglob("*_emb_keys.rank_*")):
        match = _KEYS.fullmatch(path.name)
        if match:
            table, num_ranks = path.with_name(match[1]), int(match[3])
            if found.setdefault(table, num_ranks) != num_ranks:
                raise CheckpointError(
                    f"The dump {table} must be of one job, got files of {num_ranks} "
                    f"and of {found[table]} ranks; remove those of the older dump."
                )
    return found


def tables_of_dumps(
    directory: pathlib.Path, dumps: Mapping[pathlib.Path, int]
) -> TableSource:
    """Opens the tables of a dump.

    Tables of one name in two collections get the path of their file.

    Args:
      directory: directory that was dumped, or a part of it.
      dumps: from `find_dumps`.

    Raises:
      CheckpointError: if a rank's file is missing, or its size contradicts the keys.
    """
    names = [path.name for path in dumps]
    return TableSource(
        origin=f"dynamicemb dump {directory}",
        tables={
            path.name
            if names.count(path.name) == 1
            else path.relative_to(directory).as_posix(): _table(path, num_ranks)
            for path, num_ranks in dumps.items()
        },
    )


def _table(path: pathlib.Path, num_ranks: int) -> SourceTable:
    keys = _files(path, "emb_keys", num_ranks, np.int64)
    sizes = [len(part) for part in keys]
    values = _rows(path, "emb_values", sizes)
    if values is None:
        raise CheckpointError(
            f"{path}_emb_values.rank_0.world_size_{num_ranks} must be beside the keys, "
            "but is missing; copy the whole directory of the dump."
        )
    slots = next((x for item in _SLOTS if (x := _rows(path, item, sizes))), None)
    return SourceTable(
        values=values,
        slots={} if slots is None else _slots(slots, values.shape[1], path),
        ids=np.concatenate(keys),
    )


def _files(
    path: pathlib.Path, item: str, num_ranks: int, dtype: Any
) -> list[np.ndarray]:
    """Returns the numbers in the files of all ranks, mapped to memory; [] for none.

    Raises:
      CheckpointError: if some ranks have a file and others have none.
    """
    names = [f"_{item}.rank_{i}.world_size_{num_ranks}" for i in range(num_ranks)]
    files = [path.with_name(path.name + name) for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if len(missing) == num_ranks:
        return []
    if missing:
        raise CheckpointError(
            f"The dump {path} must have the files of {num_ranks} ranks, but {missing} "
            "are missing; copy the whole directory of the dump."
        )
    # An empty file cannot be mapped.
    return [
        np.memmap(x, dtype, "r") if x.stat().st_size else np.zeros(0, dtype)
        for x in files
    ]


def _rows(path: pathlib.Path, item: str, sizes: Sequence[int]) -> RowArray | None:
    """Returns float32 rows of the files of all ranks; None without numbers.

    Args:
      path: path of the table, without its ending.
      item: kind of the files.
      sizes: keys of each rank.

    Raises:
      CheckpointError: if a file has another number of rows than its rank has keys.
    """
    parts = _files(path, item, len(sizes), np.float32)
    total = sum(len(part) for part in parts)
    if not total:
        return None
    width = total // max(1, sum(sizes))
    if any(len(x) != n * width for x, n in zip(parts, sizes, strict=True)):
        raise CheckpointError(
            f"{path}_{item} must have equally many numbers for each of the {sizes} "
            f"keys of its ranks, got {[len(x) for x in parts]} numbers; copy all files "
            "of the dump again."
        )
    matrices = [part.reshape(-1, width) for part in parts]
    starts = np.cumsum([0, *sizes])

    def read(start: int, num_rows: int) -> np.ndarray:
        pieces = [
            part[max(0, start - first) : max(0, start + num_rows - first)]
            for part, first in zip(matrices, starts[:-1], strict=True)
        ]
        return np.concatenate(pieces)

    return RowArray((int(starts[-1]), width), np.dtype(np.float32), read)


def _slots(rows: RowArray, dim: int, path: pathlib.Path) -> dict[str, RowArray]:
    """Returns the slot variables that the files of an optimizer hold.

    Raises:
      CheckpointError: if the file that names the optimizer is no JSON.
    """
    file = path.with_name(f"{path.name}_opt_args.json")
    try:
        rule = json.loads(file.read_text())["opt_type"]
    except FileNotFoundError:
        rule = None
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error!r}.") from None
    if rule == "adam" and rows.shape[1] == 2 * dim:
        return {"m": rows.columns(0, dim), "v": rows.columns(dim, 2 * dim)}
    if rule == "exact_adagrad" and rows.shape[1] == dim:
        return {"accumulator": rows}
    if rule == "exact_row_wise_adagrad":
        # Older versions write the columns that fill up a line, too.
        return {"accumulator": rows.columns(0, 1).squeezed()}
    return {"opt_values": rows}

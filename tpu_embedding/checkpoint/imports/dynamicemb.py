"""Reads the files that dynamicemb dumps: keys, values and scores of dynamic tables.

Each rank of a job writes binary files of its own, without headers: keys (int64), values
(float32), perhaps scores (int64) and slot variables (float32), all in one order. A file
of JSON names the optimizer and the policy.

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
from tpu_embedding.checkpoint.imports.row_ids import (
    as_counts,
    checked_ids,
    clock_of,
)
from tpu_embedding.checkpoint.imports.source import (
    RowArray,
    RuleSlots,
    SourceIds,
    SourceTable,
    TableSource,
    array_of,
)

_KEYS: Final = re.compile(r"(.+)_emb_keys\.rank_(\d+)\.world_size_(\d+)")
_OPTIMIZER: Final = "{table}_opt_args.json"
_SLOTS: Final = ("emb_opt_values", "opt_values")
_NANOSECONDS: Final = 10**9

_RULES: Final = (
    RuleSlots(rule="adagrad", names={"accumulators": "accumulator"}),
    RuleSlots(rule="adam", names={"momenta": "m", "velocities": "v"}),
    RuleSlots(rule="moments", names={"momenta": "m", "velocities": "v"}),
)


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
    """Opens the tables of a dump; keys and scores are read.

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
        rules=_RULES,
    )


def _table(path: pathlib.Path, num_ranks: int) -> SourceTable:
    keys = _files(path, "emb_keys", num_ranks, np.int64)
    sizes = [len(part) for part in keys]
    values = _rows(path, "emb_values", sizes, np.float32)
    if values is None:
        raise CheckpointError(
            f"{path}_emb_values.rank_0.world_size_{num_ranks} must be beside the keys, "
            "but is missing; copy the whole directory of the dump."
        )
    file = path.with_name(_OPTIMIZER.format(table=path.name))
    described = _description(file)
    ids = checked_ids(np.concatenate(keys), f"dynamicemb table {path}")
    scores = _rows(path, "emb_scores", sizes, np.int64)
    slots = None
    for item in _SLOTS:
        slots = slots or _rows(path, item, sizes, np.float32)
    dim = values.shape[1]
    return SourceTable(
        values=values,
        slots={} if slots is None else _slots(slots, dim, described),
        ids=_with_scores(ids, scores, described),
    )


def _description(file: pathlib.Path) -> Mapping[str, Any]:
    """Returns optimizer and policy of a table; nothing if the file is missing."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} must be JSON, got {error}.") from None
    return found if isinstance(found, dict) else {}


def _files(
    path: pathlib.Path, item: str, num_ranks: int, dtype: Any
) -> list[np.ndarray]:
    """Returns the numbers in the files of all ranks, mapped to memory; [] for none.

    Raises:
      CheckpointError: if some ranks have a file and others have none, or the size of a
        file is no multiple of its numbers.
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
    width = np.dtype(dtype).itemsize
    parts = []
    for file in files:
        size = file.stat().st_size
        if size % width:
            raise CheckpointError(
                f"{file} must have a multiple of {width} bytes, got {size}; it is cut "
                "off. Copy it again."
            )
        # An empty file cannot be mapped.
        parts.append(np.memmap(file, dtype, "r") if size else np.zeros(0, dtype))
    return parts


def _rows(
    path: pathlib.Path, item: str, sizes: Sequence[int], dtype: Any
) -> RowArray | None:
    """Returns rows `[keys, width]` of the files of all ranks; None without files.

    Args:
      path: path of the table, without its ending.
      item: kind of the files.
      sizes: keys of each rank.
      dtype: type of the numbers.

    Raises:
      CheckpointError: if a file has another number of rows than its rank has keys.
    """
    parts = _files(path, item, len(sizes), dtype)
    total = sum(len(part) for part in parts)
    if not parts or (item != "emb_values" and not total):
        return None
    width = total // max(1, sum(sizes))
    for rank, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        if len(part) != size * width or (size and not width):
            raise CheckpointError(
                f"{path}_{item}.rank_{rank}.world_size_{len(sizes)} must have "
                f"{max(width, 1)} numbers for each of the {size} keys of its rank, got "
                f"{len(part)} numbers; copy all files of the dump again."
            )
    return _joined(
        [part.reshape(size, width) for part, size in zip(parts, sizes, strict=True)]
    )


def _joined(parts: Sequence[np.ndarray]) -> RowArray:
    """Returns arrays one after the other; only rows that are read are copied."""
    starts = np.cumsum([0, *(len(part) for part in parts)])

    def read(start: int, num_rows: int) -> np.ndarray:
        pieces = [
            part[max(0, start - first) : max(0, start + num_rows - first)]
            for part, first in zip(parts, starts[:-1], strict=True)
        ]
        return np.concatenate(pieces)

    if len(parts) == 1:
        return array_of(parts[0])
    return RowArray((int(starts[-1]), *parts[0].shape[1:]), parts[0].dtype, read)


def _slots(
    rows: RowArray, dim: int, described: Mapping[str, Any]
) -> dict[str, RowArray]:
    """Returns the slot variables that the files of an optimizer hold."""
    rule, width = described.get("opt_type"), rows.shape[1]
    if rule == "adam" and width == 2 * dim:
        return {"m": _columns(rows, 0, dim), "v": _columns(rows, dim, 2 * dim)}
    if rule == "exact_adagrad" and width == dim:
        return {"accumulator": rows}
    if rule == "exact_row_wise_adagrad":
        # Older versions write the columns that fill up a line, too.
        return {"accumulator": _columns(rows, 0, 1).squeezed()}
    return {"opt_values": rows}


def _columns(rows: RowArray, start: int, end: int) -> RowArray:
    return RowArray(
        (rows.shape[0], end - start),
        rows.dtype,
        lambda first, num_rows: rows.read(first, num_rows)[:, start:end],
        rows.check,
    )


def _with_scores(
    ids: np.ndarray, scores: RowArray | None, described: Mapping[str, Any]
) -> SourceIds:
    """Returns ids with what their scores mean under the policy of the table.

    Scores are steps, numbers of uses, or nanoseconds since the last use. Others are
    left out, as are those of an unknown policy.
    """
    policy = str(described.get("evict_strategy", "")).rpartition(".")[2]
    if scores is None or scores.shape[1] != 1:
        return SourceIds(ids=ids)
    column = np.asarray(scores)[:, 0]
    if policy == "KLfu":
        return SourceIds(ids=ids, counts=as_counts(column))
    if policy == "KLru":
        age = column // _NANOSECONDS
        last_used, clock = clock_of(age.max(initial=0) - age + 1)
        return SourceIds(ids=ids, last_used=last_used, clock=clock)
    if policy == "KCustomized" and described.get("step_score"):
        last_used, clock = clock_of(column, int(described["step_score"]))
        return SourceIds(ids=ids, last_used=last_used, clock=clock)
    return SourceIds(ids=ids)

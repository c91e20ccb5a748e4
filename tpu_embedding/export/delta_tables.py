"""The tables in a delta, and the checks of them before anything is written."""

import pathlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np

from tpu_embedding.dynamic import SLOTS_PER_BUCKET
from tpu_embedding.export.artifact import file_of_table
from tpu_embedding.export.digests import check_file, path_inside
from tpu_embedding.export.row_formats import decode, stored_spec
from tpu_embedding.export.signature import ExportError
from tpu_embedding.export.tensor_files import TensorSpec, check_tensors, read_tensors
from tpu_embedding.rows.file_rows import SCALE_AND_BIAS_BYTES
from tpu_embedding.rows.id_directory import directory_name

COPY_AGAIN: Final = "copy the whole directory again from where it was written."
ROWS_PER_BLOCK: Final = 2**16

_FLOATS: Final = tuple(map(np.dtype, (np.float32, jnp.bfloat16, np.float16)))
_ROW_IDS: Final = np.dtype(np.int32)
_IDS: Final = np.dtype(np.uint64)


class TableDelta(NamedTuple):
    """The changed rows of a table.

    Attributes:
      row_ids: int32 `[rows]`, ascending.
      values: `[rows, dim]` in the type of the trained table. An int8 table has
        FBGEMM's rows, uint8 `[rows, dim + 8]`.
    """

    row_ids: np.ndarray
    values: np.ndarray


class DynamicTableDelta(NamedTuple):
    """The changed ids of a dynamic table.

    Attributes:
      ids: uint64 `[ids]`, rising: new ids, and those whose rows changed.
      values: rows of these ids, in the type of the trained table.
      evicted: uint64, rising: ids that have no row any more.
      default_row: `[1, dim]`, the new learned default row; empty if it is as before.
      is_whole: True if ids that are not in `ids` have no row any more either.
    """

    ids: np.ndarray
    values: np.ndarray
    evicted: np.ndarray
    default_row: np.ndarray
    is_whole: bool


def read_table_delta(
    directory: pathlib.Path, name: str, entry: Mapping[str, Any]
) -> TableDelta | DynamicTableDelta | None:
    """Reads and checks the changed rows of a table.

    Args:
      directory: the delta.
      name: name of the table.
      entry: the table's entry in `delta.json`.

    Returns:
      The rows, mapped into memory; None without changes.

    Raises:
      ExportError: if the file is damaged, lies elsewhere, or contradicts the entry.
    """
    dynamic = entry.get("dynamic")
    num_changes = entry["num_rows"] + (dynamic["num_evicted"] if dynamic else 0)
    if "file" not in entry:
        _require(num_changes == 0, directory, name, "file", "one, as it has rows", None)
        return None
    wanted, digest = file_of_table(name), entry.get("sha256")
    _require(entry["file"] == wanted, directory, name, "file", wanted, entry["file"])
    _require(digest is not None, directory, name, "sha256", "one", digest)
    path = path_inside(directory, wanted)
    check_file(path, entry["sha256"], COPY_AGAIN)
    tensors = read_tensors(path)
    values = tensors.get("values", np.zeros(0))
    specs = {"values": _values_spec(entry, values.dtype)}
    if dynamic is None:
        specs["row_ids"] = TensorSpec((entry["num_rows"],), _ROW_IDS)
        check_tensors(path, tensors, specs)
        table = TableDelta(tensors["row_ids"], values)
        _check_rising(path, name, "row_ids", table.row_ids)
        end = entry["vocabulary_size"]
        last = table.row_ids[-1:]
        _require((last < end).all(), path, name, "row_ids", f"below {end}", last)
    else:
        specs["ids"] = TensorSpec((-1,), _IDS)
        specs["evicted"] = TensorSpec((dynamic["num_evicted"],), _IDS)
        check_tensors(path, tensors, specs)
        ids, evicted = tensors["ids"], tensors["evicted"]
        extra = len(values) - len(ids)
        _require(
            extra in (0, 1), path, name, "values", f"{len(ids)} or one more", extra
        )
        for field in ("ids", "evicted"):
            _check_rising(path, name, field, tensors[field])
        both = np.intersect1d(ids, evicted, assume_unique=True)
        _require(not both.size, path, name, "evicted", "none of the ids", both[:1])
        table = DynamicTableDelta(
            ids=ids,
            values=values[: len(ids)],
            evicted=evicted,
            default_row=values[len(ids) :],
            is_whole=dynamic["is_whole"],
        )
    for rows in values_of(table):
        for begin in range(0, len(rows), ROWS_PER_BLOCK):
            check_finite(path, name, rows[begin : begin + ROWS_PER_BLOCK])
    return table


def check_finite(path: pathlib.Path, name: str, rows: np.ndarray) -> None:
    """Refuses rows that are not finite.

    Raises:
      ExportError: if one is NaN or infinite, maybe since the export's type cannot hold
        its values; `path` names the file or directory.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        is_finite = np.isfinite(decode(rows))
    _require(is_finite.all(), path, name, "values", "finite", "NaN or inf")


def values_of(rows: TableDelta | DynamicTableDelta) -> list[np.ndarray]:
    """Returns all rows of a table that a delta sets."""
    if isinstance(rows, TableDelta):
        return [rows.values]
    return [rows.values, rows.default_row]


def check_export_table(
    directory: pathlib.Path,
    name: str,
    entry: Mapping[str, Any],
    rows: TableDelta | DynamicTableDelta,
) -> None:
    """Refuses changes that the file of an export cannot take.

    Args:
      directory: the export.
      name: name of the table.
      entry: the table's entry in `export.json`.
      rows: the changes.

    Raises:
      ExportError: if the file is another table's, or has no place for the rows.
    """
    path = path_inside(directory, entry["file"])
    stored = stored_spec(entry["vocabulary_size"], entry["dim"], entry["row_format"])
    is_dynamic = isinstance(rows, DynamicTableDelta)
    found = "dynamic" in entry
    _require(found == is_dynamic, path, name, "dynamic", f"{is_dynamic}", found)
    if not isinstance(rows, DynamicTableDelta):
        read_tensors(path, {name: stored})
        # Its rows are overwritten in place.
        links = path.stat().st_nlink
        _require(links == 1, path, name, "file", "a copy, without hard links", links)
        return
    key = directory_name(name)
    any_size = {
        name: TensorSpec((-1, *stored.shape[1:]), stored.dtype),
        key: TensorSpec((-1,), _IDS),
    }
    tensors = read_tensors(path, any_size)
    ids, num_rows = tensors[key], len(tensors[name])
    _check_rising(path, name, key, ids)
    num_default = int(entry["dynamic"]["default_row"] == "learned")
    wanted = len(ids) + num_default
    _require(num_rows == wanted, path, name, "rows", f"{wanted}", num_rows)
    _require(
        len(rows.default_row) <= num_default, path, name, "default_row", "none", "one"
    )
    stays = ids[:0] if rows.is_whole else np.setdiff1d(ids, rows.evicted)
    num_ids = len(np.union1d(stays, rows.ids))
    # The capacity, rounded up to whole buckets.
    end = -(-entry["vocabulary_size"] // SLOTS_PER_BUCKET) * SLOTS_PER_BUCKET
    _require(num_ids <= end, path, name, "number of ids", f"at most {end}", num_ids)


def _values_spec(entry: Mapping[str, Any], dtype: np.dtype) -> TensorSpec:
    """Returns the spec of a table's rows: a float type, or the bytes of int8 rows."""
    num_rows, dim = entry["num_rows"], entry["dim"]
    if dtype == np.uint8:
        return TensorSpec((num_rows, dim + SCALE_AND_BIAS_BYTES), np.dtype(np.uint8))
    return TensorSpec((num_rows, dim), dtype if dtype in _FLOATS else _FLOATS[0])


def _check_rising(path: pathlib.Path, name: str, field: str, ids: np.ndarray) -> None:
    first = ids[:1]
    _require((first >= 0).all(), path, name, field, "0 or more", first)
    rises = ids[1:] > ids[:-1]
    _require(rises.all(), path, name, field, "rising, each id once", "others")


def _require(
    holds: Any, path: pathlib.Path, name: str, field: str, rule: str, got: Any
) -> None:
    if not holds:
        raise ExportError(
            f"{path} cannot be applied: {field} of table {name!r} must be {rule}, got "
            f"{got}; {COPY_AGAIN}"
        )

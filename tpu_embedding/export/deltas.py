"""Deltas: the rows of tables that changed since an export, and how to apply them.

delta.json                  base, identity, steps, tables, digests
tables/NAME.safetensors     tensors `row_ids` and `values` of a table with touched rows;
                            `ids`, `values` and `evicted` of a dynamic one

An export and the deltas behind it form a chain. Each delta names its predecessor by an
identity, a digest of its content. The optimizer's state holds the identity of the
latest export or delta, so checkpoints hold it, too.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from flax import nnx

from tpu_embedding.argument_checks import PATH, takes
from tpu_embedding.export.artifact import (
    TABLES_DIR,
    file_of_table,
    read_document,
    write_artifact,
)
from tpu_embedding.export.delta_chain import DeltaChain, TrackedPart, identity_of
from tpu_embedding.export.delta_tables import (
    COPY_AGAIN,
    ROWS_PER_BLOCK,
    DynamicTableDelta,
    TableDelta,
    check_export_table,
    check_finite,
    read_table_delta,
    values_of,
)
from tpu_embedding.export.digests import (
    DOCUMENT_FILE,
    check_files,
    file_digest,
    path_inside,
)
from tpu_embedding.export.document_schemas import DELTA
from tpu_embedding.export.documents import read_json, write_json
from tpu_embedding.export.row_formats import encode
from tpu_embedding.export.signature import ExportError
from tpu_embedding.export.tensor_files import (
    TensorFile,
    TensorSpec,
    read_tensors,
    writable_tensor,
)
from tpu_embedding.export.writing import Writing, receivers
from tpu_embedding.functional.dynamic_ids import DynamicRows, rows_in_directory
from tpu_embedding.nn.training import MODEL, Optimizer
from tpu_embedding.paths import local_path
from tpu_embedding.plan.dynamic_rows import DynamicTablePlan, dynamic_tables
from tpu_embedding.rows.file_rows import file_row
from tpu_embedding.rows.id_directory import directory_name
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.row_stream import read_blocks

DELTA_FILE: Final = "delta.json"

_FORMAT: Final = "tpu_embedding.delta"
_FORMAT_VERSION: Final = 1
_EXPORT_AGAIN: Final = "take a new full export, or copy this one again."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """A delta that `read_delta` read and checked.

    Attributes:
      identity: the delta's own identity.
      base: identity of the export or delta that it follows.
      base_steps: table to number of its updates in the base.
      steps: table to number of its updates in the delta.
      tables: changed rows by table, mapped into memory. Tables without changed rows are
        missing.
      document: the whole of `delta.json`.
    """

    identity: str
    base: str
    base_steps: Mapping[str, int]
    steps: Mapping[str, int]
    tables: Mapping[str, TableDelta | DynamicTableDelta]
    document: Mapping[str, Any]


@takes("te.export.", model=MODEL, directory=PATH)
def save_delta(
    model: nnx.Module, optimizer: Optimizer, directory: str | pathlib.Path
) -> None:
    """Writes the rows that changed since the latest export or delta.

    The chain starts with `te.export.save_tables(model, directory,
    optimizer=optimizer)`. `apply_delta` applies its deltas in order. All tables that
    are trained must have optimizers wrapped by `te.optimizers.track_touched_rows`.

    All processes of a job call it together, and the first one writes.

    The host holds the ids of the touched rows, and a few blocks of rows. The optimizer
    remembers the delta, and a checkpoint of it does, too. Save one after each delta.

    Of a dynamic table, a delta holds ids and their rows, and the ids that were evicted.
    The first delta behind a restore holds all ids of such tables, unless the checkpoint
    was saved right after the latest export or delta.

    All rows of a table count as changed after `set_embedding_tables`, an import, or a
    restore without the optimizer. After `with_table_values` without slots, call
    `te.functional.with_touched_tables`.

    Args:
      model: owns the tables.
      optimizer: the model's. It changes: the next delta follows this one.
      directory: new directory for the files; it appears when all are written.

    Raises:
      ExportError: a ValueError, if the directory holds files, a table's rows are not
        tracked, or there is no export to follow.

    Example:
      >>> import pathlib, tempfile
      >>> import optax
      >>> import tpu_embedding as te
      >>> rule = te.optimizers.track_touched_rows(te.optimizers.adagrad(0.1))
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> layer = te.TPUEmbedding(te.FeatureConfig(table=table), rule, rngs=nnx.Rngs(0))
      >>> optimizer = te.Optimizer(layer, optax.adam(1e-3))
      >>> directory = pathlib.Path(tempfile.mkdtemp())
      >>> te.export.save_tables(layer, directory / "full", optimizer=optimizer)
      >>> te.export.save_delta(layer, optimizer, directory / "delta")
      >>> dict(te.export.read_delta(directory / "delta").tables)
      {}
    """
    chain = DeltaChain(model, optimizer)
    base = chain.base_identity()
    body: dict[str, Any] = {}

    def write(writing: Writing) -> None:
        writing.do(lambda path: (path / TABLES_DIR).mkdir())
        entries: dict[str, Any] = {}
        for part in chain.parts:
            entries |= _write_stack(part, writing)
        body.update(
            format=_FORMAT,
            format_version=_FORMAT_VERSION,
            base=base,
            base_steps=chain.steps("base_step"),
            steps=chain.steps("update_count"),
            tables=entries,
        )
        body["identity"] = identity_of(body)
        writing.do(lambda path: write_json(path / DELTA_FILE, body))

    write_artifact(directory, write)
    chain.follow(body)


@takes("te.export.", directory=PATH)
def read_delta(directory: str | pathlib.Path) -> Delta:
    """Reads a delta, and checks the digests of its files.

    Args:
      directory: written by `save_delta`.

    Raises:
      ExportError: a ValueError, if the directory holds no delta, or a damaged one.
    """
    path = local_path(directory)
    document = read_json(
        path_inside(path, DELTA_FILE),
        DELTA,
        format_version=_FORMAT_VERSION,
        writer="te.export.save_delta",
        way_out=COPY_AGAIN,
    )
    body = {k: v for k, v in document.items() if k != "identity"}
    if document["identity"] != identity_of(body):
        raise ExportError(f"{path / DELTA_FILE} is damaged; {COPY_AGAIN}")
    if set(body["steps"]) != set(body["base_steps"]):
        raise ExportError(
            f"{path / DELTA_FILE} must have steps and base_steps of the same tables, "
            f"got {sorted(body['steps'])} and {sorted(body['base_steps'])}; "
            f"{COPY_AGAIN}"
        )
    tables = {
        name: rows
        for name, entry in body["tables"].items()
        if (rows := read_table_delta(path, name, entry)) is not None
    }
    return Delta(
        identity=document["identity"],
        base=body["base"],
        base_steps=body["base_steps"],
        steps=body["steps"],
        tables=tables,
        document=document,
    )


@takes("te.export.", export=PATH, delta=PATH)
def apply_delta(export: str | pathlib.Path, delta: str | pathlib.Path) -> None:
    """Applies a delta to the table files of an export, in place.

    After the chain up to a delta, the files equal those of a full export at its step,
    bit for bit. Apply to a copy that no server has open, in one process. If the call is
    interrupted, call it again with the same delta.

    The digests of the export's files are checked before, and brought up to date.

    Args:
      export: directory of `te.export.save_tables(..., optimizer=...)`, of any `dtype`.
      delta: directory of `save_delta`.

    Raises:
      ExportError: a ValueError, if the delta does not follow what the export holds, or
        files are missing or damaged. The export has not changed then.
    """
    path = local_path(export)
    document = read_document(path)
    record = document.get("deltas")
    if record is None:
        raise ExportError(
            f"{path} starts no chain of deltas; export by te.export.save_tables(model, "
            "directory, optimizer=optimizer)."
        )
    change = read_delta(delta)
    _check_order(record, change, path, local_path(delta))
    _check_tables(document, change, path)
    changed = {document["tables"][name]["file"] for name in change.tables}
    # The tables of a delta that was interrupted have no digest.
    skipped = changed if "applying" in record else set()
    check_files(path, document, skipped=skipped, way_out=_EXPORT_AGAIN)
    applying = record | {"applying": change.identity}
    write_json(path / DOCUMENT_FILE, document | {"deltas": applying})
    for name, rows in change.tables.items():
        if isinstance(rows, TableDelta):
            _write_rows(path, name, document["tables"][name], rows)
        else:
            _write_ids(path, name, document["tables"][name], rows)
        # The rounding error was that of rows that are gone.
        document["tables"][name].pop("error", None)
    document["files"] |= {file: file_digest(path / file) for file in changed}
    steps = record["steps"] | change.steps
    document["deltas"] = {"identity": change.identity, "steps": steps}
    write_json(path / DOCUMENT_FILE, document)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Change:
    """The changed rows of a table, before their values are read.

    Attributes:
      rows: rows of the table, rising.
      places: place of each of these among the values of the delta.
      tensors: what the delta's file holds beside the values.
      entry: what `delta.json` tells beside sizes.
      has_file: True if there is anything to write.
    """

    rows: np.ndarray
    places: slice | np.ndarray
    tensors: Mapping[str, np.ndarray]
    entry: Mapping[str, Any]
    has_file: bool


def _write_stack(part: TrackedPart, writing: Writing) -> dict[str, Any]:
    """Writes the touched rows of a stack, and returns the entries of its tables."""
    stack = part.tracked.stack
    packed = part.layer.tables.get_value()[stack.name]
    changes = _changes_of(part)
    row = file_row(packed)
    files: dict[str, TensorFile] = {}
    entries: dict[str, Any] = {
        part.prefix + table.name: {
            "vocabulary_size": table.config.max_rows,
            "dim": table.config.dim,
            "num_rows": len(changes[table.name].rows),
            **changes[table.name].entry,
        }
        for table in stack.tables
    }

    def make_files(directory: pathlib.Path) -> None:
        for table, change in changes.items():
            if change.has_file:
                shape = (len(change.rows), *row.shape)
                specs = {"values": TensorSpec(shape, np.dtype(row.dtype))}
                for name, tensor in change.tensors.items():
                    specs[name] = TensorSpec(tensor.shape, tensor.dtype)
                path = directory / file_of_table(part.prefix + table)
                files[table] = TensorFile(path, specs)
                for name, tensor in change.tensors.items():
                    files[table].write(name, 0, tensor)

    def add_digests(directory: pathlib.Path) -> None:
        for table in files:
            name = part.prefix + table
            digest = file_digest(directory / file_of_table(name))
            entries[name] |= {"file": file_of_table(name), "sha256": digest}

    writing.do(make_files)
    rows_of = {table: change.rows for table, change in changes.items()}
    for table, begin, rows in _touched_values(packed, part, rows_of):
        places = changes[table].places
        if isinstance(places, slice):
            places = slice(begin, begin + len(rows))
        else:
            places = places[begin : begin + len(rows)]
        writing.do(
            lambda _, x=(table, places, rows): files[x[0]].write_places(
                "values", *x[1:]
            )
        )
    writing.do(add_digests)
    return entries


def _changes_of(part: TrackedPart) -> dict[str, _Change]:
    """Returns what changed in each table of a stack."""
    tracked, layer = part.tracked, part.layer
    base = int(tracked.state.base_id)
    set_by_hand = layer.set_tables.set_since(base)
    touched = tracked.touched_since(
        int(tracked.state.base_step), layer.plan, receivers()
    )
    if tracked.stack.is_dynamic:
        name = directory_name(tracked.stack.name)
        found = rows_in_directory(layer.tables.get_value()[name], tracked.stack)
        changes = {}
        for member in dynamic_tables(tracked.stack):
            name = member.table.name
            before = layer.set_tables.exported_ids(base, name)
            before = None if name in set_by_hand else before
            changes[name] = _changed_ids(found[name], before, touched[name], member)
        return changes
    changed = touched | {
        table.name: np.arange(table.config.max_rows, dtype=np.int32)
        for table in tracked.stack.tables
        if table.name in set_by_hand
    }
    return {
        name: _Change(
            rows=rows,
            places=slice(0, len(rows)),
            tensors={"row_ids": rows},
            entry={},
            has_file=len(rows) > 0,
        )
        for name, rows in changed.items()
    }


def _changed_ids(
    now: DynamicRows,
    before: np.ndarray | None,
    touched: np.ndarray,
    member: DynamicTablePlan,
) -> _Change:
    """Returns what changed in a dynamic table.

    Args:
      now: present ids and their rows.
      before: ids in the base of the delta; None: unknown, so all ids are written.
      touched: touched rows. A row that went to another id is one of them.
      member: plan of the table.
    """
    is_changed, evicted = np.isin(now.rows, touched), now.ids[:0]
    if before is None:
        is_changed[:] = True
    else:
        evicted = np.setdiff1d(before, now.ids, assume_unique=True)
    rows = now.rows[is_changed]
    default = member.default_row
    if default is not None and (before is None or default in touched):
        rows = np.append(rows, default)
    order = np.argsort(rows)
    return _Change(
        rows=rows[order],
        places=order,
        tensors={"ids": now.ids[is_changed], "evicted": evicted},
        entry={"dynamic": {"num_evicted": len(evicted), "is_whole": before is None}},
        has_file=before is None or len(rows) + len(evicted) > 0,
    )


def _touched_values(
    packed: PackedRows, part: TrackedPart, touched: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yields table, place among its touched rows, and values of these rows."""
    # Rows before the first touched one, and behind the last, are not read.
    ranges = {
        name: (int(ids[0]), int(ids[-1]) + 1)
        for name, ids in touched.items()
        if len(ids)
    }
    for blocks in read_blocks(
        packed, part.tracked.stack, part.layer.plan, ranges, receivers()
    ):
        for table, start, rows in blocks:
            ids = touched[table]
            begin, end = np.searchsorted(ids, [start, start + len(rows)])
            if begin < end:
                yield table, int(begin), rows[ids[begin:end] - start]


def _write_rows(
    directory: pathlib.Path, name: str, entry: Mapping[str, Any], rows: TableDelta
) -> None:
    """Overwrites rows of the file of a table."""
    stored = writable_tensor(directory / entry["file"], name)
    for part, values in _encoded_rows(name, entry, rows.values):
        stored[rows.row_ids[part]] = values
    stored.flush()


def _write_ids(
    directory: pathlib.Path,
    name: str,
    entry: dict[str, Any],
    change: DynamicTableDelta,
) -> None:
    """Replaces the file of a dynamic table by one with the ids of a delta."""
    path, key = directory / entry["file"], directory_name(name)
    old = read_tensors(path)
    stays = ~np.isin(old[key], np.concatenate([change.evicted, change.ids]))
    if change.is_whole:
        stays[:] = False
    (kept,) = np.nonzero(stays)
    ids = np.concatenate([old[key][kept], change.ids])
    order = np.argsort(ids)
    places = np.empty(len(ids), np.int64)
    places[order] = np.arange(len(ids))
    old_default = old[name][len(old[key]) :]
    num_rows = len(ids) + len(old_default)
    specs = {
        name: TensorSpec((num_rows, *old[name].shape[1:]), old[name].dtype),
        key: TensorSpec(ids.shape, ids.dtype),
    }
    metadata = {"row_format": entry["row_format"], "dim": str(entry["dim"])}
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    file = TensorFile(partial, specs, metadata)
    file.write(key, 0, ids[order])
    for begin in range(0, len(kept), ROWS_PER_BLOCK):
        part = slice(begin, begin + ROWS_PER_BLOCK)
        file.write_places(name, places[: len(kept)][part], old[name][kept[part]])
    for place, values in _encoded_rows(name, entry, change.values):
        file.write_places(name, places[len(kept) :][place], values)
    file.write(name, len(ids), old_default)
    for _, values in _encoded_rows(name, entry, change.default_row):
        file.write(name, len(ids), values)
    partial.replace(path)
    entry["shape"] = [num_rows, *entry["shape"][1:]]
    entry["dynamic"]["num_ids"] = len(ids)


def _encoded_rows(
    name: str, entry: Mapping[str, Any], values: np.ndarray
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields places of rows, and rows as the export stores them, block by block."""
    for begin in range(0, len(values), ROWS_PER_BLOCK):
        part = slice(begin, begin + ROWS_PER_BLOCK)
        yield part, encode(values[part], entry["row_format"], f"table {name!r}")


def _check_order(
    record: Mapping[str, Any], delta: Delta, export: pathlib.Path, path: pathlib.Path
) -> None:
    """Refuses a delta that does not follow what an export holds."""
    applying = record.get("applying")
    if applying is not None:
        if applying == delta.identity:
            return
        raise ExportError(
            f"Applying the delta {applying} to {export} was interrupted; apply that "
            f"one again first, got {path} with {delta.identity}."
        )
    if delta.identity == record["identity"]:
        raise ExportError(
            f"The delta {path} is applied to {export} already; go on with the next one."
        )
    if delta.base == record["identity"] and delta.base_steps == record["steps"]:
        return
    here, there = _steps(record["steps"]), _steps(delta.base_steps)
    raise ExportError(
        f"The delta {path} must follow {record['identity']} of step {here}, which "
        f"{export} holds, but it follows {delta.base} of step {there}. Apply the "
        "deltas in the order in which they were written, each once; after a gap, or "
        "to another model's export, take a new full export."
    )


def _check_tables(
    document: Mapping[str, Any], delta: Delta, path: pathlib.Path
) -> None:
    """Refuses a delta of tables or rows that the export cannot hold."""
    for name, entry in delta.document["tables"].items():
        there = document["tables"].get(name, {})
        for field in ("vocabulary_size", "dim"):
            if there.get(field) != entry[field]:
                raise ExportError(
                    f"Table {name!r} of the delta has {field} {entry[field]}, got "
                    f"{there.get(field)} in {path}; take a new full export."
                )
    for name, rows in delta.tables.items():
        entry = document["tables"][name]
        check_export_table(path, name, entry, rows)
        # Raises before a file changes if a row has no code in the export's type.
        for values in values_of(rows):
            for _, stored in _encoded_rows(name, entry, values):
                check_finite(path, name, stored)


def _steps(steps: Mapping[str, int]) -> str:
    """Returns the numbers of updates of tables, usually all the same, as text."""
    return " or ".join(str(step) for step in sorted(set(steps.values())))

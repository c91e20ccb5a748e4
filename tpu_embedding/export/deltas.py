"""Deltas: what differs between two exports, so that a server need not copy all again.

delta.json                  digest of the older export's export.json, digests of files
export.json                 that of the newer export
tables/NAME.safetensors     of a table that differs: the rows that do, and their places
others                      whole files of the newer export that differ

A tensor `T` of a table, `[rows, ...]`, becomes two: `rows`, the rows that differ, in
`T`, and their numbers in `T:rows`. Ids of dynamic tables lie at fixed places, so those
that came or were evicted are rows that differ, too.
"""

import dataclasses
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Final, Literal

import numpy as np

from tpu_embedding.argument_checks import PATH, takes
from tpu_embedding.export.directories import new_directory
from tpu_embedding.export.documents import (
    DOCUMENT_FILE,
    TABLES_DIR,
    ExportDocument,
    check_files,
    digests_of_files,
    file_digest,
    path_inside,
    read_document,
    read_json,
    write_json,
)
from tpu_embedding.export.signature import ExportError
from tpu_embedding.export.tensor_files import (
    TensorSpec,
    check_tensors,
    read_tensors,
    spec_of,
    writable_tensor,
    write_tensors,
)
from tpu_embedding.paths import local_path

DELTA_FILE: Final = "delta.json"
_BLOCK_BYTES: Final = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaDocument:
    """The content of `delta.json`.

    Attributes:
      base: SHA-256 of the older export's `export.json`.
      files: path of each other file of the delta to its SHA-256.
    """

    format: Literal["tpu_embedding.delta"] = "tpu_embedding.delta"
    format_version: Literal[2] = 2
    base: str
    files: dict[str, str]


@takes("te.export.", export=PATH, base=PATH, directory=PATH)
def save_delta(
    export: str | pathlib.Path,
    base: str | pathlib.Path,
    directory: str | pathlib.Path,
) -> None:
    """Writes what differs between two exports of one model.

    Files are compared by their digests, and tables that differ by blocks of rows, bit
    for bit. A table passes through memory in blocks; the rows that differ are held.

    Args:
      export: the newer export, of `save`, `save_tables` or `apply_delta`.
      base: the older export.
      directory: new directory for the files; it appears when all are written.

    Raises:
      ExportError: a ValueError, if an export is damaged, or if their tables have
        other names, shapes or types; or if the directory holds files.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=3, dim=2, name="movie")
      >>> layer = te.TPUEmbedding(te.FeatureConfig(table=table), rngs=nnx.Rngs(0))
      >>> path = pathlib.Path(tempfile.mkdtemp())
      >>> te.export.save_tables(layer, path / "monday")
      >>> layer.set_embedding_tables({"movie": np.ones((3, 2))})
      >>> te.export.save_tables(layer, path / "tuesday")
      >>> te.export.save_delta(path / "tuesday", path / "monday", path / "delta")
      >>> te.export.apply_delta(path / "monday", path / "delta")
      >>> [float(rows.mean()) for rows in read_tensors(
      ...     path / "monday" / "tables" / "movie.safetensors").values()]
      [1.0]
    """
    new, old = local_path(export), local_path(base)
    new_files, old_files = read_document(new).files, read_document(old).files
    _check_same_files(new_files, old_files, new, old)
    check_files(new, new_files)
    check_files(old, old_files)
    with new_directory(directory) as path:
        if path is None:
            return
        (path / TABLES_DIR).mkdir()
        for name, digest in new_files.items():
            if digest == old_files[name]:
                continue
            if name.startswith(f"{TABLES_DIR}/"):
                write_tensors(path / name, _changed_rows(new / name, old / name))
            else:
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(new / name, path / name)
        shutil.copyfile(new / DOCUMENT_FILE, path / DOCUMENT_FILE)
        document = DeltaDocument(
            base=file_digest(old / DOCUMENT_FILE), files=digests_of_files(path)
        )
        write_json(path / DELTA_FILE, document)


def _check_same_files(
    new_files: Mapping[str, str],
    old_files: Mapping[str, str],
    new: pathlib.Path,
    old: pathlib.Path,
) -> None:
    if different := sorted(new_files.keys() ^ old_files.keys()):
        raise ExportError(
            f"A delta needs two exports of the same files, but {different} are in one "
            f"of {new} and {old} only; serve the whole newer export."
        )


def _changed_rows(new: pathlib.Path, old: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the rows of a table's file that differ from another's, as tensors."""
    tensors, before = read_tensors(new), read_tensors(old)
    check_tensors(new, tensors, before)
    changed: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        row_bytes = max(1, tensor.nbytes // max(1, len(tensor)))
        size = max(1, _BLOCK_BYTES // row_bytes)
        numbers = [np.zeros(0, np.int64)]
        for start in range(0, len(tensor), size):
            pair = (x[start : start + size] for x in (tensor, before[name]))
            rows, others = (np.ascontiguousarray(x).view(np.uint8) for x in pair)
            numbers.append(start + np.flatnonzero((rows != others).any(axis=1)))
        changed[f"{name}:rows"] = np.concatenate(numbers)
        changed[name] = tensor[changed[f"{name}:rows"]]
    return changed


@takes("te.export.", export=PATH, delta=PATH)
def apply_delta(export: str | pathlib.Path, delta: str | pathlib.Path) -> None:
    """Makes the newer export of a delta out of the older one, in place.

    The files of tables are copied, changed, and compared with the digests of the newer
    export; only then do they take the place of the old ones. So the export's disk needs
    room for a second copy of the tables that change. If the call is interrupted while
    files are replaced, call it again with the same delta.

    Args:
      export: the older export; no server must have its files open while it changes.
      delta: directory of `save_delta`.

    Raises:
      ExportError: a ValueError, if the delta belongs to another export, or files are
        missing or damaged. The export has not changed then.
    """
    path, change = local_path(export), local_path(delta)
    facts, later = _read_delta(change)
    now = read_document(path)
    if file_digest(path / DOCUMENT_FILE) != facts.base:
        raise ExportError(
            f"The delta {change} does not follow the export {path}: it was made from "
            "another one, or is applied already. Apply deltas in the order in which "
            "they were made, or copy the whole newer export."
        )
    _check_same_files(later.files, now.files, change, path)
    found = {name: _digest_inside(path, name) for name in now.files}
    # Of an interrupted call, some files are the newer ones.
    check_files(
        path, {k: x for k, x in now.files.items() if found[k] != later.files[k]}
    )
    changed = [name for name, digest in found.items() if digest != later.files[name]]
    if missing := sorted({*changed, DOCUMENT_FILE} - facts.files.keys()):
        raise ExportError(
            f"{change / DELTA_FILE} must have digests of {missing}, which differ; copy "
            "the delta again."
        )
    with tempfile.TemporaryDirectory(
        prefix=f".{path.name}.", dir=path.parent
    ) as scratch:
        staged = pathlib.Path(scratch)
        for name in changed:
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            _stage(path / name, change / name, staged / name)
        check_files(staged, {name: later.files[name] for name in changed})
        shutil.copyfile(change / DOCUMENT_FILE, staged / DOCUMENT_FILE)
        for name in (*changed, DOCUMENT_FILE):
            (staged / name).replace(path / name)


def _read_delta(directory: pathlib.Path) -> tuple[DeltaDocument, ExportDocument]:
    """Returns the documents of a delta whose files are as they were written."""
    path = path_inside(directory, DELTA_FILE)
    document = read_json(path, DeltaDocument, "te.export.save_delta")
    check_files(directory, document.files)
    return document, read_document(directory)


def _digest_inside(directory: pathlib.Path, name: str) -> str | None:
    path = path_inside(directory, name)
    return file_digest(path) if path.is_file() else None


def _stage(old: pathlib.Path, source: pathlib.Path, target: pathlib.Path) -> None:
    """Makes a file of the newer export; whether it is right, its digest will tell."""
    if source.parent.name != TABLES_DIR:
        shutil.copyfile(source, target)
        return
    shutil.copyfile(old, target)
    changed = read_tensors(source)
    for tensor, spec in {k: spec_of(x) for k, x in read_tensors(old).items()}.items():
        numbers, rows = changed.get(f"{tensor}:rows"), changed.get(tensor)
        if numbers is None or rows is None or not _fits(numbers, rows, spec):
            raise ExportError(
                f"{source} must hold rows of {spec.dtype} {list(spec.shape)} in "
                f"{tensor!r}, and their numbers in '{tensor}:rows'; make the delta "
                "again."
            )
        if len(numbers):
            writable_tensor(target, tensor)[numbers] = rows


def _fits(numbers: np.ndarray, rows: np.ndarray, spec: TensorSpec) -> bool:
    """Returns True if rows and their numbers are some of a tensor's."""
    is_kind = numbers.dtype == np.int64 and numbers.ndim == 1
    wanted = TensorSpec((len(numbers), *spec.shape[1:]), spec.dtype)
    if not is_kind or spec_of(rows) != wanted:
        return False
    return not len(numbers) or 0 <= numbers.min() <= numbers.max() < spec.shape[0]

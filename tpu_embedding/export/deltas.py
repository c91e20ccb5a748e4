"""Deltas between two exports, so that a server need not copy a whole export again.

A delta holds the newer `export.json`, the older one as `base.json`, and the files that
changed. In a delta, a table file has only the changed rows of each tensor `T`, and
their row numbers as the tensor `T:rows`. In a dynamic table, ids have fixed places, so
inserts and evictions appear as changed rows.
"""

import pathlib
import shutil
from typing import Final

import numpy as np

from tpu_embedding.argument_checks import invalid
from tpu_embedding.export.documents import (
    DOCUMENT_FILE,
    check_files,
    files_of,
    new_directory,
    read_document,
)
from tpu_embedding.export.program_inputs import ExportError
from tpu_embedding.export.table_files import (
    TABLES_DIR,
    read_tensors,
    write_rows,
    write_tensors,
)
from tpu_embedding.paths import local_path

BASE_FILE: Final = "base.json"
_BLOCK_BYTES: Final = 2**24
_IN_FULL: Final = "Serve the newer export in full."


def save_delta(
    export: str | pathlib.Path,
    base: str | pathlib.Path,
    directory: str | pathlib.Path,
) -> None:
    """Writes the differences between two exports of the same model.

    Files are compared by digest. If a table file has changed, its rows are compared bit
    for bit, block by block. Only changed rows are held in memory.

    Args:
      export: newer export, from `save`, `save_tables` or `apply_delta`.
      base: older export.
      directory: new directory for the delta. It appears once all files are written.

    Raises:
      ExportError: if an export is damaged, or if table names, shapes or types differ.
        Also raised if the directory holds files or cannot be written. `ExportError` is
        a ValueError.

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
      >>> te.export.apply_delta(path / "monday", path / "delta", path / "served")
      >>> [float(rows.mean()) for rows in read_tensors(
      ...     path / "served" / "tables" / "movie.safetensors").values()]
      [1.0]
    """
    new, old = local_path(export), local_path(base)
    new_files, old_files = read_document(new).files, read_document(old).files
    check_files(new, new_files)
    check_files(old, old_files)
    if different := sorted(new_files.keys() ^ old_files.keys()):
        rule = f"have the same files as {old} for a delta"
        raise invalid(str(new), rule, different, _IN_FULL, ExportError)
    with new_directory(directory) as path:
        if path is None:
            return
        for name, source in files_of(new).items():
            if new_files[name] == old_files[name]:
                continue
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            if source.parent.name == TABLES_DIR:
                changed = _changed_rows(source, old / name)
                write_tensors(path / name, changed)
            else:
                shutil.copyfile(source, path / name)
        shutil.copyfile(new / DOCUMENT_FILE, path / DOCUMENT_FILE)
        shutil.copyfile(old / DOCUMENT_FILE, path / BASE_FILE)


def _changed_rows(new: pathlib.Path, old: pathlib.Path) -> dict[str, np.ndarray]:
    """Collects the rows that differ between two versions of a table's file."""
    tensors, before = read_tensors(new), read_tensors(old)
    changed: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        other = before.get(name, np.zeros(0))
        is_table = tensor.ndim == 2 and tensor.size
        if not is_table or (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
            rule = f"be {other.dtype}{list(other.shape)}, as in {old}"
            owner = f"Tensor {name!r} of {new}"
            raise invalid(owner, rule, tensor, _IN_FULL, ExportError)
        size = max(1, _BLOCK_BYTES // tensor[0].nbytes)
        numbers = [np.zeros(0, np.int64)]
        for start in range(0, len(tensor), size):
            # Compare bytes, so that equal NaNs match, and -0.0 differs from 0.0.
            pair = (x[start : start + size] for x in (tensor, other))
            rows, others = (np.ascontiguousarray(x).view(np.uint8) for x in pair)
            numbers.append(start + np.flatnonzero((rows != others).any(axis=1)))
        changed[f"{name}:rows"] = np.concatenate(numbers)
        changed[name] = tensor[changed[f"{name}:rows"]]
    return changed


def apply_delta(
    export: str | pathlib.Path,
    delta: str | pathlib.Path,
    directory: str | pathlib.Path,
) -> None:
    """Creates a newer export from the older one and a delta.

    The older export is unchanged, so your server may keep using it. All files are
    checked against the newer digests before the directory appears.

    Args:
      export: older export.
      delta: directory from `save_delta`.
      directory: new directory for the newer export.

    Raises:
      ExportError: if the delta belongs to a different export, or if files are missing,
        damaged or symbolic links. Also raised if the directory holds files or cannot be
        written. `ExportError` is a ValueError.

    Example:
      >>> import tempfile
      >>> from flax import nnx
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=3, dim=2, name="movie")
      >>> layer = te.TPUEmbedding(te.FeatureConfig(table=table), rngs=nnx.Rngs(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = pathlib.Path(folder)
      ...     te.export.save_tables(layer, path / "old")
      ...     layer.set_embedding_tables({"movie": np.ones((3, 2))})
      ...     te.export.save_tables(layer, path / "new")
      ...     te.export.save_delta(path / "new", path / "old", path / "delta")
      ...     te.export.apply_delta(path / "old", path / "delta", path / "served")
      ...     sorted(files_of(path / "served")) == sorted(files_of(path / "new"))
      True
    """
    old, change = local_path(export), local_path(delta)
    later = read_document(change)
    # Raises if the older directory is not an export.
    read_document(old)
    changed, base = files_of(change), change / BASE_FILE
    if not base.is_file() or base.read_bytes() != (old / DOCUMENT_FILE).read_bytes():
        raise ExportError(
            f"The delta {change} does not follow the export {old}. Apply deltas in the "
            "order in which they were made, or copy the newer export in full."
        )
    with new_directory(directory) as path:
        if path is None:
            return
        for name, source in files_of(old).items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            # With a hard link, the rows written below would change the older export.
            shutil.copyfile(source, path / name)
            if name in changed and source.parent.name == TABLES_DIR:
                _set_rows(path / name, changed[name])
            elif name in changed:
                shutil.copyfile(changed[name], path / name)
        shutil.copyfile(change / DOCUMENT_FILE, path / DOCUMENT_FILE)
        check_files(path, later.files, f"{old} with the delta {change}")


def _set_rows(table: pathlib.Path, source: pathlib.Path) -> None:
    """Writes changed rows into a table file. The caller checks the digest."""
    changed = read_tensors(source)
    for name, tensor in read_tensors(table).items():
        row_ids = changed.get(f"{name}:rows", np.zeros(0))
        rows = changed.get(name, np.zeros(0))
        # Deltas may be forged, and a wrong row number would write outside the tensor.
        is_valid = (
            tensor.ndim > 0
            and (row_ids.ndim, row_ids.dtype) == (1, np.int64)
            and rows.dtype == tensor.dtype
            and rows.shape == (row_ids.size, *tensor.shape[1:])
            and ((row_ids >= 0) & (row_ids < tensor.shape[0])).all()
            and (row_ids[1:] > row_ids[:-1]).all()
        )
        if not is_valid:
            rule = f"have {tensor.dtype}{list(tensor.shape[1:])} rows of {name!r} and "
            rule += f"their ascending int64 row numbers in '{name}:rows'"
            fix = "Make the delta again."
            raise invalid(str(source), rule, rows, fix, ExportError)
        write_rows(table, name, row_ids, rows)

"""Makes directories that appear only when all of their files are there."""

import contextlib
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from tpu_embedding.export.signature import ExportError
from tpu_embedding.paths import local_path


@contextlib.contextmanager
def new_directory(directory: str | pathlib.Path) -> Iterator[pathlib.Path | None]:
    """Yields a directory to fill, which gets its name at the end.

    The files are written to `.export-NUMBER.partial` next to the directory, and flushed
    to the disk before the rename. If several writers have one path, the first to end
    gets it, and the rename of each later one fails. An error removes what was written;
    only a killed process leaves its `.partial` behind.

    All processes of a job call it together, and the first one writes. An error on that
    one ends its process, and with it the job.

    Args:
      directory: must not exist, or be empty.

    Yields:
      The directory to fill; None on other processes than the first.

    Raises:
      ExportError: if there are files in the directory, or it cannot be written, as on a
        full disk.
    """
    if jax.process_index() == 0:
        path = local_path(directory).resolve()
        partial = path.with_name(f".export-{uuid.uuid4().hex}.partial")
        try:
            check_new_directory(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.mkdir()
            yield partial
            _flush(partial)
            partial.rename(path)  # Replaces an empty directory only.
            _flush_names(path.parent)
        except OSError as error:
            check_new_directory(path)
            raise ExportError(
                f"{path} cannot be written, and nothing of it is kept: {error}. Free "
                "space on the disk, or export to another directory."
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    else:
        yield None
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("end of an export")


def check_new_directory(path: pathlib.Path) -> None:
    """Raises an ExportError if there are files in a directory."""
    try:
        is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    except OSError as error:
        raise ExportError(
            f"{path} must be a new directory: {error}; export to another one."
        ) from error
    if not is_free:
        raise ExportError(
            f"{path} must be a new directory, but it holds files; remove it, or export "
            "to another one."
        )


def _flush(directory: pathlib.Path) -> None:
    """Writes all files of a directory to the disk, which may be full only now."""
    for folder, _, files in os.walk(directory):
        for name in files:
            with open(os.path.join(folder, name), "rb") as file:
                os.fsync(file.fileno())
        _flush_names(pathlib.Path(folder))


def _flush_names(directory: pathlib.Path) -> None:
    """Writes the names in a directory to the disk, on file systems that can."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Makes directories that appear only when all of their files are there."""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from tpu_embedding.export.signature import ExportError
from tpu_embedding.paths import local_path


@contextlib.contextmanager
def new_directory(directory: str | pathlib.Path) -> Iterator[pathlib.Path | None]:
    """Yields a directory to fill, which gets its name at the end.

    All processes of a job call it together, and the first one writes. An error on that
    one ends its process, and with it the job.

    Args:
      directory: must not exist, or be empty.

    Yields:
      The directory to fill; None on other processes than the first.

    Raises:
      ExportError: if there are files in the directory.
    """
    path = local_path(directory)
    if jax.process_index() == 0:
        check_new_directory(path)
        partial = path.with_name(f".{path.name}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            if path.exists():
                path.rmdir()
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    else:
        yield None
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("end of an export")


def check_new_directory(path: pathlib.Path) -> None:
    """Raises an ExportError if there are files in a directory."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ExportError(
            f"{path} must be a new directory, but it holds files; remove it, or export "
            "to another one."
        )

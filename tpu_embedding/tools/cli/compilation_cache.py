"""Keeps the compiled programs of `tpu-embedding train` on disk, for its next start.

JAX has such a cache, and leaves it off. Its key is the program, the options and the
version of the compiler, and the kind of the devices; for CPUs that includes the
processor's instructions. A process that cannot read an entry compiles the program anew.
In a job of several processes, the first one writes, and all read.
"""

import os
import pathlib
import sys
import tempfile
from typing import Final

import jax

from tpu_embedding.distributed.job import Job
from tpu_embedding.distributed.output import print_line
from tpu_embedding.paths import user_cache

MAX_CACHE_BYTES: Final = 2**30
"""Size to which a start cuts the cache of the user; programs used last stay."""

DIRECTORY: Final = "programs"
"""Directory of the programs in the cache of the user."""


def use_compilation_cache(job: Job) -> None:
    """Lets JAX keep compiled programs, in `JAX_COMPILATION_CACHE_DIR` or by default.

    The default is a directory in the user's cache. A directory that JAX has been given
    already stays, and so does `JAX_ENABLE_COMPILATION_CACHE=false`. If the directory
    cannot be written, the run goes on without a cache. Call it before JAX compiles.

    Args:
      job: job of this process, whose first process says why there is no cache.
    """
    if not jax.config.jax_enable_compilation_cache:
        return
    if not jax.config.jax_compilation_cache_dir:
        directory = None
        try:
            directory = user_cache() / DIRECTORY
            _make_writable(directory)
        except (OSError, RuntimeError) as error:  # RuntimeError: no home directory.
            if job.is_first:
                print_line(f"compiled programs are not kept: {error}", sys.stderr)
            return
        if job.is_first:
            _remove_oldest(directory, MAX_CACHE_BYTES)
        jax.config.update("jax_compilation_cache_dir", str(directory))
    # JAX would keep programs that took a second. A start has dozens of small ones.
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _make_writable(directory: pathlib.Path) -> None:
    """Creates a directory; raises an `OSError` if no file can be written there."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass


def _remove_oldest(directory: pathlib.Path, max_bytes: int) -> None:
    """Removes the files that were read least recently, beyond a total size."""
    found = []
    for path in directory.iterdir():
        try:
            status = path.stat()
        except OSError:  # Another process was faster.
            continue
        found.append((status.st_atime, status.st_size, path))
    kept_bytes = 0
    for _, size, path in sorted(found, reverse=True):
        kept_bytes += size
        if kept_bytes > max_bytes:
            path.unlink(missing_ok=True)

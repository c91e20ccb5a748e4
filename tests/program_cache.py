"""Keeps programs that tests compile: on disk for later runs, in memory not for long."""

import gc
import itertools
import os
import pathlib

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs on disk, for all processes of a run and for later runs.

    The cache is beside pytest's own: `pytest --cache-clear` empties it. Its key is the
    program with all options of the compiler, so a change of the code is seen.
    """
    if config.pluginmanager.has_plugin("cacheprovider"):
        directory = config.cache.mkdir("xla")
        # Also for the processes that tests start, in place of the user's cache.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory)
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def _no_cache_for_tpus(request):
    """Leaves programs for TPU topologies out of the cache: they cannot be read back."""
    is_for_tpu = request.node.get_closest_marker("tpu_compiler") is not None
    if is_for_tpu:
        _enable_cache(False)
    yield
    if is_for_tpu:
        _enable_cache(True)


def _enable_cache(is_enabled: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", is_enabled)
    reset_cache()


def reset_cache() -> None:
    """Makes JAX look at the options of the cache again, which it does once only."""
    compilation_cache.reset_cache()


TESTS_PER_CACHE = 300
TESTS_PER_LOOK = 5
MAX_MAPS = 25_000
"""Linux allows a process 65,530 maps of memory."""
MAPS = pathlib.Path("/proc/self/maps")
_tests_run = itertools.count(1)


@pytest.fixture(autouse=True)
def _drop_compiled_programs():
    """Frees compiled programs now and then.

    Each maps memory, and a process that keeps some thousand of them reaches the limit
    of the operating system, which ends it within the compiler.
    """
    yield
    number = next(_tests_run)
    has_many_maps = False
    if number % TESTS_PER_LOOK == 0 and MAPS.exists():
        has_many_maps = MAPS.read_bytes().count(b"\n") > MAX_MAPS
    if has_many_maps or number % TESTS_PER_CACHE == 0:
        jax.clear_caches()
        gc.collect()

"""Shared by benchmarks of this machine: fresh processes, clocks and documents."""

import concurrent.futures
import dataclasses
import json
import multiprocessing
import pathlib
import platform
import resource
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from processor import describe_machine


def run_fresh(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of a module in a new process, which compiles everything anew."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


@dataclasses.dataclass(frozen=True)
class Use:
    """Time and memory that work has taken.

    Attributes:
      seconds: on the clock.
      cpu_seconds: of all threads.
      peak_bytes: memory at its peak, above that before the work.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def measure(work: Callable[[], Any]) -> tuple[Any, Use]:
    """Runs work to its end on the device; returns its result and what it took.

    The memory of the process must not have been higher before.
    """
    jax.block_until_ready(jax.numpy.zeros(1))  # Starts JAX, which is not measured.
    before = _resident_bytes()
    start, cpu_start = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(work())
    seconds = time.perf_counter() - start
    cpu_seconds = time.process_time() - cpu_start
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return result, Use(seconds, cpu_seconds, peak - before)


def _resident_bytes() -> int:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def write_document(
    file: pathlib.Path | None,
    benchmark: str,
    *,
    shapes: Mapping[str, Any],
    results: list[dict[str, Any]],
    **fields: Any,
) -> None:
    """Writes what `record.py` reads, if a file is given.

    Args:
      file: from the option `--json`.
      benchmark: name in `results_file.KEYS`.
      shapes: of the work.
      results: one dictionary for each case.
      **fields: further ones; `versions` replaces those of JAX and Python.
    """
    if file is None:
        return
    document = {
        "benchmark": benchmark,
        "device": jax.devices()[0].device_kind,
        **describe_machine(),
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "shapes": dict(shapes),
        **fields,
        "results": results,
    }
    file.write_text(json.dumps(document, indent=2) + "\n")

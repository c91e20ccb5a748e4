"""Shared by benchmarks of this machine: fresh processes and documents."""

import concurrent.futures
import json
import multiprocessing
import pathlib
import platform
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from processor import describe_machine


def run_fresh(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of a module in a new process, which compiles everything anew."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def report_results(
    file: pathlib.Path | None,
    benchmark: str,
    *,
    shapes: Mapping[str, Any],
    results: list[dict[str, Any]],
    **fields: Any,
) -> None:
    """Prints all results, and writes what `record.py` reads if a file is given.

    Args:
      file: from the option `--json`.
      benchmark: name in `results_file.KEYS`.
      shapes: of the work.
      results: one dictionary for each case.
      **fields: further ones; `versions` replaces those of JAX and Python.
    """
    for row in results:
        print(", ".join(f"{name} {_show(value)}" for name, value in row.items()))
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


def _show(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def reset_peak() -> int:
    """Sets the peak of this process's memory to the memory of now, and returns it."""
    jax.block_until_ready(jax.numpy.zeros(1))  # Starts JAX, which is not measured.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Returns the memory of this process at its peak."""
    status = pathlib.Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])

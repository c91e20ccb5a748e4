"""Shared by benchmarks of this machine: fresh processes and documents."""

import concurrent.futures
import json
import multiprocessing
import pathlib
import platform
from collections.abc import Callable, Mapping
from typing import Any

import jax
from processor import describe_machine


def run_fresh(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of a module in a new process, which compiles everything anew."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


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

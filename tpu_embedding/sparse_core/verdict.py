"""The verdict of `tpu-embedding doctor` on the SparseCores of this machine.

A plan uses SparseCores without being asked only where the doctor compared their numbers
with those of XLA's gathers and scatters on the live chip, and found them equal and
faster. The verdict is a small file of this machine, good for one kind of device and
the versions that ran.
"""

import importlib.metadata
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax


def verdict_file() -> pathlib.Path:
    """Returns the file of the verdict, in the user's folder of caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(caches) / "tpu_embedding" / "sparse_core.json"


def write_verdict(device_kind: str, *, is_equal: bool, speedup: float) -> None:
    """Writes what the doctor found.

    Args:
      device_kind: `jax.Device.device_kind`.
      is_equal: whether all rows were equal.
      speedup: time of XLA's step over that of the operations' step.
    """
    path = verdict_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"is_equal": is_equal, "speedup": round(speedup, 3)}
    path.write_text(json.dumps(_facts(device_kind) | found, indent=2) + "\n")


def verdict_problem(devices: Sequence[jax.Device]) -> str | None:
    """Returns why SparseCores are not used unless asked for; None if they are.

    Hosts of a slice could have different verdicts, and so different plans. A program of
    several processes therefore has to ask.

    Args:
      devices: devices of the plan.
    """
    if len({device.process_index for device in devices}) > 1:
        return "several processes: ask for it by backend='sparse_core'"
    try:
        verdict = json.loads(verdict_file().read_text())
    except (OSError, ValueError):
        return "tpu-embedding doctor has not compared SparseCores here"
    facts = _facts(devices[0].device_kind)
    if not isinstance(verdict, dict) or facts != {x: verdict.get(x) for x in facts}:
        return "tpu-embedding doctor compared SparseCores of another device or version"
    if verdict.get("is_equal") is not True:
        return "tpu-embedding doctor found other numbers on SparseCores"
    speedup = verdict.get("speedup")
    if not isinstance(speedup, int | float) or speedup <= 1:
        return "tpu-embedding doctor found SparseCores slower"
    return None


def _facts(device_kind: str) -> dict[str, Any]:
    versions = {}
    for package in ("jax", "libtpu"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    return {"device_kind": device_kind, **versions}

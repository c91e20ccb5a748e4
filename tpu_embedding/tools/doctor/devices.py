"""Checks the devices that JAX finds against those that should be there."""

import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

from tpu_embedding.hardware import (
    EXAMPLE_TOPOLOGIES,
    GIBIBYTE,
    hardware_by_name,
    hardware_of_kind,
)
from tpu_embedding.sparse_core.operations import unavailable_reason
from tpu_embedding.tools.doctor.environment import Finding

_MIN_MEMORY_SHARE: Final = 0.9
"""Minimum of a device's memory that programs can use; the runtime reserves the rest."""


def ask_child(
    question: list[str], environment: Mapping[str, str], seconds: float
) -> dict[str, Any] | str:
    """Returns the answer of a child process, or what went wrong.

    A TPU belongs to one process at a time, and a program may hang or halt it. So all
    work on the devices happens in children, each with a time limit.

    Args:
      question: arguments of `child.py`.
      environment: variables of the child.
      seconds: time limit.
    """
    command = [sys.executable, "-m", "tpu_embedding.tools.doctor.child", *question]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"hangs: no result in {seconds:g} s; killed"
    if child.returncode == 0:
        return json.loads(child.stdout.splitlines()[-1])
    status = child.returncode
    text = f"ended with exit status {status}"
    if status < 0:
        text = f"crashed by {signal.Signals(-status).name}"
    lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
    return f"{text}: {lines[-1][:300]}" if lines else text


def parse_expectation(text: str) -> tuple[str | None, int]:
    """Returns generation and number of the devices that `--expect` names.

    Raises:
      ValueError: if the text is neither a number of devices, nor a generation and its
        chips.

    Example:
      >>> parse_expectation("v5e:2x4"), parse_expectation("16")
      (('v5e', 8), (None, 16))
    """
    name, _, size = text.rpartition(":")
    if re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5})*", size, re.ASCII) is None:
        raise ValueError(
            "--expect must be a number of devices, or a generation and its chips such "
            f"as {' or '.join(EXAMPLE_TOPOLOGIES)}, got {text!r}."
        )
    per_chip = hardware_by_name(name).devices_per_chip if name else 1
    return name or None, math.prod(map(int, size.split("x"))) * per_chip


def check_devices(
    found: dict[str, Any] | str, expected: str | None, chips: list[str]
) -> list[Finding]:
    """Checks the devices that JAX found.

    Args:
      found: answer of the child to `devices`, or its problem.
      expected: the devices that should be there, as in `parse_expectation`.
      chips: files of this host's TPU chips.
    """
    if isinstance(found, str):
        way_out = (
            "Another process may hold the TPU. On a slice of several hosts, start the "
            "doctor on all of them at the same time: each waits for the others."
        )
        text = f"JAX did not start: {found}"
        return [Finding("devices", "FAILED", text, way_out)]
    platform, kinds = found["platform"], found["kinds"]
    listed = ", ".join(f"{kinds.count(x)} x {x}" for x in dict.fromkeys(kinds))
    findings = [Finding("devices", "ok", f"JAX runs on {listed}.")]
    if platform != "tpu" and chips:
        text = f"JAX runs on {platform}, although this host has {', '.join(chips)}."
        way_out = (
            "pip install '.[tpu]' in a clone of the repository, and unset the "
            "variables above."
        )
        findings.append(Finding("fall-back", "FAILED", text, way_out))
    try:
        hardware = hardware_of_kind(platform, kinds[0])
    except ValueError:
        hardware = None
    if expected is not None:
        name, count = parse_expectation(expected)
        is_kind = name is None or (hardware is not None and hardware.name == name)
        text = f"expected {expected}: {count} devices, found {listed}"
        if is_kind and len(kinds) == count:
            findings.append(Finding("expected", "ok", text))
        else:
            way_out = "Start the doctor on all hosts; check the accelerator type."
            findings.append(Finding("expected", "FAILED", text, way_out))
    if hardware is not None and hardware.hbm_capacity_bytes is not None:
        capacity = hardware.hbm_capacity_bytes / hardware.devices_per_chip
        findings += [_check_memory(limit, capacity) for limit in set(found["memory"])]
    return findings


def sparse_core_problem(found: Mapping[str, Any]) -> str | None:
    """Returns why the devices that JAX found run no SparseCore operations; or None."""
    platform, kinds = found["platform"], found["kinds"]
    try:
        hardware = hardware_of_kind(platform, kinds[0])
    except ValueError as error:
        return str(error)
    if not hardware.cores_per_device:
        return f"{hardware.name} has none that XLA can use"
    return unavailable_reason(hardware, len(kinds))


def _check_memory(limit: int | None, capacity: float) -> Finding:
    """Compares the memory of devices with the hardware table's."""
    if limit is None:
        return Finding("memory", "warning", "the devices do not report their memory")
    gibibytes = f"{limit / GIBIBYTE:.1f} of {capacity / GIBIBYTE:.0f} GiB per device"
    if limit >= _MIN_MEMORY_SHARE * capacity:
        return Finding("memory", "ok", gibibytes)
    return Finding("memory", "FAILED", gibibytes, "unset LIBTPU_INIT_ARGS XLA_FLAGS")


def check_holders(
    chips: list[str], processes: pathlib.Path = pathlib.Path("/proc")
) -> list[Finding]:
    """Names the other processes that hold the TPU chips of this host."""
    findings = []
    for folder in sorted(processes.glob("[0-9]*")):
        try:
            opened = {os.readlink(link) for link in (folder / "fd").iterdir()}
        except OSError:
            continue  # It ended, or belongs to another user.
        if folder.name != str(os.getpid()) and not opened.isdisjoint(chips):
            text = f"Process {folder.name} holds a TPU, which one process can at a time"
            findings.append(
                Finding("TPU in use", "FAILED", text, f"kill {folder.name}")
            )
    return findings

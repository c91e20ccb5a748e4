"""Checks the devices that JAX finds against those that should be there."""

import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tpu_embedding.hardware import (
    EXAMPLE_TOPOLOGIES,
    GIBIBYTE,
    HardwareInfo,
    hardware_by_name,
    hardware_of_accelerator,
    hardware_of_kind,
)
from tpu_embedding.tools.doctor.findings import Finding
from tpu_embedding.tools.doctor.isolated import output_of

LOCK_FILE: Final = pathlib.Path("/tmp/libtpu_lockfile")
"""File that libtpu locks while a process holds the TPU."""

_START_SECONDS: Final = 90.0
"""Deadline for the start of JAX. A slice of several hosts waits for all of them."""

_MIN_MEMORY_SHARE: Final = 0.9
"""Minimum of a device's memory that programs can use; the runtime reserves the rest."""

_MIN_SHARED_BYTES: Final = GIBIBYTE
_MIN_DISK_BYTES: Final = 10 * GIBIBYTE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expectation:
    """The devices that should be there.

    Attributes:
      num_devices: JAX devices of all hosts.
      hardware: of each device; None: any.
      source: the option or variable that says so.
    """

    num_devices: int
    hardware: HardwareInfo | None
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundDevices:
    """The devices that JAX found in a child process.

    Attributes:
      platform: JAX's default backend.
      kinds: device kind of each device of all hosts.
      memory: of each device of this host: `bytes_limit` and `bytes_in_use`, or None.
    """

    platform: str
    kinds: tuple[str, ...]
    memory: tuple[Mapping[str, int] | None, ...]

    @property
    def hardware(self) -> HardwareInfo | None:
        """The hardware of the devices; None if it is unknown."""
        try:
            return hardware_of_kind(self.platform, self.kinds[0])
        except ValueError:
            return None


def parse_expectation(text: str) -> Expectation:
    """Returns the devices of `--expect`: a number, or a generation and its chips.

    Raises:
      ValueError: if the text is neither a number of devices, nor a generation and its
        chips.

    Example:
      >>> parse_expectation(EXAMPLE_TOPOLOGIES[0]).num_devices
      8
    """
    source = f"--expect {text}"
    name, _, size = text.rpartition(":")
    if re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5})*", size, re.ASCII) is None:
        raise ValueError(
            "--expect must be a number of devices, or a generation and its chips such "
            f"as {' or '.join(EXAMPLE_TOPOLOGIES)}, got {text!r}."
        )
    count = math.prod(map(int, size.split("x")))
    if not name:
        return Expectation(num_devices=count, hardware=None, source=source)
    hardware = hardware_by_name(name)
    num_devices = count * hardware.devices_per_chip
    return Expectation(num_devices=num_devices, hardware=hardware, source=source)


def expectation_of_environment(environment: Mapping[str, str]) -> Expectation | None:
    """Returns the devices that a TPU VM's variables name; None if they name none."""
    name = environment.get("TPU_ACCELERATOR_TYPE", "")
    found = hardware_of_accelerator(name)
    if found is None:
        return None
    hardware, num_chips = found
    return Expectation(
        num_devices=num_chips * hardware.devices_per_chip,
        hardware=hardware,
        source=f"TPU_ACCELERATOR_TYPE={name}",
    )


def find_devices(
    environment: Mapping[str, str], seconds: float = _START_SECONDS
) -> tuple[FoundDevices | None, str | None]:
    """Asks JAX for its devices, in a child process.

    Args:
      environment: of the child.
      seconds: deadline.

    Returns:
      The devices and no problem, or no devices and the problem.
    """
    command = [sys.executable, "-m", "tpu_embedding.tools.doctor.device_child"]
    text, problem = output_of(command, seconds, environment)
    if text is None:
        return None, problem
    document = json.loads(text.splitlines()[-1])
    devices = document["devices"]
    local = [d for d in devices if d["process"] == devices[0]["process"]]
    found = FoundDevices(
        platform=document["platform"],
        kinds=tuple(device["kind"] for device in devices),
        memory=tuple(device["memory"] for device in local),
    )
    return found, None


def check_devices(
    found: FoundDevices | None,
    problem: str | None,
    expected: Expectation | None,
    *,
    device_files: list[str],
) -> list[Finding]:
    """Checks the devices that JAX found.

    Args:
      found: from `find_devices`.
      problem: likewise.
      expected: None: any devices will do.
      device_files: of the host's TPU chips.
    """
    if found is None:
        return [_no_devices(problem or "no answer")]
    kinds = ", ".join(
        f"{found.kinds.count(kind)} x {kind}" for kind in dict.fromkeys(found.kinds)
    )
    findings = [
        Finding(check="devices", status="ok", text=f"JAX runs on {kinds}."),
        *_check_fallback(found, device_files),
    ]
    if expected is not None:
        findings.append(_check_expected(found, expected, kinds))
    return [*findings, *_check_memory(found)]


def _no_devices(problem: str) -> Finding:
    return Finding(
        check="devices",
        status="failed",
        text=f"JAX did not start: {problem}.",
        way_out="Another process may hold the TPU; see below. On a slice of several "
        "hosts, start the doctor on all of them at the same time: each waits for the "
        "others.",
    )


def _check_fallback(found: FoundDevices, device_files: list[str]) -> Iterator[Finding]:
    if found.platform != "tpu" and device_files:
        yield Finding(
            check="fall-back",
            status="failed",
            text=f"JAX runs on {found.platform}, although this host has TPU chips: "
            f"{', '.join(device_files)}.",
            way_out="Install libtpu (pip install 'tpu-embedding[tpu]'), unset the "
            "variables that the doctor names, and end other processes on the chips.",
        )


def _check_expected(found: FoundDevices, expected: Expectation, kinds: str) -> Finding:
    count, hardware = len(found.kinds), found.hardware
    wanted = f"{expected.num_devices} devices"
    if expected.hardware is not None:
        wanted += f" of {expected.hardware.name}"
    wanted += f" ({expected.source})"
    is_right_kind = expected.hardware is None or hardware == expected.hardware
    if count == expected.num_devices and is_right_kind:
        return Finding(check="expected devices", status="ok", text=f"{wanted}: found.")
    return Finding(
        check="expected devices",
        status="failed",
        text=f"Expected {wanted}, found {kinds}.",
        way_out="With fewer devices: start the doctor on all hosts of the slice at the "
        "same time, and unset variables that hide chips. With another kind: check the "
        "accelerator type of the machine.",
    )


def _check_memory(found: FoundDevices) -> Iterator[Finding]:
    """Yields findings on device memory, beside the hardware table."""
    hardware = found.hardware
    if hardware is None or hardware.hbm_capacity_bytes is None:
        return
    capacity = hardware.hbm_capacity_bytes / hardware.devices_per_chip
    known = [memory for memory in found.memory if memory is not None]
    if not known:
        text = "devices do not report their memory"
        yield Finding(check="device memory", status="unmeasured", text=text)
        return
    smallest = min(memory["bytes_limit"] for memory in known)
    used = max(memory["bytes_in_use"] for memory in known)
    text = (
        f"{smallest / GIBIBYTE:.1f} GiB per device of {capacity / GIBIBYTE:.0f} GiB in "
        f"the hardware table, {used / GIBIBYTE:.1f} GiB in use"
    )
    if smallest >= _MIN_MEMORY_SHARE * capacity:
        yield Finding(check="device memory", status="ok", text=text)
        return
    way_out = "Unset LIBTPU_INIT_ARGS and XLA_FLAGS; they can limit the memory."
    yield Finding(check="device memory", status="failed", text=text, way_out=way_out)


def check_holders(
    device_files: list[str],
    *,
    processes: pathlib.Path = pathlib.Path("/proc"),
    lock_file: pathlib.Path = LOCK_FILE,
) -> list[Finding]:
    """Checks that no other process holds the TPU chips of this host.

    Args:
      device_files: of the chips.
      processes: the folder of processes.
      lock_file: that libtpu locks.
    """
    if not device_files:
        return []
    holders = _processes_that_open(device_files, processes)
    if holders:
        listed = ", ".join(f"{pid} ({name})" for pid, name in holders)
        return [
            Finding(
                check="TPU in use",
                status="failed",
                text=f"The TPU is held by process {listed}. A TPU belongs to one "
                "process at a time.",
                way_out=f"End it: kill {holders[0][0]}.",
            )
        ]
    if lock_file.exists():
        return [
            Finding(
                check="TPU in use",
                status="warning",
                text=f"{lock_file} exists, but no process that this user can see holds "
                "the TPU.",
                way_out="If libtpu says that the TPU is in use, remove the file: "
                f"sudo rm {lock_file}.",
            )
        ]
    text = "no other process holds the TPU"
    return [Finding(check="TPU in use", status="ok", text=text)]


def _processes_that_open(
    device_files: list[str], processes: pathlib.Path
) -> list[tuple[int, str]]:
    """Returns number and name of other processes that have a device file open."""
    holders = []
    for folder in sorted(processes.glob("[0-9]*")):
        number = int(folder.name)
        if number == os.getpid():
            continue
        try:
            opened = {os.readlink(link) for link in (folder / "fd").iterdir()}
            if opened.isdisjoint(device_files):
                continue
            holders.append((number, (folder / "comm").read_text().strip()))
        except OSError:
            continue  # It ended, or belongs to another user.
    return holders


def check_host() -> list[Finding]:
    """Checks memory, shared memory and disk of this host."""
    total, available = _host_memory()
    findings = []
    if total is not None:
        text = f"{available / GIBIBYTE:.1f} of {total / GIBIBYTE:.1f} GiB are free"
        findings.append(Finding(check="host memory", status="ok", text=text))
    shared = pathlib.Path("/dev/shm")
    if shared.is_dir():
        way_out = "Give the container more: docker run --shm-size=8g, or an emptyDir "
        way_out += "with medium: Memory at /dev/shm."
        findings.append(
            _check_free("shared memory", shared, _MIN_SHARED_BYTES, way_out)
        )
    way_out = "Write checkpoints elsewhere: tpu-embedding train --output-dir DIR."
    here = pathlib.Path.cwd()
    findings.append(_check_free("disk", here, _MIN_DISK_BYTES, way_out))
    return findings


def _check_free(check: str, path: pathlib.Path, minimum: int, way_out: str) -> Finding:
    usage = shutil.disk_usage(path)
    place = "this directory" if check == "disk" else path
    text = (
        f"{usage.free / GIBIBYTE:.1f} of {usage.total / GIBIBYTE:.1f} GiB are free in "
        f"{place}"
    )
    if usage.free >= minimum:
        return Finding(check=check, status="ok", text=text)
    return Finding(check=check, status="warning", text=text, way_out=way_out)


def _host_memory() -> tuple[float | None, float]:
    """Returns total and available bytes, within the limit of the container."""
    values: dict[str, Any] = {}
    try:
        for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            values[name] = 1024 * int(value.split()[0])
        total, available = values["MemTotal"], values["MemAvailable"]
    except (OSError, KeyError, ValueError):
        return None, 0.0
    try:
        limit = pathlib.Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = pathlib.Path("/sys/fs/cgroup/memory.current").read_text().strip()
        total = min(total, int(limit))
        available = min(available, int(limit) - int(used))
    except (OSError, ValueError):
        pass  # No container, or one without a limit.
    return total, max(0, available)

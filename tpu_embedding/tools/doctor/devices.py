"""Checks the devices that JAX finds against those that should be there."""

import dataclasses
import math
import os
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Final

from tpu_embedding.hardware import (
    EXAMPLE_TOPOLOGIES,
    GIBIBYTE,
    HardwareInfo,
    hardware_by_name,
    hardware_of_accelerator,
    hardware_of_kind,
)
from tpu_embedding.tools.doctor.child_process import ChildLost, ChildProcess
from tpu_embedding.tools.doctor.findings import Finding

CHILD: Final = (sys.executable, "-m", "tpu_embedding.tools.doctor.child")
"""Command of the child that holds the devices."""

_START_SECONDS: Final = 90.0
"""Deadline for the start of JAX. A slice of several hosts waits for all of them."""

_MIN_MEMORY_SHARE: Final = 0.9
"""Minimum of a device's memory that programs can use; the runtime reserves the rest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expectation:
    """The devices that should be there.

    Attributes:
      num_devices: number of JAX devices on all hosts.
      hardware: hardware of each device; None: any.
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
      memory: `bytes_limit` and `bytes_in_use` of each device of this host, or None.
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
    name, _, size = text.rpartition(":")
    if re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5})*", size, re.ASCII) is None:
        raise ValueError(
            "--expect must be a number of devices, or a generation and its chips such "
            f"as {' or '.join(EXAMPLE_TOPOLOGIES)}, got {text!r}."
        )
    hardware = hardware_by_name(name) if name else None
    count = math.prod(map(int, size.split("x")))
    return Expectation(
        num_devices=count * (hardware.devices_per_chip if hardware else 1),
        hardware=hardware,
        source=f"--expect {text}",
    )


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
) -> FoundDevices | str:
    """Asks JAX for its devices, in a child process; returns them, or the problem.

    Args:
      environment: variables of the child.
      seconds: time limit.
    """
    with ChildProcess(CHILD, environment) as child:
        try:
            answer = child.ask({"devices": True}, seconds)
        except ChildLost as lost:
            return str(lost)
    return FoundDevices(
        platform=answer["platform"],
        kinds=tuple(answer["kinds"]),
        memory=tuple(answer["memory"]),
    )


def check_devices(
    found: FoundDevices | str,
    expected: Expectation | None,
    *,
    device_files: list[str],
) -> list[Finding]:
    """Checks the devices that JAX found.

    Args:
      found: devices or problem, from `find_devices`.
      expected: devices that should be there; None: any will do.
      device_files: files of the host's TPU chips.
    """
    if isinstance(found, str):
        text = f"JAX did not start: {found}."
        way_out = (
            "Another process may hold the TPU; a finding above names it, if this user "
            "can see it. On a slice of several hosts, start the doctor on all of them "
            "at the same time: each waits for the others."
        )
        return [Finding(check="devices", status="failed", text=text, way_out=way_out)]
    kinds = ", ".join(
        f"{found.kinds.count(kind)} x {kind}" for kind in dict.fromkeys(found.kinds)
    )
    text = f"JAX runs on {kinds}."
    findings = [Finding(check="devices", status="ok", text=text)]
    if found.platform != "tpu" and device_files:
        text = f"JAX runs on {found.platform}, although this host has TPU chips: "
        text += f"{', '.join(device_files)}."
        way_out = (
            "Install libtpu (pip install 'tpu-embedding[tpu]'), unset the variables "
            "that the doctor names, and end other processes on the chips."
        )
        findings.append(
            Finding(check="fall-back", status="failed", text=text, way_out=way_out)
        )
    if expected is not None:
        findings.append(_check_expected(found, expected, kinds))
    hardware = found.hardware
    if hardware is not None and hardware.hbm_capacity_bytes is not None:
        capacity = hardware.hbm_capacity_bytes / hardware.devices_per_chip
        findings.append(_check_memory(found, capacity))
    return findings


def _check_expected(found: FoundDevices, expected: Expectation, kinds: str) -> Finding:
    wanted = f"{expected.num_devices} devices"
    if expected.hardware is not None:
        wanted += f" of {expected.hardware.name}"
    wanted += f" ({expected.source})"
    is_right_kind = expected.hardware in (None, found.hardware)
    if len(found.kinds) == expected.num_devices and is_right_kind:
        return Finding(check="expected devices", status="ok", text=f"{wanted}: found.")
    return Finding(
        check="expected devices",
        status="failed",
        text=f"Expected {wanted}, found {kinds}.",
        way_out="With fewer devices: start the doctor on all hosts of the slice at the "
        "same time, and unset variables that hide chips. With another kind: check the "
        "accelerator type of the machine.",
    )


def _check_memory(found: FoundDevices, capacity: float) -> Finding:
    """Compares the memory of this host's devices with the hardware table's."""
    known = [memory for memory in found.memory if memory is not None]
    if not known:
        text = "devices do not report their memory"
        return Finding(check="device memory", status="unmeasured", text=text)
    smallest = min(memory["bytes_limit"] for memory in known)
    used = max(memory["bytes_in_use"] for memory in known)
    text = (
        f"{smallest / GIBIBYTE:.1f} GiB per device of {capacity / GIBIBYTE:.0f} GiB in "
        f"the hardware table, {used / GIBIBYTE:.1f} GiB in use"
    )
    if smallest >= _MIN_MEMORY_SHARE * capacity:
        return Finding(check="device memory", status="ok", text=text)
    way_out = "Unset LIBTPU_INIT_ARGS and XLA_FLAGS; they can limit the memory."
    return Finding(check="device memory", status="failed", text=text, way_out=way_out)


def check_holders(
    device_files: list[str], *, processes: pathlib.Path = pathlib.Path("/proc")
) -> list[Finding]:
    """Checks that no other process holds the TPU chips of this host.

    Args:
      device_files: files of the chips.
      processes: the folder of processes.
    """
    holders = []
    for folder in sorted(processes.glob("[0-9]*")):
        try:
            opened = {os.readlink(link) for link in (folder / "fd").iterdir()}
            if folder.name != str(os.getpid()) and not opened.isdisjoint(device_files):
                holders.append((folder.name, (folder / "comm").read_text().strip()))
        except OSError:
            continue  # It ended, or belongs to another user.
    if not holders:
        return []
    listed = ", ".join(f"{pid} ({name})" for pid, name in holders)
    text = f"The TPU is held by process {listed}. "
    text += "A TPU belongs to one process at a time."
    way_out = f"End it: kill {holders[0][0]}."
    return [Finding(check="TPU in use", status="failed", text=text, way_out=way_out)]

"""Silences libtpu's warnings on machines without TPUs.

Such machines can still compile for TPUs. But when JAX looks for devices, libtpu prints
eight lines of warnings, because it can't find the host's name and its position in a
slice. The warnings don't appear if you import `tpu_embedding` first.
"""

import glob
import os
import pathlib
from typing import Final

ONE_HOST: Final = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_HOST_BOUNDS": "1,1,1"}
"""Environment variables that describe a single host, so libtpu prints no warnings."""

_DEVICE_FILES: Final = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
"""Patterns of TPU device files."""

_PCI_DEVICES: Final = "/sys/bus/pci/devices"
_GOOGLE: Final = "0x1ae0"
"""Google's PCI vendor id (`jax/_src/hardware_utils.py`)."""

_STORAGE_AND_NETWORK: Final = ("0x01", "0x02")
"""PCI classes of Google devices that aren't TPUs, found in virtual machines."""


def describe_host_without_tpus() -> None:
    """Describes this machine to libtpu as a single host if it has no TPU chips."""
    # JAX may not have been imported yet, so it can't be asked for devices.
    if tpu_device_files() or _has_chips_on_bus():
        return
    for name, value in ONE_HOST.items():
        os.environ.setdefault(name, value)  # The user's own values win.


def tpu_device_files() -> list[str]:
    return sorted(path for pattern in _DEVICE_FILES for path in glob.glob(pattern))


def _has_chips_on_bus() -> bool:
    # A container sees its host's chips on the bus even if it lacks their device files.
    for vendor in pathlib.Path(_PCI_DEVICES).glob("*/vendor"):
        try:
            is_google = vendor.read_text().strip() == _GOOGLE
            kind = vendor.with_name("class").read_text().strip()
        except OSError:
            continue
        # Chips are not matched by device id, because new generations have new ids.
        if is_google and not kind.startswith(_STORAGE_AND_NETWORK):
            return True
    return False

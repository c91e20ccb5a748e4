"""Silences libtpu's warnings on machines without TPUs.

libtpu may be installed on such a machine to compile for TPUs. When JAX looks for
devices, libtpu looks up the host's name and its position in a slice. If it cannot find
them, it prints eight lines of warnings. `import tpu_embedding` prevents them by calling
`describe_host_without_tpus`. At that time JAX may not have been imported, so this
module looks for chips itself.
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
"""PCI classes of Google devices in virtual machines without TPUs."""


def describe_host_without_tpus() -> None:
    """Describes this machine to libtpu as a single host if it has no TPU chips.

    On a TPU VM it changes nothing, so libtpu still prints its warnings. Variables that
    the user has set are kept.
    """
    if tpu_device_files() or _has_chips_on_bus():
        return
    for name, value in ONE_HOST.items():
        os.environ.setdefault(name, value)


def tpu_device_files() -> list[str]:
    """Returns the device files of this host's TPU chips."""
    return sorted(path for pattern in _DEVICE_FILES for path in glob.glob(pattern))


def _has_chips_on_bus() -> bool:
    """Returns True if a PCI device may be a TPU chip of any generation.

    A container sees its host's chips on the bus even if it lacks their device files.
    """
    for vendor in pathlib.Path(_PCI_DEVICES).glob("*/vendor"):
        try:
            is_google = vendor.read_text().strip() == _GOOGLE
            kind = vendor.with_name("class").read_text().strip()
        except OSError:
            continue
        if is_google and not kind.startswith(_STORAGE_AND_NETWORK):
            return True
    return False

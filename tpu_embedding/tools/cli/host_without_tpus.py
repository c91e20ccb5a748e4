"""Keeps libtpu's warnings off the terminal of a machine without TPUs.

libtpu may be installed there to compile for TPUs. When JAX looks for devices, libtpu
asks for the host's name and place in a slice, and prints five lines if nothing knows.
"""

import os

from tpu_embedding.tools.compile_report.topology import ONE_HOST
from tpu_embedding.tools.doctor.environment import tpu_device_files


def describe_host_without_tpus() -> None:
    """Describes this machine to libtpu as one host, if it has no TPU chips.

    Call it after JAX is imported, and before it looks for devices. On a TPU VM it
    changes nothing, so libtpu's warnings are printed there. Variables of the user
    stay.
    """
    # JAX sets it when it is imported and finds no chip on the PCI bus.
    has_chips = os.environ.get("TPU_SKIP_MDS_QUERY") != "1"
    if has_chips or tpu_device_files():
        return
    for name, value in ONE_HOST.items():
        os.environ.setdefault(name, value)

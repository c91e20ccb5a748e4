"""Facts about each TPU generation: memory, row layout, compiler options.

Only this module knows TPU generations. Other modules read a `HardwareInfo` from the
plan. CPUs and GPUs also have a `HardwareInfo`, so no module branches on the platform.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Final

import jax

from tpu_embedding.argument_checks import invalid

__all__ = ["HardwareInfo", "hardware_by_name"]

KIBIBYTE: Final = 2**10
MEBIBYTE: Final = 2**20
GIBIBYTE: Final = 2**30

MAX_SPARSE_CORE_BYTES: Final = 16 * GIBIBYTE
"""Reported limit on the bytes of each array that a SparseCore works on.

TorchRec's source code (`torchrec/experimental/torch_tpu`) notes it as XLA's limit on
each tensor. Libtpu 0.0.50.1 rejects larger arrays in XLA's embedding operations. For
v5p and v6e, it does compile gathers and scatters on arrays with up to 24 GiB. These
programs were not run on a chip, so the plan warns about arrays above the limit.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareInfo:
    """A kind of device: its row layout, memory and compiler options.

    Attributes:
      name: TPU generation such as `"v5e"`, otherwise `"cpu"` or `"gpu"`.
      line_lanes: lanes per packed line, 128 on TPU. If `dim` is below 128, XLA:TPU
        stores a `[rows, dim]` array column by column, and copies all of it before each
        gather. Packing rows into 128-lane lines avoids the copy. If None, tables keep
        their `[rows, dim]` shape.
      sublanes: rows per tile; arrays are padded to a multiple of this number.
      hbm_capacity_bytes: memory per chip.
      devices_per_chip: JAX devices per chip.
      num_sparse_cores: SparseCores per chip that XLA can use.
      subcore_memory_bytes: memory per vector subcore in a SparseCore, which bounds the
        ids per XLA embedding operation. If None, the device lacks these operations.
      sends_rows_once: whether XLA's embedding operations send a row only once to a
        core that needs it for several samples. If False, these operations keep buffers
        for every id.
      compiler_options: XLA options for train steps on this device. XLA rejects
        `xla_tpu_` options on other devices.

    Example:
      >>> hardware_by_name("v5e").hbm_capacity_bytes // GIBIBYTE
      16
    """

    name: str
    line_lanes: int | None = None
    sublanes: int = 1
    hbm_capacity_bytes: int | None = None
    devices_per_chip: int = 1
    num_sparse_cores: int = 0
    subcore_memory_bytes: int | None = None
    sends_rows_once: bool = True
    compiler_options: tuple[tuple[str, str], ...] = ()

    @property
    def is_tpu(self) -> bool:
        """True for TPUs. Only TPUs have XLA's TPU options and libtpu's topologies."""
        return self.line_lanes is not None

    @property
    def device_memory_bytes(self) -> int | None:
        """Memory per JAX device; None if unknown."""
        if self.hbm_capacity_bytes is None:
            return None
        return self.hbm_capacity_bytes // self.devices_per_chip

    @property
    def cores_per_device(self) -> int:
        """SparseCores per JAX device."""
        return self.num_sparse_cores // self.devices_per_chip

    @property
    def max_array_bytes(self) -> float:
        """Reported limit on the bytes per array; infinity without SparseCores."""
        return MAX_SPARSE_CORE_BYTES if self.num_sparse_cores else math.inf


# A figure without a public source stays None.
#
# Capacities: the "System architecture" page of each generation in Google Cloud's TPU
# documentation (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x). Lanes, sublanes,
# SparseCores and their memory: JAX's own table, `jax/_src/tpu_info.py`. Buffers of the
# embedding operations: programs compiled by libtpu 0.0.50.
#
# XLA offloads gathers to SparseCore by default, but scatters and long sorts only on
# request. Offloading sorts saves compile time: a sort of 900,000 pairs takes 9 s to
# compile for the TensorCore and 0.6 s for SparseCore. A step has about a dozen sorts,
# including the ones that XLA adds to scatters. By default XLA keeps sorts of up to
# about 131,000 keys on the TensorCore. The option that lowers this limit needs jax
# 0.12.
_SPARSE_CORE_OPTIONS: Final = (
    ("xla_tpu_enable_offloading_scatter_to_sparsecore", "true"),
    ("xla_tpu_enable_offloading_sort_to_sparsecore", "true"),
    *(
        [("xla_tpu_min_input_size_for_1d_sort_offloading", "16384")]
        if jax.__version_info__ >= (0, 12)
        else []
    ),
)


def _tpu(
    name: str,
    hbm_gibibytes: int,
    num_sparse_cores: int = 0,
    devices_per_chip: int = 1,
    subcore_memory_kibibytes: int = 0,
    sends_rows_once: bool = True,
) -> HardwareInfo:
    return HardwareInfo(
        name=name,
        line_lanes=128,
        sublanes=8,
        hbm_capacity_bytes=hbm_gibibytes * GIBIBYTE,
        devices_per_chip=devices_per_chip,
        num_sparse_cores=num_sparse_cores,
        subcore_memory_bytes=subcore_memory_kibibytes * KIBIBYTE or None,
        sends_rows_once=sends_rows_once,
        compiler_options=_SPARSE_CORE_OPTIONS if num_sparse_cores else (),
    )


_HARDWARE: Final = (
    _tpu("v4", 32),
    _tpu("v5e", 16),
    _tpu("v5p", 95, num_sparse_cores=4, subcore_memory_kibibytes=512),
    _tpu(
        "v6e",
        32,
        num_sparse_cores=2,
        subcore_memory_kibibytes=256,
        sends_rows_once=False,
    ),
    _tpu(
        "tpu7x",
        192,
        num_sparse_cores=4,
        devices_per_chip=2,
        subcore_memory_kibibytes=512,
    ),
    HardwareInfo(name="cpu"),
    HardwareInfo(name="gpu"),
)
_BY_NAME: Final = {info.name: info for info in _HARDWARE}
_NAME_OF_DEVICE_KIND: Final[Mapping[str, str]] = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}


EXAMPLE_TOPOLOGIES: Final = ("v5e:2x4", "v5p:4x4x4", "tpu7x:2x2x1")
"""Examples of libtpu's topology names: a generation and its grid of chips."""


def hardware_by_name(name: str) -> HardwareInfo:
    """Finds the hardware with a name such as `"v5e"`.

    Raises:
      ValueError: if the name is unknown; the message lists the known names.

    Example:
      >>> hardware_by_name("v5p").line_lanes
      128
    """
    if name not in _BY_NAME:
        raise invalid("hardware", f"be one of {sorted(_BY_NAME)}", name)
    return _BY_NAME[name]


def hardware_of_device(device: jax.Device) -> HardwareInfo:
    """Finds the hardware of a device, which may be from a topology description."""
    return hardware_of_kind(device.platform, device.device_kind)


def hardware_of_kind(platform: str, device_kind: str) -> HardwareInfo:
    if platform == "cpu":
        return _BY_NAME["cpu"]
    if platform in ("gpu", "cuda", "rocm"):
        return _BY_NAME["gpu"]
    if device_kind not in _NAME_OF_DEVICE_KIND:
        rule = f"be one of {sorted(_NAME_OF_DEVICE_KIND)} on platform {platform!r}"
        fix = "Pass `hardware=` to use the settings of a known kind."
        raise invalid("device kind", rule, device_kind, fix)
    return _BY_NAME[_NAME_OF_DEVICE_KIND[device_kind]]

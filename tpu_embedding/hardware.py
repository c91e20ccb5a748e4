"""Facts about each TPU generation: memory layout, bandwidths, compiler options.

This is the only module that knows TPU generations. Other modules receive a
`HardwareInfo` or read it from the plan. CPU and GPU have a `HardwareInfo` too, so other
modules need no branches. A figure without a public source is None.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Final, Literal, get_args

import jax
from jax.sharding import Mesh

__all__ = ["HardwareInfo", "hardware_by_name"]

MEBIBYTE: Final = 2**20
GIBIBYTE: Final = 2**30

EmbeddingFeature = Literal["UNSUPPORTED", "V1", "V2"]
EMBEDDING_FEATURES: Final[tuple[EmbeddingFeature, ...]] = get_args(EmbeddingFeature)
"""Names of TensorFlow's `HardwareFeature.EmbeddingFeature`, none to newest."""

_MAX_OFFLOADED_BYTES: Final = 16 * GIBIBYTE
"""Bytes per array that a SparseCore is said to take.

A note in the source code of TorchRec (`torchrec/experimental/torch_tpu`) says so of
XLA, of each tensor. Libtpu 0.0.50.1 compiles gathers and scatters of larger arrays for
SparseCores: it did so for v5p and v6e, up to 24 GiB. What a chip does with them was not
tried. So plans stay below the limit as a precaution.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceShapes:
    """The grids of chips that a generation's slices have.

    Attributes:
      fixed: grids of slices without a rule, smallest first. Their sides have this
        order.
      cube_side: larger slices consist of cubes with this many chips per side. None:
        there are no larger slices.
      max_chips: chips of the largest slice.
    """

    fixed: tuple[tuple[int, ...], ...]
    cube_side: int | None
    max_chips: int

    def has(self, grid: tuple[int, ...]) -> bool:
        """Returns True if a slice of the generation can have this grid.

        Args:
          grid: number of chips along each dimension.
        """
        if grid in self.fixed or self.cube_side is None:
            return grid in self.fixed
        fits = len(grid) == self._rank and math.prod(grid) <= self.max_chips
        return fits and all(
            side % self.cube_side == 0 and 0 < side <= _MAX_SIDE for side in grid
        )

    def describe(self) -> str:
        """Returns the rule as text, for errors."""
        fixed = ", ".join("x".join(map(str, grid)) for grid in self.fixed)
        if self.cube_side is None:
            return fixed
        return (
            f"{fixed}, or {self._rank} sides that are multiples of {self.cube_side} up "
            f"to {_MAX_SIDE}, with at most {self.max_chips} chips"
        )

    @property
    def _rank(self) -> int:
        return len(self.fixed[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareInfo:
    """One kind of device: its row layout, memory, bandwidths and compiler options.

    Attributes:
      name: generation, such as `"v5e"`, or `"cpu"` or `"gpu"`.
      line_lanes: lanes of one line of a packed table, 128 on TPU. XLA:TPU stores a
        `[rows, dim]` array with `dim` below 128 by column, and copies all of it before
        each gather. Packing rows into 128-lane lines avoids the copy. None: tables keep
        their `[rows, dim]` shape.
      sublanes: rows of a tile; the rows of an array are padded to a multiple of it.
      hbm_capacity_bytes: memory of one chip.
      hbm_bytes_per_second: peak memory bandwidth of one chip.
      ici_bytes_per_second: peak send bandwidth of one chip to its slice, in one
        direction, summed over all its links. Small slices use fewer links, and so do
        slices that are no torus.
      dcn_bytes_per_second: peak send bandwidth of one chip to other slices, over the
        data-centre network.
      bf16_flops_per_second: peak bfloat16 arithmetic of one chip.
      vmem_bytes: on-chip memory of one core; XLA moves small arrays there.
      devices_per_chip: number of JAX devices per chip.
      chip_config_name: libtpu's name of the chip configuration that has
        `devices_per_chip` devices. None means libtpu's default.
      slice_shapes: grids of chips that slices of this generation have; None if the
        device is not a TPU.
      num_sparse_cores: SparseCores per chip that XLA can use.
      max_array_bytes: size of the largest array that plans give to a SparseCore, if
        the chip has one.
      embedding_feature: TensorFlow's name of the chip's embedding hardware.
      compiler_options: XLA options for train steps on this device. XLA rejects
        `xla_tpu_` options on other devices.
    """

    name: str
    line_lanes: int | None = None
    sublanes: int = 1
    hbm_capacity_bytes: int | None = None
    hbm_bytes_per_second: float | None = None
    ici_bytes_per_second: float | None = None
    dcn_bytes_per_second: float | None = None
    bf16_flops_per_second: float | None = None
    vmem_bytes: int | None = None
    devices_per_chip: int = 1
    chip_config_name: str | None = None
    slice_shapes: SliceShapes | None = None
    num_sparse_cores: int = 0
    max_array_bytes: int = _MAX_OFFLOADED_BYTES
    embedding_feature: EmbeddingFeature = "UNSUPPORTED"
    compiler_options: tuple[tuple[str, str], ...] = ()

    @property
    def max_offloaded_bytes(self) -> int | None:
        """Size of the largest array that plans give to a SparseCore; None without."""
        return self.max_array_bytes if self.num_sparse_cores else None

    @property
    def is_tpu(self) -> bool:
        """True for TPUs, which take XLA's TPU options and libtpu's topologies."""
        return self.line_lanes is not None

    def with_compiler_options(self, options: Mapping[str, str]) -> "HardwareInfo":
        """Returns this hardware with some compiler options added or replaced.

        Args:
          options: XLA's option names and their values, as strings.

        Raises:
          ValueError: if there are options and the hardware is not a TPU.

        Example:
          >>> hardware_by_name("v5e").with_compiler_options({"a": "1"}).compiler_options
          (('a', '1'),)
        """
        if not options:
            return self
        if not self.is_tpu:
            raise ValueError(
                f"compiler_options must be empty on {self.name}, got {dict(options)}; "
                "they apply to TPUs only, so leave them out."
            )
        merged = dict(self.compiler_options) | dict(options)
        return dataclasses.replace(self, compiler_options=tuple(merged.items()))


# Sources.
# Capacities, bandwidths and arithmetic: the "System architecture" page of each
# generation in Google Cloud's TPU documentation (cloud.google.com/tpu/docs/v4, v5e,
# v5p, v6e, tpu7x). Lanes, sublanes and VMEM: JAX's own table, `jax/_src/tpu_info.py`.
#
# Links within a slice: those pages give the bandwidth of a chip summed over both
# directions (400, 1200, 800 and 1200 GB/s for v5e, v5p, v6e, tpu7x). A chip can send at
# half of that. The v4 page has no figure; its paper gives 6 links of 50 GB/s each
# (Jouppi et al., "TPU v4", ISCA 2023, arXiv 2304.01433).
#
# Links between slices: 50, 100 and 100 Gbit/s per chip for v5p, v6e and tpu7x (tpu7x
# page); 6.4 Tbit/s for the 256 chips of a v5e pod.
#
# XLA offloads gathers to SparseCore by default, scatters and long sorts only on
# request. Sorts are offloaded for their compile time: 900,000 pairs take 9 s to compile
# on the TensorCore and 0.6 s on SparseCore, and a step has about a dozen sorts,
# including those that XLA adds to scatters. By default XLA keeps sorts of up to about
# 131,000 keys on the TensorCore. The option that lowers this limit needs jax 0.12.
_SPARSE_CORE_OPTIONS: Final = (
    ("xla_tpu_enable_offloading_scatter_to_sparsecore", "true"),
    ("xla_tpu_enable_offloading_sort_to_sparsecore", "true"),
    *(
        [("xla_tpu_min_input_size_for_1d_sort_offloading", "16384")]
        if jax.__version_info__ >= (0, 12)
        else []
    ),
)

# Grids of slices: the "Configurations" sections of those pages, and Google's tool xpk
# (`generate_tpu_topologies` in `system_characteristics.py`, with 64, 140 and 144 cubes
# for v4, v5p and tpu7x). Slices of one chip are part of a host.
_MAX_SIDE: Final = 256
_SQUARES: Final = SliceShapes(
    fixed=((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    cube_side=None,
    max_chips=256,
)


def _cubes(num_cubes: int) -> SliceShapes:
    fixed = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
    return SliceShapes(fixed=fixed, cube_side=4, max_chips=4**3 * num_cubes)


_TPU_V4: Final = HardwareInfo(
    name="v4",
    line_lanes=128,
    sublanes=8,
    slice_shapes=_cubes(64),
    hbm_capacity_bytes=32 * GIBIBYTE,
    hbm_bytes_per_second=1228e9,
    ici_bytes_per_second=300e9,
    bf16_flops_per_second=275e12,
    vmem_bytes=16 * MEBIBYTE,
    chip_config_name="megacore",
    embedding_feature="V1",
)
_TPU_V5E: Final = HardwareInfo(
    name="v5e",
    line_lanes=128,
    sublanes=8,
    slice_shapes=_SQUARES,
    hbm_capacity_bytes=16 * GIBIBYTE,
    hbm_bytes_per_second=819e9,
    ici_bytes_per_second=200e9,
    dcn_bytes_per_second=3.125e9,
    bf16_flops_per_second=197e12,
    vmem_bytes=128 * MEBIBYTE,
)
_TPU_V5P: Final = HardwareInfo(
    name="v5p",
    line_lanes=128,
    sublanes=8,
    slice_shapes=_cubes(140),
    hbm_capacity_bytes=95 * GIBIBYTE,
    hbm_bytes_per_second=2765e9,
    ici_bytes_per_second=600e9,
    dcn_bytes_per_second=6.25e9,
    bf16_flops_per_second=459e12,
    vmem_bytes=64 * MEBIBYTE,
    num_sparse_cores=4,
    embedding_feature="V2",
    compiler_options=_SPARSE_CORE_OPTIONS,
)
_TPU_V6E: Final = HardwareInfo(
    name="v6e",
    line_lanes=128,
    sublanes=8,
    slice_shapes=_SQUARES,
    hbm_capacity_bytes=32 * GIBIBYTE,
    hbm_bytes_per_second=1640e9,
    ici_bytes_per_second=400e9,
    dcn_bytes_per_second=12.5e9,
    bf16_flops_per_second=918e12,
    vmem_bytes=128 * MEBIBYTE,
    num_sparse_cores=2,
    embedding_feature="V2",
    compiler_options=_SPARSE_CORE_OPTIONS,
)
_TPU_7X: Final = HardwareInfo(
    name="tpu7x",
    line_lanes=128,
    sublanes=8,
    slice_shapes=_cubes(144),
    hbm_capacity_bytes=192 * GIBIBYTE,
    hbm_bytes_per_second=7380e9,
    ici_bytes_per_second=600e9,
    dcn_bytes_per_second=12.5e9,
    bf16_flops_per_second=2307e12,
    vmem_bytes=64 * MEBIBYTE,
    devices_per_chip=2,
    num_sparse_cores=4,
    embedding_feature="V2",
    compiler_options=_SPARSE_CORE_OPTIONS,
)
_CPU: Final = HardwareInfo(name="cpu")
_GPU: Final = HardwareInfo(name="gpu")

_BY_NAME: Final = {
    info.name: info
    for info in (_TPU_V4, _TPU_V5E, _TPU_V5P, _TPU_V6E, _TPU_7X, _CPU, _GPU)
}
_BY_DEVICE_KIND: Final[Mapping[str, HardwareInfo]] = {
    "TPU v4": _TPU_V4,
    "TPU v5 lite": _TPU_V5E,
    "TPU v5e": _TPU_V5E,
    "TPU v5": _TPU_V5P,
    "TPU v5p": _TPU_V5P,
    "TPU v6 lite": _TPU_V6E,
    "TPU v6e": _TPU_V6E,
    "TPU7x": _TPU_7X,
}


EXAMPLE_TOPOLOGIES: Final = ("v5e:2x4", "v5p:4x4x4", "tpu7x:2x2x1")
"""Examples of libtpu's topology names: a generation and its grid of chips."""

TPU_GENERATIONS: Final = tuple(info.name for info in _BY_NAME.values() if info.is_tpu)
"""Names of all TPU generations that this module knows."""


def hardware_by_name(name: str) -> HardwareInfo:
    """Returns the hardware with a given name, such as `"v5e"`.

    Raises:
      ValueError: if the name is unknown; the message lists the known names.

    Example:
      >>> hardware_by_name("v5p").line_lanes
      128
    """
    if name not in _BY_NAME:
        raise ValueError(f"hardware must be one of {sorted(_BY_NAME)}, got {name!r}.")
    return _BY_NAME[name]


def hardware_of_device(device: jax.Device) -> HardwareInfo:
    """Returns the hardware of a device, real or from a topology description.

    Raises:
      ValueError: if the device is of an unknown TPU kind.
    """
    return hardware_of_kind(device.platform, device.device_kind)


def hardware_of_kind(platform: str, device_kind: str) -> HardwareInfo:
    """Returns the hardware of a device, given JAX's names of it.

    Args:
      platform: `jax.Device.platform`.
      device_kind: `jax.Device.device_kind`.

    Raises:
      ValueError: if the device is of an unknown TPU kind.
    """
    if platform == "cpu":
        return _CPU
    if platform in ("gpu", "cuda", "rocm"):
        return _GPU
    if device_kind not in _BY_DEVICE_KIND:
        raise ValueError(
            f"device kind must be one of {sorted(_BY_DEVICE_KIND)}, got "
            f"{device_kind!r} on platform {platform!r}; pass `hardware=` "
            "to use the settings of a known kind."
        )
    return _BY_DEVICE_KIND[device_kind]


# Google Cloud's names of accelerators, and TensorCores per chip, which they count: the
# "Accelerator types" section of each generation's page.
MAX_SLICES: Final = 256
"""Maximum number of slices of a topology.

For some larger numbers libtpu does not answer, and for others it aborts the process."""


def num_slices_of(mesh: Mesh) -> int:
    """Returns the number of slices that the devices of a mesh span."""
    return len({getattr(device, "slice_index", 0) for device in mesh.devices.flat})

"""What this package knows about TPU generations, in one place.

Everybody else receives a `HardwareInfo` or reads a number off the plan. CPU and GPU are
`HardwareInfo` too, so nothing above needs a branch. Figures that were not found in a
public source are None, never guessed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Final

import jax
from jax.sharding import Mesh

MEBIBYTE: Final = 2**20
GIBIBYTE: Final = 2**30

DMA_GRANULE_BYTES: Final = 64
"""Least bytes of an access to memory by SparseCore, as the model of traffic counts.

JAX's own table, `jax/_src/tpu_info.py`, has 32 for v5p, v6e and tpu7x
(`dma_granule_size_bytes`) and 64 for later ones; this is the careful figure.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareInfo:
    """One kind of device and how rows must lie in its memory.

    Attributes:
      name: generation, `"v5e"`, `"cpu"`, ...
      line_lanes: lanes of a physical row of a table. On TPU a `[rows, dim]` array with
        `dim` below 128 is laid out by column, and every step that gathers from it
        first copies all of it; so rows are packed into lines of 128 lanes. None: the
        natural shape is used.
      sublanes: rows of a tile; arrays take a multiple of it in memory.
      hbm_capacity_bytes: memory of one chip.
      hbm_bytes_per_second: peak memory bandwidth of one chip.
      ici_bytes_per_second: what one chip can send to its neighbours within a slice,
        in one direction, over all its links together. Fewer links are in use where a
        slice is small or no torus.
      dcn_bytes_per_second: what one chip can send to other slices, over the network of
        the data centre.
      bf16_flops_per_second: peak bfloat16 arithmetic of one chip.
      vmem_bytes: on-chip memory of one core; XLA moves small arrays there.
      devices_per_chip: how many JAX devices a chip shows as.
      chip_config_name: what libtpu calls the configuration of a chip that shows as
        `devices_per_chip` devices; None: its default.
      num_sparse_cores: SparseCores of a chip that XLA can use.
      compiler_options: XLA options that train steps for this device are compiled
        with. XLA refuses the `xla_tpu_` ones for other devices.
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
    num_sparse_cores: int = 0
    compiler_options: tuple[tuple[str, str], ...] = ()

    @property
    def is_tpu(self) -> bool:
        """Whether XLA's options for TPUs, and libtpu's topologies, are for it."""
        return self.line_lanes is not None

    def with_compiler_options(self, options: Mapping[str, str]) -> "HardwareInfo":
        """Returns the same hardware with some compiler options added or replaced.

        Args:
          options: name to value, as XLA spells them.

        Raises:
          ValueError: if options are given and the hardware is no TPU.

        Example:
          >>> hardware_by_name("v5e").with_compiler_options({"a": "1"}).compiler_options
          (('a', '1'),)
        """
        if not options:
            return self
        if not self.is_tpu:
            raise ValueError(
                f"compiler_options must be empty on {self.name}, got {dict(options)}: "
                "they are for TPUs only. Leave them out there."
            )
        merged = dict(self.compiler_options) | dict(options)
        return dataclasses.replace(self, compiler_options=tuple(merged.items()))


# Capacities, bandwidths and arithmetic: the "System architecture" pages of each
# generation in Google Cloud's TPU documentation (cloud.google.com/tpu/docs/v4, v5e,
# v5p, v6e, tpu7x). Lanes, sublanes and VMEM: JAX's own table, `jax/_src/tpu_info.py`.
#
# Links within a slice: those pages give the bandwidth of a chip in both directions
# together (400, 1200, 800 and 1200 GB/s for v5e, v5p, v6e, tpu7x); half of it is what
# the chip can send. The page of v4 has none; its paper gives 6 links of 50 GB/s each
# (Jouppi et al., "TPU v4", ISCA 2023, arXiv 2304.01433).
# Links between slices: 50, 100 and 100 Gbit/s a chip for v5p, v6e, tpu7x (page of
# tpu7x); 6.4 Tbit/s for the 256 chips of a v5e pod.
#
# SparseCore offload of gathers is XLA's default; that of scatters and of long sorts has
# to be asked for. A sort on the TensorCore takes long to compile, 9 s for 900,000 pairs
# against 0.6 s, and a step has a dozen of them with those that XLA puts in scatters.
# XLA leaves up to some 131,000 keys there unless told a smaller number, which the
# compilers of earlier jax cannot be.
_SPARSE_CORE_OPTIONS: Final = (
    ("xla_tpu_enable_offloading_scatter_to_sparsecore", "true"),
    ("xla_tpu_enable_offloading_sort_to_sparsecore", "true"),
    *(
        [("xla_tpu_min_input_size_for_1d_sort_offloading", "16384")]
        if jax.__version_info__ >= (0, 12)
        else []
    ),
)

_TPU_V4: Final = HardwareInfo(
    name="v4",
    line_lanes=128,
    sublanes=8,
    hbm_capacity_bytes=32 * GIBIBYTE,
    hbm_bytes_per_second=1228e9,
    ici_bytes_per_second=300e9,
    bf16_flops_per_second=275e12,
    vmem_bytes=16 * MEBIBYTE,
    chip_config_name="megacore",
)
_TPU_V5E: Final = HardwareInfo(
    name="v5e",
    line_lanes=128,
    sublanes=8,
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
    hbm_capacity_bytes=95 * GIBIBYTE,
    hbm_bytes_per_second=2765e9,
    ici_bytes_per_second=600e9,
    dcn_bytes_per_second=6.25e9,
    bf16_flops_per_second=459e12,
    vmem_bytes=64 * MEBIBYTE,
    num_sparse_cores=4,
    compiler_options=_SPARSE_CORE_OPTIONS,
)
_TPU_V6E: Final = HardwareInfo(
    name="v6e",
    line_lanes=128,
    sublanes=8,
    hbm_capacity_bytes=32 * GIBIBYTE,
    hbm_bytes_per_second=1640e9,
    ici_bytes_per_second=400e9,
    dcn_bytes_per_second=12.5e9,
    bf16_flops_per_second=918e12,
    vmem_bytes=128 * MEBIBYTE,
    num_sparse_cores=2,
    compiler_options=_SPARSE_CORE_OPTIONS,
)
_TPU_7X: Final = HardwareInfo(
    name="tpu7x",
    line_lanes=128,
    sublanes=8,
    hbm_capacity_bytes=192 * GIBIBYTE,
    hbm_bytes_per_second=7380e9,
    ici_bytes_per_second=600e9,
    dcn_bytes_per_second=12.5e9,
    bf16_flops_per_second=2307e12,
    vmem_bytes=64 * MEBIBYTE,
    devices_per_chip=2,
    num_sparse_cores=4,
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
"""Names of slices as libtpu knows them: a generation and its chips."""

TPU_GENERATIONS: Final = tuple(info.name for info in _BY_NAME.values() if info.is_tpu)
"""Names of the generations known here."""


def hardware_by_name(name: str) -> HardwareInfo:
    """Returns the hardware of a generation's name, such as `"v5e"`.

    Raises:
      ValueError: if the name is not known.

    Example:
      >>> hardware_by_name("v5p").line_lanes
      128
    """
    if name not in _BY_NAME:
        raise ValueError(f"hardware must be one of {sorted(_BY_NAME)}, got {name!r}.")
    return _BY_NAME[name]


def hardware_of_device(device: jax.Device) -> HardwareInfo:
    """Returns what is known about a device, real or of a topology description.

    Raises:
      ValueError: if it is a TPU of a kind that is not known here.
    """
    if device.platform == "cpu":
        return _CPU
    if device.platform in ("gpu", "cuda", "rocm"):
        return _GPU
    if device.device_kind not in _BY_DEVICE_KIND:
        raise ValueError(
            f"device kind {device.device_kind!r} (platform {device.platform!r}) is not "
            f"known; known kinds: {sorted(_BY_DEVICE_KIND)}. Pass `hardware=` to use "
            "the settings of a known one."
        )
    return _BY_DEVICE_KIND[device.device_kind]


def num_slices_of(mesh: Mesh) -> int:
    """Returns how many slices the devices of a mesh belong to."""
    return len({getattr(device, "slice_index", 0) for device in mesh.devices.flat})

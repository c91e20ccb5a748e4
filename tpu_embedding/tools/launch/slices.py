"""TPU slices as Google Cloud sells them: machine types, hosts, product names.

The table is data, `slices.json`, with the pages that it is taken from. `hardware` knows
the grids of chips that a generation has.
"""

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any, Final, Literal, get_args

from tpu_embedding.hardware import TPU_GENERATIONS, hardware_by_name

BackendName = Literal["gke", "compute_engine", "queued_resource"]
BACKEND_NAMES: Final[tuple[BackendName, ...]] = get_args(BackendName)

TopologySource = Literal["node_pool", "workload_policy"]
"""Resource of a GKE slice that states its topology.

The newest generation takes it from a workload policy, in place of `--tpu-topology`.
"""

_TABLE: Final = pathlib.Path(__file__).with_name("slices.json")
_CHIPS_PER_HOST: Final = 4
"""Chips of a host, unless the slice has fewer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceFacts:
    """One TPU slice, as one backend provides it.

    Attributes:
      topology: generation and grid, such as `hardware.EXAMPLE_TOPOLOGIES`.
      grid: grid of chips, such as `"2x4"`.
      num_chips: number of chips.
      num_hosts: number of machines, each of which runs one process.
      chips_per_host: chips of a machine.
      accelerator_type: name of the product. Its number counts TensorCores.
      machine_type: machine type of Compute Engine, or "" for queued resources.
      gke_accelerator: value of GKE's node label, or "".
      topology_source: resource that states the topology of a GKE node pool.
      image_family: image of the machines on Compute Engine, or "".
      boot_disk_type: type of the boot disk on Compute Engine, or "" for the default.
      runtime_version: software version of the Cloud TPU API, or "".
    """

    topology: str
    grid: str
    num_chips: int
    num_hosts: int
    chips_per_host: int
    accelerator_type: str
    machine_type: str = ""
    gke_accelerator: str = ""
    topology_source: TopologySource = "node_pool"
    image_family: str = ""
    boot_disk_type: str = ""
    runtime_version: str = ""


def slice_facts(topology: str, backend: BackendName) -> SliceFacts:
    """Returns the machines and names of a slice.

    Args:
      topology: generation and grid of chips, such as `hardware.EXAMPLE_TOPOLOGIES`.
      backend: way to create the slice.

    Raises:
      ValueError: if the generation is unknown, has no such grid, or is not offered by
        the backend.

    Example:
      >>> from tpu_embedding.hardware import EXAMPLE_TOPOLOGIES
      >>> slice_facts(EXAMPLE_TOPOLOGIES[1], "gke").num_hosts
      16
    """
    generation, grid = _parse(topology)
    row = _table()[generation]
    if backend not in row:
        offered = [name for name in BACKEND_NAMES if name in row]
        others = [name for name in TPU_GENERATIONS if backend in _table()[name]]
        raise ValueError(
            f"backend {backend} offers no {generation} (topology {topology!r}); use "
            f"backend {' or '.join(offered)}, or a generation of {', '.join(others)}"
        )
    num_chips = math.prod(grid)
    chips_per_host = _chips_per_host(topology, num_chips, row, backend)
    cores = num_chips * row["cores_per_chip"]
    offer = row[backend]
    gke = offer if backend == "gke" else {}
    return SliceFacts(
        topology=topology,
        grid="x".join(map(str, grid)),
        num_chips=num_chips,
        num_hosts=num_chips // chips_per_host,
        chips_per_host=chips_per_host,
        accelerator_type=row["accelerator_type"].format(cores=cores),
        machine_type=_machine_types(row, backend).get(str(chips_per_host), ""),
        gke_accelerator=gke.get("accelerator", ""),
        topology_source=gke.get("topology_from", "node_pool"),
        image_family=offer.get("image_family", ""),
        boot_disk_type=offer.get("boot_disk_type", ""),
        runtime_version=offer.get("runtime_version", ""),
    )


def _parse(topology: str) -> tuple[str, tuple[int, ...]]:
    """Returns the generation and the grid, after checking that they exist."""
    generation, separator, text = topology.partition(":")
    sides = text.split("x")
    if generation not in TPU_GENERATIONS or not separator:
        raise ValueError(
            f"topology must be GENERATION:GRID with a generation of "
            f"{', '.join(TPU_GENERATIONS)}, got {topology!r}"
        )
    shapes = hardware_by_name(generation).slice_shapes
    assert shapes is not None
    grid = tuple(int(side) for side in sides if side.isascii() and side.isdigit())
    if len(grid) != len(sides) or not shapes.has(grid):
        raise ValueError(
            f"topology {topology!r} does not exist; slices of {generation} have "
            f"{shapes.describe()}"
        )
    return generation, grid


def _chips_per_host(
    topology: str, num_chips: int, row: dict[str, Any], backend: BackendName
) -> int:
    """Returns the chips of one machine; raises ValueError if none is that small."""
    if backend == "queued_resource":
        single_host = row[backend]["single_host_chips"]
        sizes = [str(size) for size in single_host]
        chips = num_chips if num_chips in single_host else _CHIPS_PER_HOST
    else:
        sizes = list(_machine_types(row, backend))
        chips = min(num_chips, _CHIPS_PER_HOST)
    if str(chips) not in sizes or num_chips < chips:
        raise ValueError(
            f"topology {topology!r} is smaller than a machine; the smallest has "
            f"{sizes[0]} chips"
        )
    return chips


def _machine_types(row: dict[str, Any], backend: BackendName) -> dict[str, str]:
    return {} if backend == "queued_resource" else row["machine_types"]


@functools.cache
def _table() -> dict[str, Any]:
    return json.loads(_TABLE.read_text(encoding="utf-8"))["generations"]

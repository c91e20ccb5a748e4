"""TPU slices as Google Cloud sells them: machine types, hosts, product names.

The table is data, `slices.json`, with the pages that it is taken from. `hardware` knows
the grids of chips that a generation has.
"""

import dataclasses
import json
import math
import pathlib
from typing import Final, Literal, get_args

from tpu_embedding.hardware import TPU_GENERATIONS
from tpu_embedding.tools.compile_report.topology import topology_hardware

BackendName = Literal["gke", "queued_resource"]
BACKEND_NAMES: Final[tuple[BackendName, ...]] = get_args(BackendName)

_TABLE: Final = pathlib.Path(__file__).with_name("slices.json")
_CHIPS_PER_HOST: Final = 4
"""Chips of a host, unless the slice has fewer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceFacts:
    """One TPU slice, as one backend provides it.

    Attributes:
      grid: grid of chips, such as `"2x4"`.
      num_hosts: number of machines, each of which runs one process.
      chips_per_host: chips of a machine.
      product: machine type on GKE; accelerator type of the Cloud TPU API, whose number
        counts TensorCores.
      gke_accelerator: value of GKE's node label, or "".
      topology_from_policy: True if a GKE node pool of several hosts takes its topology
        from a workload policy, in place of `--tpu-topology`.
      runtime_version: software version of the Cloud TPU API, or "".
    """

    grid: str
    num_hosts: int
    chips_per_host: int
    product: str
    gke_accelerator: str = ""
    topology_from_policy: bool = False
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
    generation = topology_hardware(topology).name
    sides = [int(side) for side in topology.partition(":")[2].split("x")]
    table = json.loads(_TABLE.read_text(encoding="utf-8"))["generations"]
    if backend not in table[generation]:
        (other,) = table[generation]
        offered = [name for name in TPU_GENERATIONS if backend in table[name]]
        raise ValueError(
            f"backend {backend} offers no {generation} (topology {topology!r}); use "
            f"backend {other}, or a generation of {', '.join(offered)}"
        )
    row = table[generation][backend]
    num_chips = math.prod(sides)
    sizes = row["single_host_chips"]
    chips_per_host = num_chips if num_chips in sizes else _CHIPS_PER_HOST
    if num_chips < chips_per_host:
        raise ValueError(
            f"topology {topology!r} is smaller than a machine; the smallest has "
            f"{sizes[0]} chips"
        )
    cores = num_chips * row.get("cores_per_chip", 1)
    return SliceFacts(
        grid="x".join(map(str, sides)),
        num_hosts=num_chips // chips_per_host,
        chips_per_host=chips_per_host,
        product=row["product"].format(chips=chips_per_host, cores=cores),
        gke_accelerator=row.get("gke_accelerator", ""),
        topology_from_policy=row.get("topology_from_policy", False),
        runtime_version=row.get("runtime_version", ""),
    )

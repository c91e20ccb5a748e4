"""Meshes of TPU topologies to compile programs for, without TPUs.

`libtpu`, which the `tpu` extra installs, compiles ahead of time for any named topology.
No function of this module touches a device.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from tpu_embedding.dynamic.directory import IdDirectory
from tpu_embedding.hardware import EXAMPLE_TOPOLOGIES, HardwareInfo, hardware_by_name
from tpu_embedding.host_without_tpus import ONE_HOST
from tpu_embedding.plan.device_mesh import device_mesh
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tools.compile_report.slice_shapes import (
    CHIP_CONFIG_NAMES,
    MAX_SLICES,
    SLICE_SHAPES,
    TPU_GENERATIONS,
)

Tree = TypeVar("Tree")

_TOPOLOGY: Final = re.compile(r"(\w+):(-?\d{1,40}(?:x-?\d{1,40})*)", re.ASCII)

# Variables while libtpu loads and describes a topology. Without the first two, libtpu
# queries a metadata server and takes a lock file. They would hide the chips of a real
# host from a later process, so they are put back. The others describe one host;
# libtpu ends the process if the variables of a real host hold something else than
# bounds.
_HOST: Final = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    **ONE_HOST,
    "TPU_CHIPS_PER_HOST_BOUNDS": None,
}


def topology_mesh(topology: str, *, num_slices: int = 1) -> Mesh:
    """Returns a mesh of the devices of one TPU slice or of several equal slices.

    The grid must be one that slices of the generation have. libtpu builds others, too,
    but for some it aborts the process.

    Args:
      topology: generation and chip grid of a slice, as in
        `hardware.EXAMPLE_TOPOLOGIES`.
      num_slices: number of slices, from 1 to 256, connected by the data-centre
        network.

    Returns:
      A mesh to lower and compile for, as `te.device_mesh` makes it of such devices; it
      cannot hold arrays.

    Raises:
      ImportError: if libtpu is not installed.
      ValueError: if the topology is unknown, or `num_slices` is out of range.
    """
    hardware = topology_hardware(topology)
    if not 1 <= num_slices <= MAX_SLICES:
        raise ValueError(
            f"num_slices must be from 1 to {MAX_SLICES}, got {num_slices}."
        )
    try:
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError(
            "Compiling for a TPU topology needs libtpu; install it with "
            "pip install '.[tpu]' in a clone of the repository."
        ) from None
    options: dict[str, Any] = {}
    if hardware.name in CHIP_CONFIG_NAMES:
        options["chip_config_name"] = CHIP_CONFIG_NAMES[hardware.name]
    if num_slices > 1:
        options["num_slices"] = num_slices
    try:
        with _environment(_HOST):
            description = topologies.get_topology_desc(
                topology_name=topology, platform="tpu", **options
            )
    except Exception as error:
        raise _unknown(topology, str(error)) from error
    return device_mesh(description.devices)


def topology_hardware(topology: str) -> HardwareInfo:
    """Returns the hardware of a topology, after checking its name and grid.

    Raises:
      ValueError: if the generation is unknown, or its slices have no such grid.
    """
    match = _TOPOLOGY.fullmatch(topology)
    if match is None or match[1] not in TPU_GENERATIONS:
        raise _unknown(topology, f"known generations: {', '.join(TPU_GENERATIONS)}")
    hardware = hardware_by_name(match[1])
    grid = tuple(map(int, match[2].split("x")))
    shapes = SLICE_SHAPES[hardware.name]
    if not shapes.has(grid):
        raise ValueError(
            f"topology {topology!r} does not exist; slices of {hardware.name} have "
            f"{shapes.describe()}."
        )
    return hardware


def num_slices_of(mesh: Mesh) -> int:
    """Returns the number of slices that the devices of a mesh span."""
    return len({getattr(device, "slice_index", 0) for device in mesh.devices.flat})


def _unknown(topology: str, reason: str) -> ValueError:
    return ValueError(
        f"topology {topology!r} is not known; give a generation and its chips, as in "
        f"{list(EXAMPLE_TOPOLOGIES)}; {reason.rstrip('.')}."
    )


@contextlib.contextmanager
def _environment(variables: dict[str, str | None]) -> Iterator[None]:
    """Sets environment variables within a context; None removes one."""
    before = {name: os.environ.get(name) for name in variables}
    _set_variables(variables)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def abstract_arrays(tree: Tree, plan: EmbeddingPlan) -> Tree:
    """Returns the shapes of a train state with the shardings of a real state.

    Args:
      tree: pytree of arrays or `jax.ShapeDtypeStruct`, as from `nnx.eval_shape`. Tables
        and slot variables lie in dicts by the names of their stacks.
      plan: plan of the layer.

    Returns:
      The same tree of `jax.ShapeDtypeStruct`. Packed rows are sharded as their stack;
      all other arrays are replicated.
    """
    by_name = {stack.name: stack for stack in plan.stacks}
    for stack in plan.stacks:
        names = stack.vocabulary.stacks.array_names(stack)
        by_name |= dict.fromkeys(names, stack)

    def place(path: Any, leaf: Any) -> Any:
        if not _are_rows(leaf):
            return _struct(leaf, plan.replicated)
        names = (getattr(part, "key", None) for part in reversed(path))
        stack = by_name[next(name for name in names if name in by_name)]
        sharding = plan.rows_sharding(stack)
        return jax.tree.map(lambda x: _struct(x, sharding), leaf)

    return jax.tree.map_with_path(place, tree, is_leaf=_are_rows)


def _are_rows(leaf: Any) -> bool:
    return isinstance(leaf, PackedRows | IdDirectory)


def abstract_batch(batch: Tree, plan: EmbeddingPlan) -> Tree:
    """Returns the shapes of a batch with the shardings that `shard_batch` gives."""
    return jax.tree.map(
        lambda leaf: _struct(leaf, plan.sharding_of_samples(leaf.shape)), batch
    )


def _struct(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

"""Meshes of TPU topologies, for compiling programs without TPUs.

`libtpu`, from the `tpu` extra, compiles ahead of time for any named topology. Nothing
here uses a device.
"""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from tpu_embedding.argument_checks import invalid
from tpu_embedding.dynamic.directory import IdDirectory
from tpu_embedding.hardware import EXAMPLE_TOPOLOGIES, HardwareInfo, hardware_by_name
from tpu_embedding.host_without_tpus import ONE_HOST
from tpu_embedding.plan.mesh_options import device_mesh
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.rows.packed_rows import PackedRows

Tree = TypeVar("Tree")

_TOPOLOGY: Final = re.compile(r"(\w+):(-?\d{1,40}(?:x-?\d{1,40})*)", re.ASCII)

# Environment variables that are set while libtpu loads and describes a topology.
# Without the first two, libtpu queries a metadata server and takes a lock file. All
# variables are restored afterwards, because they would hide a real host's chips from a
# later process. `ONE_HOST` replaces a real host's variables, because libtpu ends the
# process if their values are malformed.
_HOST: Final = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    **ONE_HOST,
}
_REMOVED: Final = "TPU_CHIPS_PER_HOST_BOUNDS"


def topology_mesh(topology: str, *, num_slices: int = 1) -> Mesh:
    """Builds a mesh for one TPU slice or several equal slices.

    Args:
      topology: generation and chip grid of a slice, as in
        `hardware.EXAMPLE_TOPOLOGIES`. The generation must have slices with this grid.
      num_slices: number of slices, from 1 to 256, connected by the data-center network.

    Returns:
      A mesh like `te.device_mesh`'s. You can lower and compile programs for it, but it
      cannot hold arrays.

    Raises:
      ImportError: if libtpu is not installed.
      ValueError: if the topology is unknown, or `num_slices` is out of range.

    Example:
      If you have installed the `tpu` extra::

          mesh = topology_mesh("v5e:2x4")
          plan = te.make_plan(feature_config, mesh)
    """
    hardware = topology_hardware(topology)
    if not 1 <= num_slices <= MAX_SLICES:
        raise invalid("num_slices", f"be from 1 to {MAX_SLICES}", num_slices)
    try:
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError(
            "Compiling for a TPU topology needs libtpu. Install it with "
            "pip install '.[tpu]' in a clone of the repository."
        ) from None
    options: dict[str, Any] = dict(CHIP_OPTIONS.get(hardware.name, {}))
    if num_slices > 1:
        options["num_slices"] = num_slices
    try:
        with _one_host():
            description = topologies.get_topology_desc(
                topology_name=topology, platform="tpu", **options
            )
    except Exception as error:
        raise _unknown(topology, str(error)) from error
    return device_mesh(description.devices)


def topology_hardware(topology: str) -> HardwareInfo:
    """Checks a topology's name and grid, and finds its hardware."""
    match = _TOPOLOGY.fullmatch(topology)
    if match is None or match[1] not in TPU_GENERATIONS:
        raise _unknown(topology, f"Known generations: {', '.join(TPU_GENERATIONS)}")
    hardware = hardware_by_name(match[1])
    grid = tuple(map(int, match[2].split("x")))
    # libtpu accepts some grids that no slice has, and aborts the process for other
    # grids.
    shapes = SLICE_SHAPES[hardware.name]
    if not shapes.has(grid):
        rule = f"be a slice of {hardware.name}, which has {shapes.describe()}"
        raise invalid("topology", rule, topology)
    return hardware


def _unknown(topology: str, reason: str) -> ValueError:
    rule = f"be a generation and its chips, as in {list(EXAMPLE_TOPOLOGIES)}"
    return invalid("topology", rule, topology, f"{reason.rstrip('.')}.")


@contextlib.contextmanager
def _one_host() -> Iterator[None]:
    names = (*_HOST, _REMOVED)
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ.update(_HOST)
    try:
        yield
    finally:
        for name in _HOST:
            os.environ.pop(name, None)
        os.environ.update(before)


def abstract_arrays(tree: Tree, plan: EmbeddingPlan) -> Tree:
    """Replaces the arrays in a train state by shapes, sharded like a real state.

    Args:
      tree: pytree of arrays or `jax.ShapeDtypeStruct`, as from `nnx.eval_shape`. Tables
        and slot variables are in dicts by stack name.
      plan: embedding plan.

    Returns:
      The same tree of `jax.ShapeDtypeStruct`. Packed rows and id directories are
      sharded like their stack, and all other arrays are replicated.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=1000, dim=8, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> key = jax.random.key(0)
      >>> tables = jax.eval_shape(te.functional.init_tables, plan, key)
      >>> (lines,) = jax.tree.leaves(abstract_arrays(tables, plan))
      >>> lines.sharding == plan.rows_sharding(plan.stacks[0])
      True
    """
    by_name = {stack.name: stack for stack in plan.stacks}
    for stack in plan.stacks:
        by_name |= dict.fromkeys(stack.array_names, stack)

    def place(path: Any, leaf: Any) -> Any:
        if not _are_rows(leaf):
            return _struct(leaf, plan.replicated)
        # The innermost name wins, because the outer dicts may have any keys.
        names = (getattr(key, "key", None) for key in reversed(path))
        stack = by_name[next(name for name in names if name in by_name)]
        sharding = plan.rows_sharding(stack)
        return jax.tree.map(lambda array: _struct(array, sharding), leaf)

    return jax.tree.map_with_path(place, tree, is_leaf=_are_rows)


def _are_rows(leaf: Any) -> bool:
    return isinstance(leaf, PackedRows | IdDirectory)


def abstract_batch(batch: Tree, plan: EmbeddingPlan) -> Tree:
    """Replaces the arrays in a batch by shapes, sharded like `shard_batch`'s result.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=1000, dim=8, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> ids = {"watched": jax.ShapeDtypeStruct((16,), "int32")}
      >>> abstract_batch(ids, plan)["watched"].sharding == plan.batch_sharding
      True
    """
    return jax.tree.map(
        lambda leaf: _struct(leaf, plan.sharding_of_samples(leaf.shape)), batch
    )


def _struct(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


MAX_SLICES: Final = 256
"""Maximum number of slices of a topology.

For larger numbers, libtpu may hang or abort the process."""

CHIP_OPTIONS: Final = {"v4": {"chip_config_name": "megacore"}}
"""libtpu options that make a chip one device, if it could also be several devices."""

_MAX_SIDE: Final = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceShapes:
    """Chip grids that slices can have.

    Attributes:
      cube_side: chips per side of a cube. Slices larger than the `fixed` grids are made
        of these cubes. If None, only the `fixed` grids exist.
    """

    fixed: tuple[tuple[int, ...], ...]
    cube_side: int | None
    max_chips: int

    def has(self, grid: tuple[int, ...]) -> bool:
        if grid in self.fixed or self.cube_side is None:
            return grid in self.fixed
        fits = len(grid) == len(self.fixed[0]) and math.prod(grid) <= self.max_chips
        return fits and all(
            side % self.cube_side == 0 and 0 < side <= _MAX_SIDE for side in grid
        )

    def describe(self) -> str:
        """Describes the allowed grids in words, for errors."""
        fixed = ", ".join("x".join(map(str, grid)) for grid in self.fixed)
        if self.cube_side is None:
            return fixed
        return (
            f"{fixed}, or {len(self.fixed[0])} sides that are multiples of "
            f"{self.cube_side} up to {_MAX_SIDE}, with at most {self.max_chips} chips"
        )


def _cubes(num_cubes: int) -> SliceShapes:
    fixed = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
    return SliceShapes(fixed=fixed, cube_side=4, max_chips=4**3 * num_cubes)


_SQUARES: Final = SliceShapes(
    fixed=((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    cube_side=None,
    max_chips=256,
)

# Sources: the "Configurations" sections of Google Cloud's pages of each generation, and
# Google's tool xpk (`generate_tpu_topologies` in `system_characteristics.py`), which
# allows at most 64, 140 and 144 cubes. A slice of one chip is part of a host.
SLICE_SHAPES: Final = {
    "v4": _cubes(64),
    "v5e": _SQUARES,
    "v5p": _cubes(140),
    "v6e": _SQUARES,
    "tpu7x": _cubes(144),
}
"""Allowed grids by generation."""

TPU_GENERATIONS: Final = tuple(SLICE_SHAPES)

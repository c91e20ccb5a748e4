"""Meshes of TPU topologies to compile programs for, without TPUs.

`libtpu`, which the `tpu` extra installs, compiles ahead of time for any named topology.
No function of this module touches a device.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from tpu_embedding.hardware import (
    EXAMPLE_TOPOLOGIES,
    TPU_GENERATIONS,
    HardwareInfo,
    hardware_by_name,
)
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.packed_rows import PackedRows

Tree = TypeVar("Tree")

# libtpu aborts the process for a side of 0, so names are validated first.
_TOPOLOGY: Final = re.compile(r"(\w+):[1-9]\d*(x[1-9]\d*){1,2}(_twisted|_untwisted)?")

# Describes one host; without a description libtpu prints warnings.
_HOST: Final = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_HOST_BOUNDS": "1,1,1"}


def topology_mesh(
    topology: str,
    axis_names: Sequence[str] = ("shard",),
    axis_sizes: Sequence[int] | None = None,
    *,
    num_slices: int = 1,
) -> Mesh:
    """Returns a mesh of the devices of one TPU slice or of several equal slices.

    Args:
      topology: generation and chip grid of a slice, as in
        `hardware.EXAMPLE_TOPOLOGIES`.
      axis_names: names of the mesh axes.
      axis_sizes: sizes of the mesh axes; None puts all devices on one axis.
      num_slices: number of slices, connected by the data-centre network. The mesh
        holds the devices slice by slice.

    Returns:
      A mesh to lower and compile for; it cannot hold arrays.

    Raises:
      ImportError: if libtpu is not installed.
      ValueError: if the topology is unknown.
    """
    hardware = _hardware_of(topology)
    if num_slices < 1:
        raise ValueError(f"num_slices must be at least 1, got {num_slices}.")
    # Without these, libtpu queries a metadata server and takes a lock file.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError(
            "Compiling for a TPU topology needs libtpu; install it with "
            "pip install 'tpu-embedding[tpu]'."
        ) from None
    options: dict[str, Any] = {}
    if hardware.chip_config_name is not None:
        options["chip_config_name"] = hardware.chip_config_name
    if num_slices > 1:
        options["num_slices"] = num_slices
    try:
        with _environment(_HOST):
            description = topologies.get_topology_desc(
                topology_name=topology, platform="tpu", **options
            )
    except Exception as error:
        raise _unknown(topology, str(error)) from error
    devices = np.asarray(description.devices)
    if axis_sizes is not None:
        devices = devices.reshape(axis_sizes)
    return Mesh(devices, tuple(axis_names))


def _hardware_of(topology: str) -> HardwareInfo:
    match = _TOPOLOGY.fullmatch(topology)
    if match is None or match.group(1) not in TPU_GENERATIONS:
        raise _unknown(topology, f"known generations: {', '.join(TPU_GENERATIONS)}")
    return hardware_by_name(match.group(1))


def _unknown(topology: str, reason: str) -> ValueError:
    return ValueError(
        f"topology {topology!r} is not known; give a generation and its chips, as in "
        f"{list(EXAMPLE_TOPOLOGIES)}. ({reason})"
    )


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets environment variables within a context, except those already set."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def abstract_arrays(tree: Tree, plan: EmbeddingPlan) -> Tree:
    """Returns the shapes of a train state with the shardings of a real state.

    Args:
      tree: pytree of arrays or `jax.ShapeDtypeStruct`, as from `nnx.eval_shape`.
      plan: plan of the layer.

    Returns:
      The same tree of `jax.ShapeDtypeStruct`. Packed rows are sharded as their stack;
      all other arrays are replicated.
    """

    def place(leaf: Any) -> Any:
        if isinstance(leaf, PackedRows):
            sharding = plan.rows_sharding(_stack_of(leaf, plan))
            return jax.tree.map(lambda x: _struct(x, sharding), leaf)
        return _struct(leaf, plan.replicated)

    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, PackedRows))


def _stack_of(rows: PackedRows, plan: EmbeddingPlan) -> StackPlan:
    contents = rows.layout.contents
    assert contents is not None
    (stack,) = (
        stack
        for stack in plan.stacks
        if stack.tables[0].name == contents.tables[0].name
    )
    return stack


def abstract_batch(batch: Tree, plan: EmbeddingPlan) -> Tree:
    """Returns the shapes of a batch with the shardings that `shard_batch` gives."""

    def place(leaf: Any) -> Any:
        divides = bool(leaf.ndim) and leaf.shape[0] % plan.num_batch_shards == 0
        return _struct(leaf, plan.batch_sharding if divides else plan.replicated)

    return jax.tree.map(place, batch)


def _struct(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

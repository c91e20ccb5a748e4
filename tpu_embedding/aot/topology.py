"""Meshes of TPUs that are not there, to compile programs for.

`libtpu`, which the `tpu` extra installs, compiles ahead of time for any named topology.
Nothing here touches a device.
"""

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from tpu_embedding.hardware import EXAMPLE_TOPOLOGIES
from tpu_embedding.layout.packed_rows import PackedRows
from tpu_embedding.layout.plan import EmbeddingPlan

Tree = TypeVar("Tree")


def topology_mesh(
    topology: str,
    axis_names: Sequence[str] = ("shard",),
    axis_sizes: Sequence[int] | None = None,
) -> Mesh:
    """Returns a mesh of the devices of a TPU slice.

    Args:
      topology: generation and chips, as in `hardware.EXAMPLE_TOPOLOGIES`.
      axis_names: of the mesh.
      axis_sizes: of the mesh; None puts all devices on a single axis.

    Returns:
      A mesh to lower and compile for; it cannot hold arrays.

    Raises:
      ImportError: if libtpu is not installed.
      ValueError: if the topology is not known.
    """
    # Without these, libtpu asks a metadata server where it runs, and takes a lock.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        import libtpu  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError(
            "Compiling for a TPU topology needs libtpu; install it with pip install "
            "'tpu-embedding[tpu]'."
        ) from None
    try:
        description = topologies.get_topology_desc(
            topology_name=topology, platform="tpu"
        )
    except Exception as error:
        raise ValueError(
            f"topology {topology!r} is not known to libtpu; give a generation and its "
            f"chips, as in {list(EXAMPLE_TOPOLOGIES)}. ({error})"
        ) from error
    devices = np.asarray(description.devices)
    if axis_sizes is not None:
        devices = devices.reshape(axis_sizes)
    return Mesh(devices, tuple(axis_names))


def abstract_arrays(tree: Tree, plan: EmbeddingPlan) -> Tree:
    """Gives the arrays of a train state the shardings that real ones have.

    Args:
      tree: pytree of arrays or `jax.ShapeDtypeStruct`, as from `nnx.eval_shape`.
      plan: of the layer.

    Returns:
      The tree with `jax.ShapeDtypeStruct`: packed rows sharded over all devices,
      everything else on every device.
    """

    def place(leaf: Any) -> Any:
        if isinstance(leaf, PackedRows):
            return jax.tree.map(lambda x: _struct(x, plan.sharding), leaf)
        return _struct(leaf, plan.replicated)

    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, PackedRows))


def abstract_batch(batch: Tree, plan: EmbeddingPlan) -> Tree:
    """Gives a batch, or its shapes, the shardings of `place_batch`."""

    def place(leaf: Any) -> Any:
        divides = bool(leaf.ndim) and leaf.shape[0] % plan.num_shards == 0
        return _struct(leaf, plan.sharding if divides else plan.replicated)

    return jax.tree.map(place, batch)


def _struct(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

"""Meshes of several axes, and every way to place rows on them."""

import math

import jax
import numpy as np

import tpu_embedding as te

MESHES = {
    "1": (1,),
    "2": (2,),
    "2x2": (2, 2),
    "4x2": (4, 2),
    "2x2x2": (2, 2, 2),
}
AXES = ("data", "model", "expert")


def mesh_of_shape(name):
    """Returns a mesh of the first devices, with as many axes as sizes."""
    shape = MESHES[name]
    devices = np.asarray(jax.devices()[: math.prod(shape)]).reshape(shape)
    return jax.sharding.Mesh(devices, AXES[: len(shape)])


def placements_on(name):
    """Returns each placement of a mesh, by name."""
    axes = AXES[: len(MESHES[name])]
    found = {"whole": te.Sharded(), "replicated": te.Replicated()}
    if len(axes) > 1:
        found |= {axis: te.Sharded(axes=(axis,)) for axis in axes}
    if len(axes) > 2:
        found["data+expert"] = te.Sharded(axes=("expert", "data"))
    return found


def assert_replicas_equal(tree):
    """Asserts that all devices with the same part of an array have the same bits."""
    for leaf in jax.tree.leaves(tree):
        parts = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data)
            first = parts.setdefault(str(shard.index), data)
            assert first.tobytes() == data.tobytes(), (first, data)

"""The libraries that `peers.py` times: one module for each.

Each module has a class `Side`:

    side = Side(setting)
    batch = side.load(ids)         # int32 [tables, batch, valence]; not timed
    side.train(batch)              # lookup, gradient and update; waits for the end
    side.forward(batch)            # lookup alone; waits for the end
    side.activations(batch)        # its result, [batch, tables, dim], NumPy
    side.versions                  # of the libraries

A side works in its library's own form: a list of activations where the library has one
object per table, one array where it fuses them. This module needs no library itself.
"""

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideInfo:
    """A library, as `peers.py` knows it before its process starts.

    Attributes:
      title: name in tables and pictures.
      module: module of this folder that has its `Side`.
      requires: modules that its interpreter must find.
      packages: argument of `pip install` that brings them.
      optimizer: `rowwise_adagrad`, or `adagrad` where the library has no other.
    """

    title: str
    module: str
    requires: tuple[str, ...]
    packages: str
    optimizer: str


OURS: Final = "ours"
SIDES: Final = {
    OURS: SideInfo(
        title="tpu_embedding",
        module="embedding_layer",
        requires=("tpu_embedding",),
        packages=".",
        optimizer="rowwise_adagrad",
    ),
    "fbgemm": SideInfo(
        title="FBGEMM",
        module="fbgemm",
        requires=("torch", "fbgemm_gpu"),
        packages="torch, then pip install --no-deps fbgemm-gpu-cpu numpy",
        optimizer="rowwise_adagrad",
    ),
    "torch": SideInfo(
        title="PyTorch EmbeddingBag, sparse",
        module="torch_bags",
        requires=("torch", "numpy"),
        packages="torch numpy",
        optimizer="adagrad",
    ),
    "tensorflow": SideInfo(
        title="TensorFlow, IndexedSlices",
        module="tensorflow_slices",
        requires=("tensorflow", "tf_keras"),
        packages="tensorflow tf-keras",
        optimizer="adagrad",
    ),
    "jax_dense": SideInfo(
        title="JAX, dense gradients",
        module="jax_dense",
        requires=("jax", "optax"),
        packages="jax optax",
        optimizer="adagrad",
    ),
}
"""Name in commands to library."""

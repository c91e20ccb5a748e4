"""The libraries that `peers.py` and `serving_latency.py` time: one module for each.

Each module has a class `Side`:

    side = Side(setting)
    batch = side.load(ids)         # int32 [tables, batch, valence]; not timed
    side.train(batch)              # lookup, gradient and update; waits for the end
    side.forward(batch)            # lookup alone; waits for the end
    side.activations(batch)        # its result, [batch, tables, dim], NumPy
    side.versions                  # of the libraries

A side of `serving_latency.py` has no `train`. Its `load` returns NumPy arrays, and its
`forward` takes them and returns NumPy arrays.

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
      table_copies: memory at its peak, as a multiple of the tables.
    """

    title: str
    module: str
    requires: tuple[str, ...]
    packages: str
    optimizer: str
    table_copies: float


OURS: Final = "ours"
SIDES: Final = {
    OURS: SideInfo(
        title="tpu_embedding",
        module="embedding_layer",
        requires=("tpu_embedding",),
        packages=".",
        optimizer="rowwise_adagrad",
        table_copies=1.1,
    ),
    "fbgemm": SideInfo(
        title="FBGEMM",
        module="fbgemm",
        requires=("torch", "fbgemm_gpu"),
        packages="torch, then pip install --no-deps fbgemm-gpu-cpu numpy",
        optimizer="rowwise_adagrad",
        table_copies=1.2,
    ),
    "torch": SideInfo(
        title="PyTorch EmbeddingBag, sparse",
        module="torch_bags",
        requires=("torch", "numpy"),
        packages="torch numpy",
        optimizer="adagrad",
        table_copies=2.2,
    ),
    "tensorflow": SideInfo(
        title="TensorFlow, IndexedSlices",
        module="tensorflow_slices",
        requires=("tensorflow", "tf_keras"),
        packages="tensorflow tf-keras",
        optimizer="adagrad",
        table_copies=2.3,
    ),
    "jax_dense": SideInfo(
        title="JAX, dense gradients",
        module="jax_dense",
        requires=("jax", "optax"),
        packages="jax optax",
        optimizer="adagrad",
        table_copies=3.0,
    ),
    "keras_rs": SideInfo(
        title="keras-rs on JAX",
        module="keras_rs_layer",
        requires=("keras_rs", "jax"),
        packages="keras-rs jax",
        optimizer="adagrad",
        table_copies=4.2,
    ),
}
"""Name in commands to library."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """A way to serve lookups, as `serving_latency.py` knows it.

    Attributes:
      title: name in tables.
      module: module of this folder that has its `Side`.
      requires: modules that its interpreter must find.
      export: format that `serving_export.py` writes for it; None: it needs no export.
    """

    title: str
    module: str
    requires: tuple[str, ...]
    export: str | None = None


SERVERS: Final = {
    "stablehlo": ServerInfo(
        title="StableHLO, `te.export.load`",
        module="served_stablehlo",
        requires=("tpu_embedding",),
        export="stablehlo",
    ),
    "tensorflow": ServerInfo(
        title="SavedModel, TensorFlow",
        module="served_saved_model",
        requires=("tensorflow", "tpu_embedding"),
        export="saved_model",
    ),
    "torch": ServerInfo(
        title="TorchScript EmbeddingBag",
        module="served_torch",
        requires=("torch", "numpy"),
    ),
}
"""Name in commands to way to serve; the first is compared with the others."""

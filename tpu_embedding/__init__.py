"""Embedding tables for JAX on TPUs: sharded, exact under any skew, any optax optimizer.

Start with `TPUEmbedding`, the Flax layer, and `value_and_grad` and `Optimizer`, which
train it. The rest stands in modules, among them `tpu_embedding.linen`, the layer for
Flax Linen, and `tpu_embedding.functional`, the lookup without Flax.

Names are imported when they are used first: `import tpu_embedding` takes no time, and
Orbax is loaded only by a program that saves.
"""

import importlib as _importlib
import sys as _sys
import threading as _threading
import types as _types
from typing import TYPE_CHECKING
from typing import Any as _Any

from tpu_embedding.host_without_tpus import describe_host_without_tpus as _describe_host

if TYPE_CHECKING:  # For editors and type checkers; `_MODULE_OF` has the same names.
    from tpu_embedding import checkpoint as checkpoint
    from tpu_embedding import distributed as distributed
    from tpu_embedding import dynamic as dynamic
    from tpu_embedding import export as export
    from tpu_embedding import functional as functional
    from tpu_embedding import gradients as gradients
    from tpu_embedding import hardware as hardware
    from tpu_embedding import host_memory as host_memory
    from tpu_embedding import initializers as initializers
    from tpu_embedding import inputs as inputs
    from tpu_embedding import metrics as metrics
    from tpu_embedding import nn as nn
    from tpu_embedding import optimizers as optimizers
    from tpu_embedding.backends import SparseCore as SparseCore
    from tpu_embedding.checkpoint.saving import restore as restore
    from tpu_embedding.checkpoint.saving import save as save
    from tpu_embedding.config import FeatureConfig as FeatureConfig
    from tpu_embedding.config import QuantizationConfig as QuantizationConfig
    from tpu_embedding.config import TableConfig as TableConfig
    from tpu_embedding.dynamic import Dynamic as Dynamic
    from tpu_embedding.nn import Optimizer as Optimizer
    from tpu_embedding.nn import PipelinedTrainStep as PipelinedTrainStep
    from tpu_embedding.nn import TPUEmbedding as TPUEmbedding
    from tpu_embedding.nn import grad as grad
    from tpu_embedding.nn import linen as linen
    from tpu_embedding.nn import value_and_grad as value_and_grad
    from tpu_embedding.placement import AutoPlacement as AutoPlacement
    from tpu_embedding.placement import Replicated as Replicated
    from tpu_embedding.placement import ReplicateSmall as ReplicateSmall
    from tpu_embedding.placement import Sharded as Sharded
    from tpu_embedding.plan.device_mesh import device_mesh as device_mesh
    from tpu_embedding.plan.make_plan import make_plan as make_plan
    from tpu_embedding.plan.plan import EmbeddingPlan as EmbeddingPlan
    from tpu_embedding.types import DenseIds as DenseIds
    from tpu_embedding.types import RaggedIds as RaggedIds
    from tpu_embedding.types import SparseIds as SparseIds

    __version__: str

_MODULES = {
    "checkpoint": "checkpoint",
    "distributed": "distributed",
    "dynamic": "dynamic",
    "export": "export",
    "functional": "functional",
    "gradients": "gradients",
    "hardware": "hardware",
    "host_memory": "host_memory",
    "initializers": "initializers",
    "inputs": "inputs",
    "linen": "nn.linen",
    "metrics": "metrics",
    "nn": "nn",
    "optimizers": "optimizers",
}
"""Public modules of the package, and where they stand."""

_MODULE_OF = {
    "AutoPlacement": "placement",
    "DenseIds": "types",
    "Dynamic": "dynamic",
    "EmbeddingPlan": "plan.plan",
    "FeatureConfig": "config",
    "Optimizer": "nn",
    "PipelinedTrainStep": "nn",
    "QuantizationConfig": "config",
    "RaggedIds": "types",
    "ReplicateSmall": "placement",
    "Replicated": "placement",
    "Sharded": "placement",
    "SparseCore": "backends",
    "SparseIds": "types",
    "TPUEmbedding": "nn",
    "TableConfig": "config",
    "device_mesh": "plan.device_mesh",
    "grad": "nn",
    "make_plan": "plan.make_plan",
    "restore": "checkpoint.saving",
    "save": "checkpoint.saving",
    "value_and_grad": "nn",
}
"""The module that has each public name."""

__all__ = [*_MODULES, *_MODULE_OF]  # pyright: ignore[reportUnsupportedDunderAll]


_describe_host()

_lock = _threading.RLock()
"""Two threads that import parts of the package at once could wait for each other."""


def __getattr__(name: str) -> _Any:
    """Imports a public name when it is used first."""
    with _lock:
        if name in globals():  # Another thread was faster.
            return globals()[name]
        if name in _MODULES:
            value = _module(_MODULES[name])
            _hide_internal_names(value)
        elif name in _MODULE_OF:
            value = getattr(_module(_MODULE_OF[name]), name)
        elif name == "__version__":
            value = _version()
        else:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}{_way_out(name)}"
            )
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Returns the public names, also those that nobody has used yet."""
    return sorted([*__all__, "__version__", *(n for n in globals() if n[0] == "_")])


class _Package(_types.ModuleType):
    """The type of this module, whose public modules show their public names only."""

    def __setattr__(self, name: str, value: _Any) -> None:
        super().__setattr__(name, value)
        if name in _MODULES:  # Python has imported the module.
            _hide_internal_names(value)


_sys.modules[__name__].__class__ = _Package


def _hide_internal_names(module: _types.ModuleType) -> None:
    """Gives a module `__all__`, unless it has one, and a `__dir__` that follows it."""
    names = vars(module)
    public = (
        n for n, value in names.items() if not isinstance(value, _types.ModuleType)
    )
    names.setdefault("__all__", sorted(n for n in public if n[0] != "_"))
    names["__dir__"] = lambda: sorted(
        [*names["__all__"], *(name for name in names if name[0] == "_")]
    )


def _module(path: str) -> _Any:
    return _importlib.import_module(f"{__name__}.{path}")


def _way_out(name: str) -> str:
    """Returns where a name stands that this module lacks; empty for an unknown one."""
    if name.startswith("_"):
        return ""
    modules = ("functional", "gradients", "inputs", "initializers", "hardware", "nn")
    for module in modules:
        value = getattr(_module(module), name, None)
        # Modules within a public one are private.
        if value is not None and not isinstance(value, _types.ModuleType):
            return f"; it is {__name__}.{module}.{name}"
    return ""


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("tpu-embedding")
    except importlib.metadata.PackageNotFoundError:  # A checkout, not installed.
        return "unknown"

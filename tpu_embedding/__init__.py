"""Sharded embedding tables for JAX on TPUs, trained with any optax optimizer.

Results are exact under any skew. Start with `TPUEmbedding`, the Flax layer, and train
it with `value_and_grad` and `Optimizer`. `tpu_embedding.linen` has the layer for Flax
Linen, and `tpu_embedding.functional` has lookups without Flax.
"""

import sys as _sys
import types as _types
from typing import TYPE_CHECKING
from typing import Any as _Any

from tpu_embedding.host_without_tpus import describe_host_without_tpus as _describe_host
from tpu_embedding.lazy_names import import_when_used as _import_when_used
from tpu_embedding.lazy_names import lazy_names as _lazy_names
from tpu_embedding.lazy_names import show_public_names_only as _show_public_names_only

# Names are imported on first use. The package then imports fast, and Orbax is loaded
# only in programs that save or restore.
if TYPE_CHECKING:  # Editors, type checkers and `lazy_names` read the public names here.
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
    from tpu_embedding.checkpoint.saving import restore as restore
    from tpu_embedding.checkpoint.saving import save as save
    from tpu_embedding.config import FeatureConfig as FeatureConfig
    from tpu_embedding.config import QuantizationConfig as QuantizationConfig
    from tpu_embedding.config import Replicated as Replicated
    from tpu_embedding.config import Sharded as Sharded
    from tpu_embedding.config import TableConfig as TableConfig
    from tpu_embedding.dynamic import Dynamic as Dynamic
    from tpu_embedding.host_rows.placement import HostRows as HostRows
    from tpu_embedding.host_rows.training import host_rows as host_rows
    from tpu_embedding.nn import Optimizer as Optimizer
    from tpu_embedding.nn import PipelinedTrainStep as PipelinedTrainStep
    from tpu_embedding.nn import TPUEmbedding as TPUEmbedding
    from tpu_embedding.nn import grad as grad
    from tpu_embedding.nn import linen as linen
    from tpu_embedding.nn import value_and_grad as value_and_grad
    from tpu_embedding.plan.make_plan import make_plan as make_plan
    from tpu_embedding.plan.mesh_options import device_mesh as device_mesh
    from tpu_embedding.plan.plan import EmbeddingPlan as EmbeddingPlan
    from tpu_embedding.sparse_core.backend import SparseCore as SparseCore
    from tpu_embedding.types import DenseIds as DenseIds
    from tpu_embedding.types import RaggedIds as RaggedIds
    from tpu_embedding.types import SparseIds as SparseIds

    __version__: str


__all__ = [*_lazy_names(__name__)]  # pyright: ignore[reportUnsupportedDunderAll]

# Runs before JAX looks for devices, which is when libtpu would print its warnings.
_describe_host()


# The import system sets each imported submodule as an attribute. Only the package's
# class can intercept that.
class _Package(_types.ModuleType):
    """A package whose public modules hide their own imports from `dir`."""

    def __setattr__(self, name: str, value: _Any) -> None:
        if isinstance(value, _types.ModuleType) and name in __all__:
            source, _ = _lazy_names(__name__)[name]
            if value.__name__ == f"{__name__}.{name}" and source != __name__:
                return  # Keeps the function `host_rows` instead of its folder.
            _show_public_names_only(value)
        super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package


_import_name = _import_when_used(__name__)


def __getattr__(name: str) -> _Any:
    return _version() if name == "__version__" else _import_name(name)


def __dir__() -> list[str]:
    # The default `__dir__` would leave out the names that aren't imported yet.
    return sorted([*__all__, "__version__", *(n for n in globals() if n[0] == "_")])


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("tpu-embedding")
    except importlib.metadata.PackageNotFoundError:  # A checkout, not installed.
        return "unknown"

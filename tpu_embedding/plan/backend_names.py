"""The names of backends. To add one, add its name and its options here."""

import importlib
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from tpu_embedding.argument_checks import describe_value
from tpu_embedding.plan.backend import BackendOptions

BackendName = Literal["xla", "sparse_core"]
"""XLA's gathers and scatters; or its embedding operations for SparseCores."""

_OPTIONS: Final[Mapping[BackendName, tuple[str, str]]] = {
    "xla": ("tpu_embedding.plan.backend", "Xla"),
    "sparse_core": ("tpu_embedding.sparse_core.options", "SparseCore"),
}
"""Module and class of the options, imported when a plan asks for them."""


def backend_options(value: Any) -> BackendOptions:
    """Returns the options that `backend=` asks for.

    Raises:
      ValueError: if the value names no backend.
    """
    if isinstance(value, BackendOptions):
        return value
    names = get_args(BackendName)
    if value not in names:
        raise ValueError(
            f"backend must be one of {names} or a te.SparseCore, got "
            f"{describe_value(value)}. Leave it out for 'xla'."
        )
    module, name = _OPTIONS[value]
    return getattr(importlib.import_module(module), name)()

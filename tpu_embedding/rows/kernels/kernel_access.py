"""The accesses to the rows of an array that kernels make.

`RowLayout` says how rows lie in memory, and knows no kernel. The plan chooses a
`KernelAccess` per stack, and `PackedRows` carries it beside the layout. `access.py`
reads both: a kernel or XLA runs an access, on rows that lie the same way.
"""

import dataclasses
from typing import Literal

from tpu_embedding.rows.kernels.backend import KernelBackend

Backend = Literal["xla", KernelBackend]
"""Runs an access to rows: XLA's own operations, or kernels of a `KernelBackend`."""

RowAccess = Literal["read", "add"]
"""An access to the rows of an array: reading some, or adding to some."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelAccess:
    """The backend of kernels that reach the rows of an array, and their accesses.

    Attributes:
      backend: runs the kernels.
      accesses: accesses that kernels make; XLA makes the others.
    """

    backend: KernelBackend
    accesses: tuple[RowAccess, ...] = ("read", "add")


def describe_kernels(kernels: KernelAccess | None) -> str:
    """Returns the accesses that kernels make, for errors.

    Example:
      >>> describe_kernels(KernelAccess(backend="sparse_core", accesses=("read",)))
      'read by sparse_core kernels'
    """
    if kernels is None:
        return "all by XLA"
    return f"{' and '.join(kernels.accesses)} by {kernels.backend} kernels"

"""The accesses of kernels to the rows of an array, as plain values without Pallas.

`RowLayout` says how rows lie in memory, and knows no kernel. The plan chooses a
`KernelAccess` per stack, and `PackedRows` carries it beside the layout. `access.py`
reads both: a kernel or XLA runs an access, on rows that lie the same way.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

KernelBackend = Literal["sparse_core", "interpreter"]
"""A backend that runs kernels: the SparseCores of a TPU, or Pallas' interpreter."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelBody:
    """An optimizer's rule as arithmetic on vectors, which `update_rows` runs.

    Attributes:
      run: called as `run(sums, gradient, *rows, *row_scalars, *scalars)`. `sums` lists
        the sums over the row that are known. All other arguments are vectors: of the
        gradient, of the row of each array, and of each row scalar and scalar, repeated
        over the lanes. If a sum is missing, `run` returns a vector whose elements the
        next sum adds up. Otherwise it returns a list: a new vector for each array, then
        one for each row scalar. `kernel_lowering.py` lists the operations it may use.
      num_sums: sums over the elements of a row that `run` takes.
    """

    run: Callable[..., Any]
    num_sums: int = 0


def describe_kernels(kernels: KernelAccess | None) -> str:
    """Returns the accesses that kernels make, for errors.

    Example:
      >>> describe_kernels(KernelAccess(backend="sparse_core", accesses=("read",)))
      'read by sparse_core kernels'
    """
    if kernels is None:
        return "all by XLA"
    return f"{' and '.join(kernels.accesses)} by {kernels.backend} kernels"

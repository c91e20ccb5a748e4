"""Backends: what looks rows up and updates them on a device.

A backend changes speed, never results. `make_plan(backend=...)` asks for one, and
`print(plan)` says which each stack has, and why.
"""

import dataclasses
from typing import Any, Final, Literal, get_args

from tpu_embedding.argument_checks import describe_value
from tpu_embedding.field_checks import (
    broken_rules,
    convert_ints,
    int_rule,
    optional,
    raise_all,
)

BackendName = Literal["xla", "sparse_core"]
"""XLA's gathers and scatters; or its embedding operations for SparseCores."""

BACKEND_NAMES: Final[tuple[BackendName, ...]] = get_args(BackendName)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseCore:
    """XLA's embedding operations on the SparseCores of a TPU, with options.

    TensorFlow's TPUEmbedding and jax-tpu-embedding train with these operations. They
    look rows up, pool and exchange them, and apply the optimizer. Here they get raw ids
    within the step. A step whose ids are too many for an operation runs XLA's gathers
    and scatters on the same rows, so no id is lost.

    Attributes:
      max_ids: ids, and different rows among them, that the samples of one SparseCore
        may look up in the rows of another, a multiple of 8; less if the memory of a
        SparseCore bounds it. It changes speed, never results. None: the mean and some
        standard deviations, and room for hot rows.
      cores: SparseCores per device, only for devices without: CPUs and GPUs run the
        operations in plain JAX, for tests. None: those of the device, or 2.

    Raises:
      ValueError: if an option is out of range.

    Example:
      >>> SparseCore(max_ids=1024).max_ids
      1024
    """

    max_ids: int | None = None
    cores: int | None = None

    def __post_init__(self):
        convert_ints(self, "max_ids", "cores")
        rules = {
            "max_ids": optional(int_rule(8)),
            "cores": optional(int_rule(2)),
        }
        raise_all(broken_rules(self, rules))
        if self.max_ids is not None and self.max_ids % 8:
            raise ValueError(
                f"SparseCore.max_ids must be a multiple of 8, got {self.max_ids}."
            )


Backend = BackendName | SparseCore
"""A backend, by its name or with options."""


def checked_backend(value: Any) -> Literal["xla"] | SparseCore:
    """Returns the backend that `backend=` asks for.

    Raises:
      ValueError: if the value is no backend.
    """
    if isinstance(value, SparseCore):
        return value
    if value not in BACKEND_NAMES:
        raise ValueError(
            f"backend must be one of {BACKEND_NAMES} or a te.SparseCore, got "
            f"{describe_value(value)}. Leave it out for 'xla'."
        )
    return SparseCore() if value == "sparse_core" else "xla"

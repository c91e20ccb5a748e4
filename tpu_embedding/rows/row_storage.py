"""The interface of row storages.

The core keeps all rows on devices. A placement may choose a different storage for a
stack, with a different class of rows; see `Placement.store`.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from tpu_embedding.rows.packed_rows import PackedRows

if TYPE_CHECKING:
    from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowStorage:
    """A storage that keeps all rows of a stack on devices.

    It must be hashable, since plans are static under `jit`. Its methods are called only
    if devices don't hold all rows. `bytes_per_device` doesn't include the rows.
    """

    holds_all_rows: ClassVar[bool] = True

    bytes_per_device: int = dataclasses.field(default=0, repr=False)

    def init_rows(
        self, stack: "StackPlan", plan: "EmbeddingPlan", key: jax.Array
    ) -> PackedRows:
        """Makes the rows of a new stack, as a global array."""
        raise NotImplementedError

    def init_state(
        self, table: PackedRows, stack: "StackPlan", kept: Any = None
    ) -> Any:
        """Makes the optimizer state for the current rows, with global arrays.

        If you pass a state as `kept`, the new state has the same slot variables.
        """
        raise NotImplementedError

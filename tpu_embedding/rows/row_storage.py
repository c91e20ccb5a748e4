"""The interface of storages, which say where the rows of a stack are stored.

`RowStorage` is the core's own: devices hold all rows. A placement may give a stack
another storage, and with it a different class of rows; see `Placement.store` and
`PackedRows.holds_all_rows`.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from tpu_embedding.rows.packed_rows import PackedRows

if TYPE_CHECKING:
    from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowStorage:
    """A storage in which devices hold all rows of a stack.

    It is frozen and hashable, since plans are static under `jit`. Its methods are
    called only if devices don't hold all rows.

    Attributes:
      bytes_per_device: memory that each device needs in addition to its rows.
    """

    holds_all_rows: ClassVar[bool] = True

    bytes_per_device: int = dataclasses.field(default=0, repr=False)

    def init_rows(
        self, stack: "StackPlan", plan: "EmbeddingPlan", key: jax.Array
    ) -> PackedRows:
        """Returns the rows of a new stack. Global."""
        raise NotImplementedError

    def init_state(
        self, table: PackedRows, stack: "StackPlan", kept: Any = None
    ) -> Any:
        """Returns the optimizer's initial state for the current rows. Global.

        With a state `kept`, the new state has the slot variables of that state.
        """
        raise NotImplementedError

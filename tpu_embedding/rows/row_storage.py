"""Where the rows of a stack are stored: a seam of the core.

A placement gives each of its tables a storage, and the core calls it without asking for
its class. `RowStorage` is the core's own: devices hold all rows. Another storage gives
a stack rows of another class, see `PackedRows.holds_all_rows`.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from tpu_embedding.rows.packed_rows import PackedRows, RowLayout

if TYPE_CHECKING:
    from tpu_embedding.plan.backend import Backend
    from tpu_embedding.plan.make_plan import NamedTable
    from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan, TrainedStackPlan


@dataclasses.dataclass(frozen=True)
class RowStorage:
    """Devices hold all rows of a stack.

    It is a value: frozen and hashable, since plans are static under `jit`.
    """

    holds_all_rows: ClassVar[bool] = True

    @property
    def stacking_key(self) -> Any:
        """Tables share a stack only if their keys, hashable, are equal."""
        return None

    def joined(self, other: "RowStorage") -> "RowStorage":
        """Returns the storage of a stack whose tables have equal keys."""
        return self

    def problem(self, table: "NamedTable", backend: "Backend") -> str | None:
        """Returns which setting a table must not have, and what to do; or None."""
        return None

    def device_layout(self, layout: RowLayout) -> RowLayout:
        """Returns the layout of the rows that a device has in memory at once."""
        return layout

    def bytes_per_device(self, stack: "StackPlan") -> int:
        """Returns the memory that each device needs in addition to these rows."""
        return 0

    def notes(self, stack: "StackPlan") -> Iterator[str]:
        """Yields lines of `print(plan)` about the rows."""
        return iter(())

    # Called only if devices do not hold all rows:

    def init_rows(
        self, stack: "StackPlan", plan: "EmbeddingPlan", key: jax.Array
    ) -> PackedRows:
        """Returns the rows of a new stack. Global."""
        raise NotImplementedError

    def init_state(
        self, table: PackedRows, stack: "TrainedStackPlan", plan: "EmbeddingPlan"
    ) -> Any:
        """Returns the optimizer's state of a stack before the first step. Global."""
        raise NotImplementedError

    def measured_state(self, table: PackedRows, state: Any) -> Any:
        """Returns a state like the first one of the present rows; its slots stay."""
        raise NotImplementedError

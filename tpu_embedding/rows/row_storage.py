"""The interface of storages, which say where the rows of a stack are stored.

A placement gives each of its tables a storage, whose class the core doesn't know.
`RowStorage` is the core's own: devices hold all rows. Another storage gives a stack a
different class of rows; see `PackedRows.holds_all_rows`.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from tpu_embedding.rows.packed_rows import PackedRows, RowLayout

if TYPE_CHECKING:
    from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan


@dataclasses.dataclass(frozen=True)
class RowStorage:
    """A storage in which devices hold all rows of a stack.

    It is frozen and hashable, since plans are static under `jit`.
    """

    holds_all_rows: ClassVar[bool] = True

    @property
    def stacking_key(self) -> Any:
        """A hashable key. Tables share a stack only if their keys are equal."""
        return None

    def joined(self, other: "RowStorage") -> "RowStorage":
        """Returns the storage of a stack whose tables have equal keys."""
        return self

    def problem(self, stack: "StackPlan") -> str | None:
        """Returns why a stack can't use this storage, with the fix. None if it can."""
        return None

    def device_layout(self, layout: RowLayout) -> RowLayout:
        """Returns the layout of the rows that a device holds at once."""
        return layout

    def bytes_per_device(self, stack: "StackPlan") -> int:
        """Returns the memory that each device needs in addition to its rows."""
        return 0

    def notes(self, stack: "StackPlan") -> Iterator[str]:
        """Yields lines of `print(plan)` about the rows."""
        return iter(())

    # The methods below are called only if devices don't hold all rows.

    def init_rows(
        self, stack: "StackPlan", plan: "EmbeddingPlan", key: jax.Array
    ) -> PackedRows:
        """Returns the rows of a new stack. Global."""
        raise NotImplementedError

    def init_state(
        self, table: PackedRows, stack: "StackPlan", plan: "EmbeddingPlan"
    ) -> Any:
        """Returns a stack's optimizer state before the first step. Global."""
        raise NotImplementedError

    def measured_state(self, table: PackedRows, state: Any) -> Any:
        """Returns the initial state for the current rows, with the same slots."""
        raise NotImplementedError

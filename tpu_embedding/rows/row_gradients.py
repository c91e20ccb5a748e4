"""The gradient of a stacked table, as `lookup/` hands it to `update/`.

A gradient arrives at the owners of its rows in rounds: the first always, the others
only under skew. `GradientRounds` is the value that both sides share. The backward pass
fills it, an update applies it round by round, and neither runs the other's code.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tpu_embedding.types import PADDING_ROW_ID, RowRange, RowUpdates

Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGradients:
    """Gradients of the rows of one round. Per shard.

    Attributes:
      row_ids: int32 `[rows]`, local rows, each at most once (or once per occurrence,
        for optimizers that see occurrences); `PADDING_ROW_ID` where unused.
      values: `[rows, dim]`, their gradients; unused ones hold anything.
      occurrences: the gradient of each occurrence of an id, for optimizers that ask for
        the norm of all occurrences; else None.
    """

    row_ids: Int[Array, " rows"]
    values: Float[Array, "rows dim"]
    occurrences: RowUpdates | None = None

    def as_row_updates(self) -> RowUpdates:
        """Returns the gradients with zeros where no row is."""
        is_used = self.row_ids != PADDING_ROW_ID
        values = jnp.where(is_used[:, None], self.values, 0)
        return RowUpdates(row_ids=self.row_ids, values=values)

    def scaled(self, factor: Float[Array, ""]) -> "RowGradients":
        """Returns the gradients times a factor."""
        occurrences = self.occurrences
        if occurrences is not None:
            values = occurrences.values * factor
            occurrences = dataclasses.replace(occurrences, values=values)
        return dataclasses.replace(
            self, values=self.values * factor, occurrences=occurrences
        )

    def only_if(self, condition: Bool[Array, ""]) -> "RowGradients":
        """Returns these gradients; those of no row if a condition does not hold."""

        def kept(row_ids: Array) -> Array:
            return jnp.where(condition, row_ids, PADDING_ROW_ID)

        occurrences = self.occurrences
        if occurrences is not None:
            row_ids = kept(occurrences.row_ids)
            occurrences = dataclasses.replace(occurrences, row_ids=row_ids)
        return dataclasses.replace(
            self, row_ids=kept(self.row_ids), occurrences=occurrences
        )


@runtime_checkable
class FoldRounds(Protocol):
    """Folds a function over the gradients of the rounds after the first."""

    def __call__(
        self, body: Callable[[Carry, RowGradients, RowRange], Carry], carry: Carry
    ) -> Carry:
        """Calls `carry = body(carry, gradients, rows)` for each of these rounds."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientRounds:
    """The whole gradient of a stacked table at the owners of its rows. Per shard.

    The rows of different rounds are different, so an update may apply rounds one by
    one. It exists while a step is traced; it is no pytree.

    Attributes:
      first: gradients of the first round; all of them where there is no skew.
      first_rows: rows that the first round covers; None: all rows.
      fold_later: folds over the other rounds; None: no batch of this shape has any.
    """

    first: RowGradients
    first_rows: RowRange | None = None
    fold_later: FoldRounds | None = None

    def fold(
        self,
        body: Callable[[Any, RowGradients, RowRange | None], Any],
        carry: Any,
    ) -> Any:
        """Calls `carry = body(carry, gradients, rows)` for every round."""
        carry = body(carry, self.first, self.first_rows)
        return carry if self.fold_later is None else self.fold_later(body, carry)

    def only_if(self, condition: Bool[Array, ""]) -> "GradientRounds":
        """Returns this gradient; one of no row if a condition does not hold."""
        later = self.fold_later

        def kept(rows: RowRange | None) -> RowRange:
            first_row, end_row = rows or RowRange(
                jnp.int32(0), jnp.int32(PADDING_ROW_ID)
            )
            return RowRange(first_row, jnp.where(condition, end_row, 0))

        def fold_later(
            body: Callable[[Carry, RowGradients, RowRange], Carry], carry: Carry
        ) -> Carry:
            assert later is not None
            return later(
                lambda carry, gradients, rows: body(
                    carry, gradients.only_if(condition), kept(rows)
                ),
                carry,
            )

        return GradientRounds(
            first=self.first.only_if(condition),
            first_rows=kept(self.first_rows),
            fold_later=None if later is None else fold_later,
        )


def gradient_of_no_row(dim: int) -> GradientRounds:
    """Returns the gradient of a step that touched no row of a stack. Per shard.

    Args:
      dim: columns of its tables.
    """
    row_ids = jnp.full((1,), PADDING_ROW_ID, jnp.int32)
    gradients = RowGradients(row_ids=row_ids, values=jnp.zeros((1, dim), jnp.float32))
    return GradientRounds(first=gradients)

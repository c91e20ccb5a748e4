"""What a rule may ask about the rows it is given, beyond their values.

A rule sees the rows of `[rows, dim]` that it is to update: the touched ones of one
shard and round, or a block of all. Most treat each row for itself. Adafactor and a few
more need totals over the rows of a whole table; they ask `table_rows`, which knows the
table of each row and sums over shards and rounds. Called on a dense array, outside of
the layer, all rows are there and are of one table.

So the rule is written once, and composes with every optax wrapper: like an axis name
of JAX, the rows in question are known where the rule runs, not handed through.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Reduction = Literal["sum", "min"]
AllReduce = Callable[[Array, Reduction], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRows:
    """Rows of one or more tables, one part of which is at hand.

    Attributes:
      table_sizes: float32 `[tables]`, rows of each whole table.
      tables: int32 `[rows]`, the table of each row; None: there is one table.
      is_used: bool `[rows]`, False where a place holds no row of a table.
      is_touched: bool `[rows]`, whether the row was looked up in this step.
      all_reduce: totals of this part `[tables, ...]` to those of all parts.
      occurrence_squares: float32 `[tables]`, sum of the squares of the gradients of all
        occurrences of ids, for rules that are marked with `OccurrenceNormState`.
    """

    table_sizes: Float[Array, " tables"]
    tables: Int[Array, " rows"] | None
    is_used: Bool[Array, " rows"]
    is_touched: Bool[Array, " rows"]
    all_reduce: AllReduce
    occurrence_squares: Float[Array, " tables"] | None = None

    def total(self, values: Array) -> Array:
        """Sums over the rows of each table: `[rows, ...]` to `[tables, ...]`."""
        values = jnp.where(_beside(self.is_used, values), values, 0)
        if self.tables is None:
            return self.all_reduce(jnp.sum(values, axis=0, keepdims=True), "sum")
        members = jax.nn.one_hot(self.tables, self._num_tables, axis=0)
        flat = values.reshape(values.shape[0], -1)
        # In a product, what is not finite would reach all tables, as 0 * inf.
        is_finite = jnp.isfinite(flat)
        sums = jnp.dot(
            members, jnp.where(is_finite, flat, 0), precision=jax.lax.Precision.HIGHEST
        )
        missed = jnp.dot(members, (~is_finite).astype(jnp.float32))
        sums = jnp.where(missed > 0, jnp.nan, sums)
        return self.all_reduce(sums.reshape(self._num_tables, *values.shape[1:]), "sum")

    def minimum(self, values: Array) -> Array:
        """Least value over the rows of each table: `[rows]` to `[tables]`."""
        values = jnp.where(self.is_used, values, jnp.inf)
        if self.tables is None:
            return self.all_reduce(jnp.min(values, keepdims=True), "min")
        least = jax.ops.segment_min(values, self.tables, self._num_tables)
        return self.all_reduce(least, "min")

    def per_row(self, values: Array) -> Array:
        """Gives each row its table's value: `[tables, ...]` to `[rows, ...]`."""
        if self.tables is None:
            return jnp.broadcast_to(values, (self.is_used.shape[0], *values.shape[1:]))
        return values.at[self.tables].get(mode="clip")

    @property
    def _num_tables(self) -> int:
        return self.table_sizes.shape[0]


_CURRENT: contextvars.ContextVar[TableRows | None] = contextvars.ContextVar(
    "table_rows", default=None
)


def table_rows(array: Array) -> TableRows:
    """Returns what is known of the rows of an array that a rule was given.

    Args:
      array: `[rows, ...]`; outside of the layer, all rows of one table.

    Example:
      >>> rows = table_rows(jnp.ones((3, 2)))
      >>> rows.total(jnp.ones((3, 2))).tolist()
      [[3.0, 3.0]]
    """
    current = _CURRENT.get()
    if current is not None:
        return current
    everything = jnp.ones(array.shape[:1], bool)
    return TableRows(
        table_sizes=jnp.full((1,), array.shape[0], jnp.float32),
        tables=None,
        is_used=everything,
        is_touched=everything,
        all_reduce=lambda totals, _: totals,
    )


@contextlib.contextmanager
def table_rows_context(rows: TableRows | None) -> Iterator[None]:
    """Lets rules that run within ask about these rows."""
    token = _CURRENT.set(rows)
    # A `jit` within a rule would keep what it was told about other rows.
    inlined = contextlib.nullcontext() if rows is None else jax.disable_jit()
    try:
        with inlined:
            yield
    finally:
        _CURRENT.reset(token)


def _beside(mask: Array, values: Array) -> Array:
    """Returns the mask with as many axes as the values."""
    return mask.reshape(mask.shape + (1,) * (values.ndim - 1))

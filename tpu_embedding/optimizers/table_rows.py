"""Answers a rule's questions about its rows, such as totals over the whole table.

A rule sees only the rows `[rows, dim]` that it updates: the touched rows of one shard
in one round, or a block of a shard's rows. Most rules treat each row separately, but
Adafactor and a few others need totals over all rows of a table. Such rules call
`table_rows`. Its result knows each row's table, and computes totals over all shards and
rounds. On a dense array outside the layer, all rows are present and belong to one
table.

So a rule is written once and composes with every optax wrapper. Wrappers need not pass
these facts along, because they are part of the context, like an axis name in JAX.
"""

import contextlib
import contextvars
import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Reduction = Literal["sum", "min"]
AllReduce = Callable[[Array, Reduction], Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRows:
    """The part of one or more tables' rows that a rule is given.

    Attributes:
      table_sizes: float32 `[tables]`, number of rows in each whole table. If ids are
        not row numbers, only rows that belong to an id are counted.
      tables: int32 `[rows]`, each row's table. `None` if there is one table.
      is_used: bool `[rows]`, False for padding, which isn't in any table.
      is_touched: bool `[rows]`, True for rows looked up in this step.
      all_reduce: reduces totals `[tables, ...]` of this part of the rows over all
        parts.
      occurrence_squares: float32 `[tables]`, sum of the squared gradients of all
        occurrences of ids. `None` unless the rule's driver is
        `Touched(occurrence_norm=True)`.
      stored: maps rows and their updates to the new rows as the table stores them,
        which means rounded if the table is narrow.
    """

    table_sizes: Float[Array, " tables"]
    tables: Int[Array, " rows"] | None
    is_used: Bool[Array, " rows"]
    is_touched: Bool[Array, " rows"]
    all_reduce: AllReduce
    occurrence_squares: Float[Array, " tables"] | None = None
    stored: Callable[[Array, Array], Array] = operator.add

    def total(self, values: Array) -> Array:
        """Sums over the rows of each table: `[rows, ...]` to `[tables, ...]`."""
        is_used = self.is_used.reshape(self.is_used.shape + (1,) * (values.ndim - 1))
        values = jnp.where(is_used, values, 0)
        if self.tables is None:
            return self.all_reduce(jnp.sum(values, axis=0, keepdims=True), "sum")
        members = jax.nn.one_hot(self.tables, self._num_tables, axis=0, dtype="float32")
        flat = values.reshape(values.shape[0], -1)
        # Non-finite values are masked, since 0 * inf in the product would spread to all
        # tables.
        is_finite = jnp.isfinite(flat)
        sums = jnp.dot(
            members, jnp.where(is_finite, flat, 0), precision=jax.lax.Precision.HIGHEST
        )
        missed = jnp.dot(members, (~is_finite).astype(jnp.float32))
        sums = jnp.where(missed > 0, jnp.nan, sums)
        return self.all_reduce(sums.reshape(self._num_tables, *values.shape[1:]), "sum")

    def minimum(self, values: Array) -> Array:
        """Returns the minimum over each table's rows: `[rows]` to `[tables]`."""
        values = jnp.where(self.is_used, values, jnp.inf)
        if self.tables is None:
            return self.all_reduce(jnp.min(values, keepdims=True), "min")
        minima = jax.ops.segment_min(values, self.tables, self._num_tables)
        return self.all_reduce(minima, "min")

    def per_row(self, values: Array) -> Array:
        """Copies each table's value to its rows: `[tables, ...]` to `[rows, ...]`."""
        if self.tables is None:
            return jnp.broadcast_to(values, (self.is_used.shape[0], *values.shape[1:]))
        return values.at[self.tables].get(mode="clip")

    @property
    def _num_tables(self) -> int:
        return self.table_sizes.shape[0]


_CURRENT: contextvars.ContextVar[TableRows | None] = contextvars.ContextVar(
    "table_rows", default=None
)
_MODEL_SQUARES: contextvars.ContextVar[Callable[[], Array] | None] = (
    contextvars.ContextVar("model_squares", default=None)
)


def table_rows(array: Array) -> TableRows:
    """Returns the `TableRows` of the rows that a rule was given.

    Args:
      array: `[rows, ...]`, an argument of the rule. Outside the layer it holds all rows
        of one table.

    Example:
      >>> rows = table_rows(jnp.ones((3, 2)))
      >>> rows.total(jnp.ones((3, 2))).tolist()
      [[3.0, 3.0]]
    """
    current = _CURRENT.get()
    if current is not None:
        return current
    return some_rows(array.shape[0])


def some_rows(num_rows: int) -> TableRows:
    """Returns rows of a single table, all of them looked up."""
    everything = jnp.ones((num_rows,), bool)
    return TableRows(
        table_sizes=jnp.full((1,), num_rows, jnp.float32),
        tables=None,
        is_used=everything,
        is_touched=everything,
        all_reduce=lambda totals, _: totals,
    )


def is_in_layer() -> bool:
    """Returns True while a rule runs on a layer's rows instead of a dense array."""
    return _CURRENT.get() is not None


@contextlib.contextmanager
def table_rows_context(
    rows: TableRows | None, *, inlines_jit: bool = True
) -> Iterator[None]:
    """Makes `table_rows` return these rows within this context.

    Args:
      rows: the rows. `None` means that the rule sees all rows of one table.
      inlines_jit: True inlines each `jit` within a rule. Otherwise, the cache of `jit`
        could return answers about different rows.
    """
    token = _CURRENT.set(rows)
    inlines_jit = inlines_jit and rows is not None
    try:
        with jax.disable_jit() if inlines_jit else contextlib.nullcontext():
            yield
    finally:
        _CURRENT.reset(token)


def model_gradient_squares() -> Array | None:
    """Returns the sum of squares of all the model's gradients in this step.

    These are the gradients of the loss before any transformation. Returns `None` if the
    rule is called without a model and knows only its own arrays.
    """
    compute = _MODEL_SQUARES.get()
    return None if compute is None else compute()


@contextlib.contextmanager
def model_gradient_context(compute: Callable[[], Array] | None) -> Iterator[None]:
    """Makes `model_gradient_squares` return a float32 scalar within this context.

    Args:
      compute: returns the sum, called only if a rule asks for it. `None` if no model
        provides it.
    """
    token = _MODEL_SQUARES.set(compute)
    try:
        yield
    finally:
        _MODEL_SQUARES.reset(token)

"""Answers what a rule asks about its rows, such as totals over the whole table.

A rule sees only some rows: either the touched rows in one shard and round, or a block
of rows. Rules that need totals, such as Adafactor, call `table_rows`. The result comes
from the context, like an axis name in JAX, so optax wrappers need not pass it along.
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
    """The rows that a rule is given, from one or more tables.

    Attributes:
      table_sizes: row counts of whole tables. If ids are not row numbers, only rows
        that belong to an id are counted.
      tables: index of each row's table. None if there is only one table.
      is_used: False for padding.
      is_touched: True for rows looked up in this step.
      all_reduce: reduces totals `[tables, ...]` over all shards, rounds and blocks.
      occurrence_squares: squared gradients, summed over all id occurrences. None unless
        the driver is `Touched(occurrence_norm=True)`.
      stored: adds updates to rows and rounds the results as the table would.
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
        # The default dtype would be float64 under jax_enable_x64.
        members = jax.nn.one_hot(self.tables, self._num_tables, axis=0, dtype="float32")
        flat = values.reshape(values.shape[0], -1)
        # Non-finite values are masked, since `0 * inf` in the product would make the
        # sums of all tables NaN.
        is_finite = jnp.isfinite(flat)
        # On TPUs, the default precision would round the values to bfloat16.
        sums = jnp.dot(
            members, jnp.where(is_finite, flat, 0), precision=jax.lax.Precision.HIGHEST
        )
        missed = jnp.dot(members, (~is_finite).astype(jnp.float32))
        sums = jnp.where(missed > 0, jnp.nan, sums)
        return self.all_reduce(sums.reshape(self._num_tables, *values.shape[1:]), "sum")

    def minimum(self, values: Array) -> Array:
        """Finds the minimum within each table: `[rows]` to `[tables]`."""
        values = jnp.where(self.is_used, values, jnp.inf)
        if self.tables is None:
            return self.all_reduce(jnp.min(values, keepdims=True), "min")
        minima = jax.ops.segment_min(values, self.tables, self._num_tables)
        return self.all_reduce(minima, "min")

    def per_row(self, values: Array) -> Array:
        """Copies table values to rows: `[tables, ...]` to `[rows, ...]`."""
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
    """Lets your rule ask for facts about its rows, such as totals over a whole table.

    Args:
      array: `[rows, ...]`, an argument of your rule. Outside the layer, it holds all
        rows of one table.

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
    """Describes a whole table whose rows were all looked up."""
    everything = jnp.ones((num_rows,), bool)
    return TableRows(
        table_sizes=jnp.full((1,), num_rows, jnp.float32),
        tables=None,
        is_used=everything,
        is_touched=everything,
        all_reduce=lambda totals, _: totals,
    )


def is_in_layer() -> bool:
    """Tells if a rule is running on layer rows, not on a dense array."""
    return _CURRENT.get() is not None


@contextlib.contextmanager
def table_rows_context(
    rows: TableRows | None, *, inlines_jit: bool = True
) -> Iterator[None]:
    """Makes `table_rows` return these rows. None means one whole table."""
    token = _CURRENT.set(rows)
    # A `jit` within the rule is inlined, because its cache doesn't know this context,
    # and could return answers about different rows.
    inlines_jit = inlines_jit and rows is not None
    try:
        with jax.disable_jit() if inlines_jit else contextlib.nullcontext():
            yield
    finally:
        _CURRENT.reset(token)


def model_gradient_squares() -> Array | None:
    """Sums the squares of all model gradients, before any transformation.

    None means that the rule runs without a model.
    """
    compute = _MODEL_SQUARES.get()
    return None if compute is None else compute()


@contextlib.contextmanager
def model_gradient_context(compute: Callable[[], Array] | None) -> Iterator[None]:
    """Makes `model_gradient_squares` return `compute()`, a float32 scalar."""
    # `compute` is a function because most rules don't ask for the norm, which costs a
    # pass over all gradients.
    token = _MODEL_SQUARES.set(compute)
    try:
        yield
    finally:
        _MODEL_SQUARES.reset(token)

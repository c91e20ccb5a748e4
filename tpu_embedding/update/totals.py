"""Finds totals over rows that arrive in parts: gradient rounds or table blocks.

While a rule runs, it requests totals, as in `total = rows.total(values)`. A total may
depend on earlier totals. If there is only one part, each request is answered by an
all-reduce. If there are several parts, the totals are found one after another. For each
total, the rule runs on every part with the totals known so far, and the values that it
passes for the next total are summed over the parts. XLA removes everything else that
such a run computes. In the last run, all totals are known.

Totals are computed per table, so each row of a shard is matched with its table.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from tpu_embedding.optimizers.table_rows import AllReduce, Reduction, TableRows
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.access import Parts

_ACROSS_SHARDS: Final = {"sum": jax.lax.psum, "min": jax.lax.pmin}
ACROSS_PARTS: Final = {"sum": jnp.add, "min": jnp.minimum}


RunPart = Callable[[Any, AllReduce], Any]
"""Runs the rule on one part. The second argument answers requests for totals."""


class _Request(NamedTuple):
    """A rule's request for a total. The values are already reduced within one part."""

    values: Array
    reduction: Reduction


def across_shards(stack: StackPlan) -> AllReduce:
    """Returns the all-reduce over a stack's shards.

    Each row counts once, on its shard's first replica. All devices participate, so that
    all replicas get the same bits.
    """

    def all_reduce(totals: Array, reduction: Reduction) -> Array:
        if reduction == "sum" and stack.num_replicas > 1:
            is_first = jax.lax.axis_index(stack.replica_axes) == 0
            totals = jnp.where(is_first, totals, jnp.zeros_like(totals))
        return _ACROSS_SHARDS[reduction](totals, stack.sample_axes)

    return all_reduce


def find_totals(run: RunPart, parts: Parts, all_reduce: AllReduce) -> list[Array]:
    """Returns all totals that a rule requests, in order. Per shard.

    Args:
      run: runs the rule on one part.
      parts: rounds of a gradient or blocks of rows.
      all_reduce: reduces a total over the shards.
    """
    known: list[Array] = []
    while len(requests := requests_of(run, parts.first, known)) > len(known):
        number = len(known)
        total, reduction = requests[number]
        if parts.fold_later is not None:

            def add(total: Array, part: Any, number=number, how=reduction) -> Array:
                values = requests_of(run, part, known)[number].values
                return ACROSS_PARTS[how](total, values)

            total = parts.fold_later(add, total)
        known.append(all_reduce(total, reduction))
    return known


def known_totals(known: list[Array]) -> AllReduce:
    """Returns a function that answers requests with known totals, in order."""
    remaining = iter(known)
    return lambda totals, reduction: next(remaining)


def requests_of(run: RunPart, part: Any, known: list[Array]) -> list[_Request]:
    """Runs the rule with the known totals, and returns its requests."""
    requests: list[_Request] = []

    def all_reduce(values: Array, reduction: Reduction) -> Array:
        number = len(requests)
        requests.append(_Request(values, reduction))
        return known[number] if number < len(known) else values

    run(part, all_reduce)
    return requests


def tables_of_rows(
    row_ids: Int[Array, " rows"],
    is_touched: Bool[Array, " rows"],
    all_reduce: AllReduce,
    stack: StackPlan,
) -> TableRows:
    """Returns the facts that rules may ask about a shard's rows. Per shard.

    Args:
      row_ids: rows of this shard; ids past the end are padding.
      is_touched: True for rows that this step looked up.
      all_reduce: reduces these rows' totals over all parts.
      stack: the stack's plan.
    """
    is_used, stack_rows = rows_of_stack(row_ids, stack)

    def count_reached(bounds: list[int]) -> Int[Array, " rows"]:
        reached = jnp.searchsorted(
            np.asarray(bounds, np.int32), stack_rows, side="right", method="compare_all"
        )
        return reached.astype(jnp.int32)

    num_begun = count_reached([table.row_offset for table in stack.tables])
    sizes = [table.num_rows for table in stack.tables]
    # Rows between two tables belong to neither table.
    num_ended = count_reached([x.row_offset + x.num_rows for x in stack.tables])
    tables = num_begun - 1 if len(sizes) > 1 else None
    return TableRows(
        table_sizes=jnp.asarray(sizes, jnp.float32),
        tables=tables,
        is_used=is_used & (num_begun > num_ended),
        is_touched=is_touched,
        all_reduce=all_reduce,
    )


def rows_of_stack(
    row_ids: Int[Array, " rows"], stack: StackPlan
) -> tuple[Bool[Array, " rows"], Int[Array, " rows"]]:
    """Converts a shard's local rows to rows of the stack. Per shard.

    Returns:
      A mask that is False for padding, and the rows within the stack, arbitrary for
      padding.
    """
    is_used = row_ids < stack.rows_per_shard
    shard = jax.lax.axis_index(stack.shard_axes)
    # A padding id would overflow in the product.
    local_ids = stack.layout.undealt(jnp.where(is_used, row_ids, 0))
    return is_used, local_ids * stack.num_shards + shard

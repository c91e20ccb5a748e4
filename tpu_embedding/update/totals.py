"""Finds totals over tables whose rows arrive in parts: gradient rounds or blocks.

A rule requests totals, as in `total = rows.total(values)`, and may need one total to
compute the next. With a single part, an all-reduce answers each request. With several
parts, the rule runs on all parts once per total, and each run finds the next total. A
last run uses all totals.
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
    """A request for a total, with values already reduced within one part."""

    values: Array
    reduction: Reduction


def across_shards(stack: StackPlan) -> AllReduce:
    def all_reduce(totals: Array, reduction: Reduction) -> Array:
        # Each row counts once, on its shard's first replica. All replicas still take
        # part, because they must get the same bits. In a minimum, repeats don't matter.
        if reduction == "sum" and stack.num_replicas > 1:
            is_first = jax.lax.axis_index(stack.replica_axes) == 0
            totals = jnp.where(is_first, totals, jnp.zeros_like(totals))
        return _ACROSS_SHARDS[reduction](totals, stack.sample_axes)

    return all_reduce


def find_totals(run: RunPart, parts: Parts, all_reduce: AllReduce) -> list[Array]:
    """Finds all totals that a rule requests, in order. The parts are per shard."""
    known: list[Array] = []
    # XLA removes all results of a run except the values for the next total.
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
    """Makes a function that answers the requests of a single run, in order."""
    remaining = iter(known)
    return lambda totals, reduction: next(remaining)


def requests_of(run: RunPart, part: Any, known: list[Array]) -> list[_Request]:
    """Runs the rule with the known totals, and lists its requests."""
    requests: list[_Request] = []

    def all_reduce(values: Array, reduction: Reduction) -> Array:
        number = len(requests)
        requests.append(_Request(values, reduction))
        # After the first unknown total, answers are wrong, so later requests aren't
        # used.
        return known[number] if number < len(known) else values

    run(part, all_reduce)
    return requests


def tables_of_rows(
    row_ids: Int[Array, " rows"],
    is_touched: Bool[Array, " rows"],
    all_reduce: AllReduce,
    stack: StackPlan,
) -> TableRows:
    """Matches one shard's rows with their tables."""
    is_used, stack_rows = rows_of_stack(row_ids, stack)

    # Comparing with all bounds vectorizes. A binary search would gather single
    # integers, which is slow on a TPU.
    def count_reached(bounds: list[int]) -> Int[Array, " rows"]:
        reached = jnp.searchsorted(
            np.asarray(bounds, np.int32), stack_rows, side="right", method="compare_all"
        )
        return reached.astype(jnp.int32)

    num_begun = count_reached([table.row_offset for table in stack.tables])
    sizes = [table.num_rows for table in stack.tables]
    # Tables begin at different owners, so unused rows may separate two tables.
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
    """Converts one shard's local rows to stack rows.

    Returns:
      A mask that is False for padding, and the stack rows. Padding has arbitrary rows.
    """
    is_used = row_ids < stack.rows_per_shard
    shard = jax.lax.axis_index(stack.shard_axes)
    # A padding id would overflow in the product.
    local_ids = stack.layout.undealt(jnp.where(is_used, row_ids, 0))
    return is_used, local_ids * stack.num_shards + shard

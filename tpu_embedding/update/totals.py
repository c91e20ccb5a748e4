"""Finds totals over rows that arrive in parts: rounds of a gradient, blocks of a table.

A rule asks for totals while it runs, `total = rows.total(values)`, and each total may
depend on earlier ones. With one part, the answer is an all-reduce. With several parts,
the rule runs on every part once per total. The totals known so far carry it to the next
request, whose values are summed over the parts. The last run uses all totals.
"""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tpu_embedding.optimizers.table_rows import AllReduce, Reduction
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan

_ACROSS_SHARDS: Final = {"sum": jax.lax.psum, "min": jax.lax.pmin}
_ACROSS_PARTS: Final = {"sum": jnp.add, "min": jnp.minimum}


RunPart = Callable[[AllReduce], Any]
"""Runs the rule on one part; the rule asks the given function for totals."""

FoldParts = Callable[[Callable[[Any, RunPart], Any], Any], Any]
"""Calls `carry = fold(carry, run_part)` for all parts but the first."""


class _Missing(Exception):
    """Stops a rule at its first unknown total, and carries the request."""

    def __init__(self, totals: Array, reduction: Reduction):
        super().__init__()
        self.totals = totals
        self.reduction: Reduction = reduction


def across_shards(stack: StackPlan, plan: EmbeddingPlan) -> AllReduce:
    """Returns the all-reduce over the shards of a stack.

    Each row counts once, on the first replica of its shard. All devices take part, so
    that all replicas get the same bits.
    """

    def all_reduce(totals: Array, reduction: Reduction) -> Array:
        if reduction == "sum" and stack.num_replicas > 1:
            is_first = jax.lax.axis_index(stack.replica_axes) == 0
            totals = jnp.where(is_first, totals, jnp.zeros_like(totals))
        return _ACROSS_SHARDS[reduction](totals, plan.sample_axes)

    return all_reduce


def find_totals(
    run_first: RunPart, fold_rest: FoldParts, all_reduce: AllReduce
) -> list[Array]:
    """Returns all totals that a rule asks for, in the order of its requests. Per shard.

    Args:
      run_first: runs the rule on the first part.
      fold_rest: folds over the other parts.
      all_reduce: reduces a total over the shards.
    """
    known: list[Array] = []
    while (missing := _next_missing(run_first, known)) is not None:
        reduction = missing.reduction

        def add(carry: Array, run_part: RunPart, reduction=reduction) -> Array:
            of_part = _next_missing(run_part, known)
            assert of_part is not None
            return _ACROSS_PARTS[reduction](carry, of_part.totals)

        total = fold_rest(add, missing.totals)
        known.append(all_reduce(total, reduction))
    return known


def known_totals(known: list[Array]) -> AllReduce:
    """Returns a function that answers requests with the known totals, in order."""
    remaining = iter(known)
    return lambda totals, reduction: next(remaining)


def _next_missing(run: RunPart, known: list[Array]) -> _Missing | None:
    """Returns the first request beyond the known totals; None if there is none."""
    remaining = iter(known)

    def all_reduce(totals: Array, reduction: Reduction) -> Array:
        for total in remaining:
            return total
        raise _Missing(totals, reduction)

    try:
        run(all_reduce)
    except _Missing as missing:
        return missing
    return None

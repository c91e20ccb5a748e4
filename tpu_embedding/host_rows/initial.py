"""Fills a stack's stores with initial rows and slot variables, block by block.

Results equal the results of `te.functional.init_tables` and `init_slots` bit for bit,
although the devices hold only one block at a time. To achieve this, totals are summed
over the same blocks as in `init_state`, in the same order. `fill_tables` explains one
exception.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from tpu_embedding.host_rows.own_shards import OwnShards
from tpu_embedding.host_rows.records import words_of_file_rows
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan, TablePlan
from tpu_embedding.plan.shard_map import in_auto_axes, on_shards
from tpu_embedding.rows import access, packed_rows
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.initial_values import (
    init_block,
    split_by_initializer,
    zero_rows,
)
from tpu_embedding.update import state as stack_state
from tpu_embedding.update import totals
from tpu_embedding.xla import run_if

_BLOCK_BYTES: Final = 2**22
"""Bytes of float32 rows that a device computes at once."""


def fill_tables(shards: OwnShards, plan: EmbeddingPlan, key: jax.Array) -> None:
    """Writes initial rows, as in `init_tables(plan, key)`."""
    stack = shards.stack
    by_row, others = split_by_initializer(stack)
    size = max(1, _BLOCK_BYTES // (packed_rows.LANE_BYTES * stack.dim))
    size = packed_rows.round_up(size, stack.layout.rows_per_line)
    groups: list[tuple[list[TablePlan], int]] = [(by_row, size)] if by_row else []
    # Other initializers need all rows at once, so they compute a whole table, sharded
    # over the devices. XLA may then round differently than in `init_tables`. The
    # table's first and last local rows may be on only some shards, hence + 2.
    groups += [([table], table.num_rows // stack.num_shards + 2) for table in others]
    for tables, num_rows in groups:
        layout = dataclasses.replace(stack.layout, num_rows=num_rows)

        def init(
            key: Any, first: Any, tables: Any = tables, layout: Any = layout
        ) -> Any:
            specs = dict(in_specs=(), out_specs=stack.rows_spec)
            rows = on_shards(lambda: zero_rows(layout), plan, **specs)()
            return init_block(rows, tables, first, stack, plan, key)

        program = jax.jit(in_auto_axes(init, plan, stack.rows_spec))
        begin, end = tables[0].row_offset, tables[-1].row_offset + tables[-1].num_rows
        last = -(-end // stack.num_shards)
        for first in range(begin // stack.num_shards, last, num_rows):
            lines = program(key, np.int32(first)).lines
            # A block may reach into neighboring tables, whose rows must not change.
            shards.write_rows(first, lines, layout, 0, (begin, end))


def fill_slots(
    shards: OwnShards, plan: EmbeddingPlan, slot_at: Callable[[int], Any]
) -> Any:
    """Writes initial slot variables, and makes the state; see `measured_state`."""
    # All rows start with the same record, since the placement rejects rules whose slot
    # variables start from the table.
    values, rows = _initial_values_and_slots(shards, plan)
    records = [words_of_file_rows(np.asarray(row)[None]) for row in rows]
    for record, words in zip(records, shards.columns[1:], strict=True):
        for store in shards.stores:
            store.fill(record, words)
    return _state_with(values, shards, slot_at)


def measured_state(
    shards: OwnShards, plan: EmbeddingPlan, slot_at: Callable[[int], Any]
) -> Any:
    """Makes an initial state with totals over the rows in the stores.

    `slot_at(i)` returns the leaf for slot variable `i`, numbered as in `stack.slots`.
    """
    values, _ = _initial_values_and_slots(shards, plan)
    return _state_with(values, shards, slot_at)


def _state_with(
    values: list[jax.Array], shards: OwnShards, slot_at: Callable[[int], Any]
) -> Any:
    stack: Any = shards.stack
    state = stack_state.with_values(stack_state.abstract_state(stack), values)
    return stack_state.with_slots(state, [slot_at(i) for i in range(len(stack.slots))])


def _initial_values_and_slots(
    shards: OwnShards, plan: EmbeddingPlan
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Computes the values that all rows share, and one row per slot variable."""
    stack: Any = shards.stack

    def init(known: list[Array]) -> tuple[list[Array], list[Array]]:
        layout = dataclasses.replace(stack.layout, num_rows=stack_state.PADDING_ROWS)
        rows = zero_rows(layout)  # Zeros suffice, since real rows only affect totals.
        state = stack_state.init_block(rows, 0, totals.known_totals(known), stack)
        slots = map(packed_rows.unpack_rows, stack_state.slots_of(state))
        values = stack_state.values_of(stack_state.state_around(state, stack))
        return list(map(jnp.asarray, values)), [slot[0] for slot in slots]

    specs = dict(in_specs=PartitionSpec(), out_specs=PartitionSpec())
    return jax.jit(on_shards(init, plan, **specs))(_totals_of_stores(shards, plan))


def _totals_of_stores(shards: OwnShards, plan: EmbeddingPlan) -> list[jax.Array]:
    """Finds totals over all stores, like `totals.find_totals`."""
    stack: Any = shards.stack

    def add(total: Any, block: PackedRows, start: Array, known: list[Array]) -> Any:
        # A total is `{reduction: result so far}`, empty before the first block.
        def request() -> Any:
            requests = totals.requests_of(
                lambda rows, ask: stack_state.init_block(rows, start, ask, stack),
                block,
                known,
            )
            return requests[len(known) :][:1]

        if not total:
            return {reduction: values[None] for values, reduction in request()}
        ((reduction, so_far),) = total.items()
        combine = totals.ACROSS_PARTS[reduction]
        # `run_if` is a loop, as in `init_state`. Outside of a loop, XLA:CPU sums a
        # matrix-vector product in a different order.
        return {
            reduction: run_if(
                start >= 0, lambda x: combine(x, request()[0].values[None]), so_far
            )
        }

    def reduce(total: Any) -> list[Array]:
        all_reduce = totals.across_shards(stack)
        return [all_reduce(values[0], name) for name, values in total.items()]

    spec, everywhere = stack.rows_spec, PartitionSpec()
    specs = spec, spec, everywhere, everywhere
    add_block = jax.jit(on_shards(add, plan, in_specs=specs, out_specs=spec))
    reduce_total = on_shards(reduce, plan, in_specs=spec, out_specs=everywhere)
    known: list[jax.Array] = []
    while stack.optimizer.takes_totals:
        total: Any = {}
        for start, size in _blocks_of(stack):
            layout = dataclasses.replace(stack.layout, num_rows=size)
            lines = shards.lines_of_rows(start, layout, 0)
            block = PackedRows(lines=lines, layout=layout)
            total = add_block(total, block, start, known)
            if not total:
                return known
        known += jax.jit(reduce_total)(total)
    return known


def _blocks_of(stack: StackPlan) -> Iterator[tuple[int, int]]:
    """Yields (first local row, row count), in the order of `init_state`."""
    layout = dataclasses.replace(stack.layout, num_rows=stack.rows_per_shard)
    blocks = access.blocks_of([layout])
    yield blocks.first
    for start in blocks.starts:
        yield start, blocks.size

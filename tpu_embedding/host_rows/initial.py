"""Fills a stack's store with initial rows and slot variables, block by block.

The values equal those from `te.functional.init_tables` and `init_slots` bit for bit,
although the devices hold only one block at a time. Row initializers run on all devices,
and each device computes a range of the table. Optimizer rules run on blocks of each
shard's local rows. Local rows `s` to `e` of all shards are stack rows `s * num_shards`
to `e * num_shards`, so a block is one range of the store. `init_state` sums totals over
the same blocks in the same order.

A store has `read_range(begin, end, words)`, which returns uint32 `[rows, words]`, and
`write_range(begin, values, words)`. Rows are stack rows, and `words` is a slice.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan, TablePlan
from tpu_embedding.plan.shard_map import in_auto_axes, on_shards
from tpu_embedding.rows import access, file_rows, packed_rows
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables import initial_values
from tpu_embedding.update import state as stack_state
from tpu_embedding.update import totals
from tpu_embedding.xla import computed_apart, run_if

_BLOCK_BYTES: Final = 2**22
"""Bytes of float32 rows that a device computes at once."""


def rows_of_record(stack: StackPlan) -> list[jax.ShapeDtypeStruct]:
    """Returns the shape of each file row in a record: table, then slot variables."""
    return [file_rows.file_row(_abstract_table(stack)), *stack.slots]


def _abstract_table(stack: StackPlan) -> PackedRows:
    lines = jax.ShapeDtypeStruct((), stack.layout.stored_dtype)
    return PackedRows(lines=lines, layout=stack.layout)


def columns_of(stack: StackPlan) -> list[slice]:
    """Returns the position of each file row's words in a record.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(
      ...     te.FeatureConfig(table=table), optimizer=te.optimizers.adagrad(0.1))
      >>> columns_of(plan.stacks[0])
      [slice(0, 4, None), slice(4, 8, None)]
    """
    num_words = [-(-_num_bytes(row) // 4) for row in rows_of_record(stack)]
    ends = np.cumsum(num_words).tolist()
    return list(map(slice, [0, *ends], ends))


def words_of_file_rows(rows: np.ndarray) -> np.ndarray:
    """Returns file rows as words of records, padding the last word with zeros.

    Args:
      rows: `[rows, *shape]`, with the shape and dtype of `file_row`.

    Returns:
      uint32 `[rows, words]`.
    """
    flat = np.ascontiguousarray(rows).reshape(len(rows), math.prod(rows.shape[1:]))
    flat = flat.view(np.uint8)
    return np.pad(flat, ((0, 0), (0, -flat.shape[1] % 4))).view(np.uint32)


def file_rows_of_words(words: np.ndarray, row: jax.ShapeDtypeStruct) -> np.ndarray:
    """Returns words of records as file rows; inverse of `words_of_file_rows`.

    Args:
      words: uint32 `[rows, words]`.
      row: shape and dtype of a file row.

    Returns:
      `[rows, *shape]`.
    """
    flat = np.ascontiguousarray(words).view(np.uint8)[:, : _num_bytes(row)]
    return np.ascontiguousarray(flat).view(row.dtype).reshape(len(words), *row.shape)


def _num_bytes(row: jax.ShapeDtypeStruct) -> int:
    return math.prod(row.shape) * row.dtype.itemsize


def fill_tables(
    store: Any, stack: StackPlan, plan: EmbeddingPlan, key: jax.Array
) -> None:
    """Writes the initial rows of a stack's tables, equal to `init_tables(plan, key)`.

    The devices hold one block at a time. An initializer that needs all rows at once is
    an exception: it computes a whole table, sharded over the devices, and the host
    copies each device's part. XLA may then round values differently than in
    `init_tables`. Padding rows between tables are not written.

    Args:
      store: records of the stack's rows.
      stack: the stack to fill.
      plan: plan of the embedding layer.
      key: typed JAX random key.
    """
    for table in stack.tables:
        rows_of = _rows_by_block if table.row_initializer else _rows_at_once
        for row, rows in rows_of(table, stack, plan, key):
            words = words_of_file_rows(rows)
            store.write_range(table.row_offset + row, words, columns_of(stack)[0])


def _rows_at_once(
    table: TablePlan, stack: StackPlan, plan: EmbeddingPlan, key: jax.Array
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the first row and the file rows of each device's part of a table."""
    compute = functools.partial(initial_values.logical_values, table, stack, plan)
    values = jax.jit(in_auto_axes(compute, plan, stack.rows_spec))(key)
    for shard in values.addressable_shards:
        begin = shard.index[0].start or 0
        if begin < table.num_rows:
            rows = np.asarray(shard.data)[: table.num_rows - begin]
            yield begin, file_rows.file_rows_of_values(rows, _abstract_table(stack))


def _rows_by_block(
    table: TablePlan, stack: StackPlan, plan: EmbeddingPlan, key: jax.Array
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the first row and the file rows of each block of a table."""
    size = max(1, _BLOCK_BYTES // (packed_rows.LANE_BYTES * stack.dim))
    size = packed_rows.round_up(size, stack.layout.rows_per_line)
    layout = dataclasses.replace(stack.layout, num_rows=size)

    def compute(facts: Any, begin: Array) -> Array:
        first = begin + jax.lax.axis_index(stack.shard_axes) * size
        row_ids = first + jnp.arange(size, dtype=jnp.int32)
        row_ids = jnp.clip(row_ids, 0, table.num_rows - 1)
        rows = initial_values.values_of_rows([table], facts, 0, row_ids)
        stored = computed_apart(packed_rows.store_rows(rows, layout))
        return packed_rows.pack_stored(stored, layout).lines

    facts = jax.jit(functools.partial(initial_values.facts_of_tables, [table]))(key)
    specs = dict(in_specs=PartitionSpec(), out_specs=stack.rows_spec)
    program = jax.jit(on_shards(compute, plan, **specs))
    for begin in range(0, table.num_rows, size * stack.num_shards):
        rows = file_rows.file_rows_of_lines(np.asarray(program(facts, begin)), layout)
        yield begin, rows[: table.num_rows - begin]


def fill_slots(
    store: Any, stack: Any, plan: EmbeddingPlan, slot_at: Callable[[int], Any]
) -> Any:
    """Writes initial slot variables, equal to `init_slots`, and returns the state.

    Args:
      store: records of the stack's rows; the table's rows must be filled.
      stack: the stack to fill. Slot variables of its rule must not depend on the
        table's rows, so they start with equal rows.
      plan: plan of the embedding layer.
      slot_at: see `measured_state`.

    Returns:
      The stack's state; see `measured_state`.
    """
    values, rows = _initial_values_and_slots(store, stack, plan)
    for row, words in zip(rows, columns_of(stack)[1:], strict=True):
        record = words_of_file_rows(np.asarray(row)[None])
        for start, size in _blocks_of(stack):
            begin, end = _stack_rows(start, size, stack)
            shape = end - begin, record.shape[1]
            store.write_range(begin, np.broadcast_to(record, shape), words)
    return _state_with(values, stack, slot_at)


def measured_state(
    store: Any, stack: Any, plan: EmbeddingPlan, slot_at: Callable[[int], Any]
) -> Any:
    """Returns a stack's initial state, with totals over the rows now in the store.

    Args:
      store: records of the stack's rows.
      stack: the stack of the rows.
      plan: plan of the embedding layer.
      slot_at: returns the leaf of slot variable `i`, numbered as in `stack.slots`.

    Returns:
      A state with the structure of `init_state`. Counts, rates and totals are
      replicated over the devices, and equal the values from `init_slots` bit for bit.
    """
    values, _ = _initial_values_and_slots(store, stack, plan)
    return _state_with(values, stack, slot_at)


def _state_with(
    values: list[jax.Array], stack: Any, slot_at: Callable[[int], Any]
) -> Any:
    state = stack_state.with_values(stack_state.abstract_state(stack), values)
    return stack_state.with_slots(state, [slot_at(i) for i in range(len(stack.slots))])


def _initial_values_and_slots(
    store: Any, stack: Any, plan: EmbeddingPlan
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the initial values shared by all rows, and a row of each slot variable.

    Both depend on the table's rows only through totals.
    """

    def init(known: list[Array]) -> tuple[list[Array], list[Array]]:
        layout = dataclasses.replace(stack.layout, num_rows=stack_state.PADDING_ROWS)
        zeros = jnp.zeros(layout.lines_shape, layout.stored_dtype)
        rows = PackedRows(lines=zeros, layout=layout)
        state = stack_state.init_block(rows, 0, totals.known_totals(known), stack)
        slots = map(packed_rows.unpack_rows, stack_state.slots_of(state))
        values = stack_state.values_of(stack_state.state_around(state, stack))
        return list(map(jnp.asarray, values)), [slot[0] for slot in slots]

    specs = dict(in_specs=PartitionSpec(), out_specs=PartitionSpec())
    return jax.jit(on_shards(init, plan, **specs))(_totals_of_store(store, stack, plan))


def _totals_of_store(store: Any, stack: Any, plan: EmbeddingPlan) -> list[jax.Array]:
    """Returns the totals that the rule requests; see `totals.find_totals`. Global."""

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
        # Runs in a loop, as in `init_state`. Outside of a loop, XLA:CPU sums a
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
            block = _read_block(store, start, size, stack, plan)
            total = add_block(total, block, start, known)
            if not total:
                return known
        known += jax.jit(reduce_total)(total)
    return known


def _blocks_of(stack: StackPlan) -> Iterator[tuple[int, int]]:
    """Yields the first local row and size of each block, in `init_state`'s order."""
    layout = dataclasses.replace(stack.layout, num_rows=stack.rows_per_shard)
    blocks = access.blocks_of([layout])
    yield blocks.first
    for start in blocks.starts:
        yield start, blocks.size


def _stack_rows(start: int, size: int, stack: StackPlan) -> tuple[int, int]:
    """Returns the range of stack rows in a block of all shards' local rows."""
    # The last local rows may be padding.
    begin, end = (
        min(row * stack.num_shards, stack.num_rows) for row in (start, start + size)
    )
    return begin, end


def _read_block(
    store: Any, start: int, size: int, stack: StackPlan, plan: EmbeddingPlan
) -> PackedRows:
    """Returns the table's rows in a block of all shards' local rows. Global."""
    begin, end = _stack_rows(start, size, stack)
    layout = dataclasses.replace(stack.layout, num_rows=size)
    row, num_rows = rows_of_record(stack)[0], layout.row_of(layout.num_lines)
    rows = np.zeros((num_rows, stack.num_shards, *row.shape), row.dtype)
    words = store.read_range(begin, end, columns_of(stack)[0])
    rows.reshape(-1, *row.shape)[: end - begin] = file_rows_of_words(words, row)
    by_shard = rows.swapaxes(0, 1).reshape(-1, *row.shape)
    lines = file_rows.lines_of_file_rows(by_shard, layout)
    lines = jax.device_put(lines, plan.rows_sharding(stack))
    return PackedRows(lines=lines, layout=layout)

"""Fills the store of a stack with initial rows and slot variables, block by block.

The values equal `te.functional.init_tables` and `init_slots` bit for bit, although the
devices hold a block at a time. Row initializers run on all devices, each on a range of
the table. Rules run on blocks of each shard's local rows. Local rows `s` to `e` of all
shards are rows `s * num_shards` to `e * num_shards` of the stack, so the store reads
one range per block. `init_state` sums totals over the same blocks in the same order.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from tpu_embedding.optimizers.probe import probe_rule
from tpu_embedding.plan.plan import (
    EmbeddingPlan,
    StackPlan,
    TablePlan,
    TrainedStackPlan,
)
from tpu_embedding.plan.shard_map import in_auto_axes, on_shards
from tpu_embedding.rows.access import blocks_of
from tpu_embedding.rows.file_rows import (
    file_row,
    file_rows_of_lines,
    lines_of_file_rows,
)
from tpu_embedding.rows.packed_rows import (
    LANE_BYTES,
    PackedRows,
    pack_stored,
    round_up,
    store_rows,
)
from tpu_embedding.tables.initial_values import (
    TableFacts,
    facts_of_tables,
    logical_values,
    values_of_rows,
)
from tpu_embedding.update.apply import (
    PADDING_ROWS,
    abstract_state,
    init_block,
    state_around,
)
from tpu_embedding.update.lazy_update import (
    slots_of,
    values_of,
    with_slots,
    with_values,
)
from tpu_embedding.update.totals import (
    ACROSS_PARTS,
    across_shards,
    known_totals,
    requests_of,
)
from tpu_embedding.xla import computed_apart, run_if

_BLOCK_BYTES: Final = 2**22
"""Bytes of float32 rows that a device computes at a time."""


class RowRanges(Protocol):
    """Records of the rows of a stack, read and written in ranges of rows."""

    def read_range(self, begin: int, end: int, words: slice) -> np.ndarray:
        """Returns some words of rows, uint32 `[end - begin, words]`."""
        ...

    def write_range(self, begin: int, values: np.ndarray, words: slice) -> None:
        """Writes some words of rows from `begin` on, uint32 `[rows, words]`."""
        ...


def rows_of_record(stack: StackPlan) -> list[jax.ShapeDtypeStruct]:
    """Returns shape and dtype of the file rows of a record.

    The table's row comes first, then the row of each slot variable.
    """
    table = jax.ShapeDtypeStruct((), stack.layout.stored_dtype)
    return [file_row(PackedRows(lines=table, layout=stack.layout)), *stack.slots]


def columns_of(stack: StackPlan) -> list[slice]:
    """Returns the words of a record that hold each of its file rows.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(
      ...     te.FeatureConfig(table=table), optimizer=te.optimizers.adagrad(0.1))
      >>> columns_of(plan.stacks[0])
      [slice(0, 4, None), slice(4, 8, None)]
    """
    ends = np.cumsum([_row_bytes(row) // 4 for row in rows_of_record(stack)]).tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def words_of_file_rows(rows: np.ndarray) -> np.ndarray:
    """Returns file rows as words of records; the last word is filled up with zeros.

    Args:
      rows: `[rows, *shape]` as `file_row` says.

    Returns:
      uint32 `[rows, words]`.
    """
    row = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
    flat = np.ascontiguousarray(rows).reshape(len(rows), math.prod(row.shape))
    flat = flat.view(np.uint8)
    missing = _row_bytes(row) - flat.shape[1]
    if missing:
        flat = np.pad(flat, ((0, 0), (0, missing)))
    return flat.view(np.uint32)


def file_rows_of_words(words: np.ndarray, row: jax.ShapeDtypeStruct) -> np.ndarray:
    """Returns words of records as file rows; the inverse of `words_of_file_rows`.

    Args:
      words: uint32 `[rows, words]`.
      row: shape and dtype of a file row.

    Returns:
      `[rows, *shape]`.
    """
    num_bytes = math.prod(row.shape) * row.dtype.itemsize
    flat = np.ascontiguousarray(words).view(np.uint8)[:, :num_bytes]
    flat = np.ascontiguousarray(flat).view(row.dtype)
    return flat.reshape(len(words), *row.shape)


def _row_bytes(row: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of a file row in a record: whole words."""
    return round_up(math.prod(row.shape) * row.dtype.itemsize, 4)


def fill_tables(
    store: RowRanges, stack: StackPlan, plan: EmbeddingPlan, key: jax.Array
) -> None:
    """Writes the initial rows of a stack's tables, equal to `init_tables(plan, key)`.

    The devices hold a few blocks at a time. An initializer that needs all rows at once
    computes one whole table, split over the devices; XLA may round it differently in
    another program. Rows between two tables stay as they are.

    Args:
      store: records of the stack's rows.
      stack: the stack of the rows.
      plan: plan of the embedding layer.
      key: typed JAX random key.
    """
    by_function: dict[Any, list[TablePlan]] = {}
    for table in stack.tables:
        function = table.row_initializer and table.row_initializer.function
        by_function.setdefault(function, []).append(table)
    for function, tables in by_function.items():
        facts = None
        if function is not None:
            facts = jax.jit(functools.partial(facts_of_tables, tables))(key)
        for i, table in enumerate(tables):
            share = round_up(-(-table.num_rows // plan.num_shards), plan.num_shards)
            size = min(share, max(1, _BLOCK_BYTES // (LANE_BYTES * stack.dim)))
            facts_of_block = dict(size=size, stack=stack, plan=plan)
            if facts is None:
                values = _values_of_table(key, table=table, stack=stack, plan=plan)
                lines_at = functools.partial(_lines_of_values, values, **facts_of_block)
            else:
                lines_at = functools.partial(
                    _lines_of_rows,
                    facts,
                    i,
                    share,
                    function=function,
                    tables=tuple(tables),
                    **facts_of_block,
                )
            _write_table(store, table, stack, share, size, lines_at)


def _write_table(
    store: RowRanges,
    table: TablePlan,
    stack: StackPlan,
    share: int,
    size: int,
    lines_at: Callable[[int], jax.Array],
) -> None:
    """Writes the rows of a table.

    Args:
      store: records of the stack's rows.
      table: the table.
      stack: the stack of the table.
      share: rows of each device, a contiguous range.
      size: rows that a device computes at a time.
      lines_at: computes the lines of `size` rows of each device; global.
    """
    column = columns_of(stack)[0]

    def write(start: int, lines: jax.Array) -> None:
        for shard in lines.addressable_shards:
            device = (shard.index[0].start or 0) // shard.data.shape[0]
            row = device * share + start
            count = min(size, table.num_rows - row)
            if count > 0:
                rows = file_rows_of_lines(np.asarray(shard.data), stack.layout)
                words = words_of_file_rows(rows[:count])
                store.write_range(table.row_offset + row, words, column)

    # The last block overlaps the one before, with equal values.
    starts = [min(start, share - size) for start in range(0, share, size)]
    lines = lines_at(0)
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        # The devices compute the next block during the copy.
        next_lines = lines if following is None else lines_at(following)
        write(start, lines)
        lines = next_lines


@functools.partial(jax.jit, static_argnames=("table", "stack", "plan"))
def _values_of_table(
    key: jax.Array, table: TablePlan, stack: StackPlan, plan: EmbeddingPlan
) -> jax.Array:
    return in_auto_axes(
        lambda key: logical_values(table, stack, plan, key), plan, stack.rows_spec
    )(key)


@functools.partial(jax.jit, static_argnames=("size", "stack", "plan"))
def _lines_of_values(
    values: jax.Array, start: Any, size: int, stack: StackPlan, plan: EmbeddingPlan
) -> jax.Array:
    """Returns the lines of rows from `start` on of each device's values. Global."""

    def run(values: Array, start: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(values, start, size)
        return _lines_of_block(rows, stack)

    specs = stack.rows_spec, PartitionSpec()
    return on_shards(run, plan, in_specs=specs, out_specs=stack.rows_spec)(
        values, start
    )


@functools.partial(
    jax.jit, static_argnames=("function", "tables", "size", "stack", "plan")
)
def _lines_of_rows(
    facts: TableFacts,
    i: Any,
    share: Any,
    start: Any,
    function: Any,
    tables: Sequence[TablePlan],
    size: int,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> jax.Array:
    """Computes rows from `device * share + start` on, on each device. Global."""

    def run(facts: TableFacts, i: Array, share: Array, start: Array) -> Array:
        first = jax.lax.axis_index(stack.shard_axes) * share + start
        row_ids = first + jnp.arange(size, dtype=jnp.int32)
        row_ids = jnp.clip(row_ids, 0, facts.sizes[i] - 1)
        rows = values_of_rows(i, row_ids, function, facts, tables)
        return _lines_of_block(rows, stack)

    return on_shards(run, plan, in_specs=PartitionSpec(), out_specs=stack.rows_spec)(
        facts, i, share, start
    )


def _lines_of_block(rows: Array, stack: StackPlan) -> Array:
    layout = dataclasses.replace(stack.layout, num_rows=len(rows))
    return pack_stored(computed_apart(store_rows(rows, layout)), layout).lines


def fill_slots(
    store: RowRanges,
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
    slot_at: Callable[[int], Any],
) -> Any:
    """Writes the initial slot variables of the store's rows, and returns the state.

    They equal those of `init_slots` on the same rows. Slot variables that start with a
    number don't run the rule.

    Args:
      store: records of the stack's rows, with the table's rows.
      stack: the stack of the rows; its rule is for touched rows.
      plan: plan of the embedding layer.
      slot_at: see `measured_state`.

    Returns:
      The state of the stack, see `measured_state`.
    """
    totals = _totals_of_store(store, stack, plan)
    rows, columns = rows_of_record(stack)[1:], columns_of(stack)[1:]
    varying = []
    for i, slot in enumerate(probe_rule(stack.optimizer, stack.dim).slots):
        if slot.initial_value is None:
            varying.append(i)
            continue
        row = np.full((1, *rows[i].shape), slot.initial_value, rows[i].dtype)
        words = words_of_file_rows(row)
        num_rows = max(1, _BLOCK_BYTES // words.nbytes)
        for begin in range(0, stack.num_rows, num_rows):
            count = min(num_rows, stack.num_rows - begin)
            values = np.broadcast_to(words, (count, words.shape[1]))
            store.write_range(begin, values, columns[i])
    if varying:
        for start, block in _blocks_of_store(store, stack, plan):
            slots = _slots_of_block(block, start, totals, stack=stack, plan=plan)
            for i in varying:
                begin, values = _in_natural_order(slots[i], start, stack)
                store.write_range(begin, words_of_file_rows(values), columns[i])
    return _state_of_totals(totals, stack, plan, slot_at)


def measured_state(
    store: RowRanges,
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
    slot_at: Callable[[int], Any],
) -> Any:
    """Returns the first state of a stack, with totals over the store's present rows.

    Args:
      store: records of the stack's rows.
      stack: the stack of the rows.
      plan: plan of the embedding layer.
      slot_at: makes the leaf of slot variable `i`, in the order of `stack.slots`.

    Returns:
      A state of the structure of `init_state`. Values that belong to no row are
      replicated over the devices, and equal `init_slots` bit for bit.
    """
    totals = _totals_of_store(store, stack, plan)
    return _state_of_totals(totals, stack, plan, slot_at)


def _state_of_totals(
    totals: list[jax.Array],
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
    slot_at: Callable[[int], Any],
) -> Any:
    values = _values_of_state(totals, stack=stack, plan=plan)
    state = with_values(abstract_state(stack), values)
    return with_slots(state, [slot_at(i) for i in range(len(stack.slots))])


@functools.partial(jax.jit, static_argnames=("stack", "plan"))
def _values_of_state(
    totals: list[Array], stack: TrainedStackPlan, plan: EmbeddingPlan
) -> list[jax.Array]:
    """Returns what belongs to no row in the first state, given all totals. Global."""

    def run(totals: list[Array]) -> list[Array]:
        # They depend on rows through totals only.
        layout = dataclasses.replace(stack.layout, num_rows=PADDING_ROWS)
        zeros = jnp.zeros(layout.lines_shape, layout.stored_dtype)
        rows = PackedRows(lines=zeros, layout=layout)
        state = init_block(rows, 0, known_totals(totals), stack)
        return [jnp.asarray(value) for value in values_of(state_around(state, stack))]

    everywhere = PartitionSpec()
    return on_shards(run, plan, in_specs=everywhere, out_specs=everywhere)(totals)


def _totals_of_store(
    store: RowRanges, stack: TrainedStackPlan, plan: EmbeddingPlan
) -> list[jax.Array]:
    """Returns the totals that the rule asks for; see `find_totals`. Global."""
    known: list[jax.Array] = []
    while stack.optimizer.takes_totals:
        total: dict[str, jax.Array] = {}
        for start, block in _blocks_of_store(store, stack, plan):
            total = _add_block(total, block, start, known, stack=stack, plan=plan)
            if not total:
                return known
        known.append(_reduce_total(total, stack=stack, plan=plan))
    return known


@functools.partial(jax.jit, static_argnames=("stack", "plan"))
def _add_block(
    total: dict[str, jax.Array],
    block: PackedRows,
    start: Any,
    known: list[jax.Array],
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
) -> dict[str, jax.Array]:
    """Adds a block to the first total that is not known. Global.

    Args:
      total: reduction to the sum so far of each shard, `[shards, tables, ...]`. Before
        the first block it is empty.
      block: rows of each shard.
      start: their first local row.
      known: totals that are known.
      stack: the stack of the rows.
      plan: gives the mesh.

    Returns:
      The new sum. It is empty if all totals are known.
    """

    def run(total: Any, block: PackedRows, start: Array, known: list[Array]) -> Any:
        def request() -> Any:
            requests = requests_of(
                lambda rows, all_reduce: init_block(rows, start, all_reduce, stack),
                block,
                known,
            )
            return requests[len(known)] if len(requests) > len(known) else None

        if not total:
            first = request()
            return {first.reduction: first.values[None]} if first else {}

        def add(total: Array) -> Array:
            return ACROSS_PARTS[reduction](total[0], request().values)[None]

        ((reduction, so_far),) = total.items()
        # In a loop, as `init_state` does: XLA:CPU adds up a matrix-vector product in
        # another order outside of one.
        return {reduction: run_if(start >= 0, add, so_far)}

    everywhere, spec = PartitionSpec(), stack.rows_spec
    return on_shards(
        run, plan, in_specs=(spec, spec, everywhere, everywhere), out_specs=spec
    )(total, block, start, known)


@functools.partial(jax.jit, static_argnames=("stack", "plan"))
def _reduce_total(
    total: dict[Any, jax.Array], stack: TrainedStackPlan, plan: EmbeddingPlan
) -> jax.Array:
    ((reduction, sums),) = total.items()
    return on_shards(
        lambda sums: across_shards(stack)(sums[0], reduction),
        plan,
        in_specs=stack.rows_spec,
        out_specs=PartitionSpec(),
    )(sums)


@functools.partial(jax.jit, static_argnames=("stack", "plan"))
def _slots_of_block(
    block: PackedRows,
    start: Any,
    totals: list[jax.Array],
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
) -> list[PackedRows]:
    """Returns the initial slot variables of a block of each shard. Global."""

    def run(block: PackedRows, start: Array, totals: list[Array]) -> list[PackedRows]:
        return slots_of(init_block(block, start, known_totals(totals), stack))

    everywhere, spec = PartitionSpec(), stack.rows_spec
    return on_shards(
        run, plan, in_specs=(spec, everywhere, everywhere), out_specs=spec
    )(block, start, totals)


def _blocks_of_store(
    store: RowRanges, stack: StackPlan, plan: EmbeddingPlan
) -> Iterator[tuple[int, PackedRows]]:
    """Yields the table's rows in the blocks and the order of `init_state`. Global.

    Yields:
      The first local row, and the rows of all shards in lines.
    """
    row, column = rows_of_record(stack)[0], columns_of(stack)[0]
    num_shards = stack.num_shards
    blocks = blocks_of([stack.layout])
    later = [(i * blocks.size, blocks.size) for i in range(*blocks.others)]
    for start, size in [blocks.first, *later]:
        layout = dataclasses.replace(stack.layout, num_rows=size)
        begin = start * num_shards
        # The last local rows may be padding.
        end = max(begin, min(begin + size * num_shards, stack.num_rows))
        words = store.read_range(begin, end, column)
        local_rows = layout.row_of(layout.num_lines)
        rows = np.zeros((local_rows * num_shards, *row.shape), row.dtype)
        rows[: end - begin] = file_rows_of_words(words, row)
        by_shard = rows.reshape(local_rows, num_shards, *row.shape).swapaxes(0, 1)
        lines = lines_of_file_rows(by_shard.reshape(rows.shape), layout)
        lines = jax.device_put(lines, plan.rows_sharding(stack))
        yield start, PackedRows(lines=lines, layout=layout)


def _in_natural_order(
    packed: PackedRows, start: int, stack: StackPlan
) -> tuple[int, np.ndarray]:
    """Returns the first stack row of a block, and its file rows."""
    size, num_shards = packed.layout.num_rows, stack.num_shards
    rows = file_rows_of_lines(np.asarray(packed.lines), packed.layout)
    by_shard = rows.reshape(num_shards, -1, *rows.shape[1:])[:, :size]
    begin = start * num_shards
    rows = by_shard.swapaxes(0, 1).reshape(-1, *rows.shape[1:])
    return begin, rows[: max(0, stack.num_rows - begin)]

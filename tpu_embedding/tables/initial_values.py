"""Creates initial values that are equal on any number of devices.

They depend on the seed, table name and row, never on stacks, shards or packing. With a
`RowInitializer`, each owner computes its rows slab by slab, in place. Any other
initializer is called once for the whole table, and one all-to-all deals the rows.
Initializers return float32, which narrow tables round to nearest.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from tpu_embedding.argument_checks import (
    ArgumentType,
    about,
    check_type,
    describe_value,
)
from tpu_embedding.initializers import RowFunction, key_words, threefry_key
from tpu_embedding.plan.plan import PLAN, EmbeddingPlan, StackPlan, TablePlan
from tpu_embedding.plan.shard_map import constrain, in_auto_axes, on_shards, replicate
from tpu_embedding.rows.access import merge_block
from tpu_embedding.rows.arithmetic_guard import GUARD_NAME, make_guard
from tpu_embedding.rows.packed_rows import (
    LANE_BYTES,
    PackedRows,
    RowLayout,
    gather_in_bounds,
    round_up,
    store_rows,
)
from tpu_embedding.transfers import moves_arrays
from tpu_embedding.xla import as_variables, computed_apart, read_before_write

_MIN_SLAB_BYTES: Final = 2**16
_MAX_SLAB_BYTES: Final = 2**22
# A pass holds about eight slabs of temporaries, at most 2 % of a table.
_SLABS_PER_TABLE: Final = 400

_KEY: Final = ArgumentType(jax.Array, "a JAX random key")


@moves_arrays
def init_tables(plan: EmbeddingPlan, key: jax.Array) -> dict[str, Any]:
    """Creates the stacked tables with their initial values.

    Args:
      plan: plan of the embedding layer.
      key: typed JAX random key, the only source of randomness.

    Returns:
      Packed rows by stack name, sharded over the mesh. If your ids are not row numbers,
      the result also has arrays that say which id each row has, under different names.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> sorted(te.functional.init_tables(plan, jax.random.key(0)))
      ['stack_0']
    """
    line = "te.functional.init_tables(plan, jax.random.key(0))"
    check_type("te.functional.init_tables: plan", PLAN, plan, line)
    check_type("te.functional.init_tables: key", _KEY, key, line)
    tables = _init_on_devices(plan, key)
    for stack in plan.stacks:
        if not stack.storage.holds_all_rows:
            tables[stack.name] = stack.storage.init_rows(stack, plan, key)
    return tables | init_guard(plan)


def init_guard(plan: EmbeddingPlan) -> dict[str, Any]:
    """Makes an arithmetic guard if some tables have packed words."""
    if not any(stack.layout.narrow_dtype for stack in plan.stacks):
        return {}
    words = jnp.zeros((plan.mesh.size, 1, 2), jnp.uint32)
    return {GUARD_NAME: make_guard(replicate(words, plan))}


@functools.partial(jax.jit, static_argnames="plan")
def _init_on_devices(plan: EmbeddingPlan, key: jax.Array) -> dict[str, Any]:
    stacks = [stack for stack in plan.stacks if stack.storage.holds_all_rows]

    def init(key: jax.Array) -> dict[str, Any]:
        tables: dict[str, Any] = {
            stack.name: _init_stack(stack, plan, key) for stack in stacks
        }
        for stack in stacks:
            tables |= stack.vocabulary.stacks.init_arrays(stack, plan, key)
        return tables

    specs = {
        name: stack.rows_spec
        for stack in stacks
        for name in (stack.name, *stack.array_names)
    }
    return in_auto_axes(init, plan, specs)(key)


class _Tables(NamedTuple):
    """Facts about tables. They are arrays, so that one loop can fill all tables."""

    # First row of each table in the stack, and row counts.
    offsets: Int[Any, " tables"]
    sizes: Int[Any, " tables"]
    keys: UInt32[Any, "tables 2"]
    parameters: tuple[Any, ...]


def _init_stack(stack: StackPlan, plan: EmbeddingPlan, key: jax.Array) -> PackedRows:
    rows = on_shards(
        lambda: zero_rows(stack.layout), plan, in_specs=(), out_specs=stack.rows_spec
    )()
    by_row, others = split_by_initializer(stack)
    if by_row:
        rows = init_block(rows, by_row, 0, stack, plan, key)
    for table in others:
        # Keep one whole table in memory at a time.
        rows, key = read_before_write((rows, key))
        rows = init_block(rows, [table], 0, stack, plan, key)
    return rows


def zero_rows(layout: RowLayout) -> PackedRows:
    lines = jnp.zeros(layout.lines_shape, layout.stored_dtype)
    return PackedRows(lines=lines, layout=layout)


def split_by_initializer(stack: StackPlan) -> tuple[list[TablePlan], list[TablePlan]]:
    # If ids are not row numbers, a row is initialized when an id gets the row.
    tables = stack.tables if stack.vocabulary.ids_are_rows else ()
    by_row = [table for table in tables if table.row_initializer]
    return by_row, [table for table in tables if not table.row_initializer]


def init_block(
    rows: PackedRows,
    tables: Sequence[TablePlan],
    first: Any,
    stack: StackPlan,
    plan: EmbeddingPlan,
    key: jax.Array,
) -> PackedRows:
    """Writes initial values to a block of each shard's rows.

    Shapes are global. The block begins at local row `first` on every shard. Rows
    outside of `tables` keep their values. `tables` must have row initializers, or be a
    single table.
    """
    # Subtracting the shift makes row offsets count from the start of the block.
    shift = jnp.asarray(first, jnp.int32) * stack.num_shards
    spec, everywhere = stack.rows_spec, PartitionSpec()
    if tables[0].row_initializer is None:
        (table,) = tables
        return on_shards(
            functools.partial(_deal_rows, table=table, stack=stack),
            plan,
            in_specs=(spec, spec, everywhere),
            out_specs=spec,
        )(rows, logical_values(table, stack, plan, key), shift)
    # Each initializer function gets one loop, so that the program doesn't grow with the
    # number of tables.
    by_function: dict[RowFunction, list[TablePlan]] = {}
    for table in tables:
        assert table.row_initializer is not None
        by_function.setdefault(table.row_initializer.function, []).append(table)
    groups = [*by_function.values()]

    def fill(
        rows: PackedRows, facts_of_groups: list[_Tables], shift: Any
    ) -> PackedRows:
        for group, facts in zip(groups, facts_of_groups, strict=True):
            values_of = functools.partial(values_of_rows, group, facts)
            offsets = facts.offsets - shift
            rows = _fill_slabs(rows, values_of, offsets, facts.sizes, stack)
        return rows

    return on_shards(
        fill, plan, in_specs=(spec, everywhere, everywhere), out_specs=spec
    )(rows, [facts_of_tables(group, key) for group in groups], shift)


def keys_of_tables(
    tables: Sequence[TablePlan], key: jax.Array
) -> UInt32[Array, "tables 2"]:
    """Derives Threefry keys from table names."""
    words = np.stack([_words_of_name(table.name) for table in tables])
    return jax.vmap(lambda words: key_words(_key_of_words(key, words)))(words)


def facts_of_tables(tables: Sequence[TablePlan], key: jax.Array) -> _Tables:
    keys = keys_of_tables(tables, key)
    initializers = [table.row_initializer for table in tables]
    scalars = [initializer.scalars for initializer in initializers if initializer]
    parameters = tuple(np.stack(values) for values in zip(*scalars, strict=True))
    facts = _Tables(
        offsets=np.asarray([table.row_offset for table in tables], np.int32),
        sizes=np.asarray([t.num_rows for t in tables], np.int32),
        keys=keys,
        parameters=parameters,
    )
    # Hide these constants from XLA. Otherwise, the rounding of a table's values could
    # depend on which tables share its stack.
    return as_variables(jax.tree.map(jnp.asarray, facts))


def values_of_rows(
    tables: Sequence[TablePlan], facts: _Tables, i: Any, row_ids: Int[Array, " rows"]
) -> Float[Array, "rows dim"]:
    """Computes some rows of table `i`. All `tables` share an initializer function."""
    initializer, dim = tables[0].row_initializer, tables[0].config.dim
    assert initializer is not None
    key = threefry_key(facts.keys[i])
    parameters = [values[i] for values in facts.parameters]
    values = initializer.function(key, row_ids, dim, *parameters)
    check_values(values, (row_ids.shape[0], dim), tables)
    return values


def _fill_slabs(
    rows: PackedRows,
    values_of: Callable[[Any, Int[Array, " rows"]], Float[Array, "rows dim"]],
    offsets: Int[Array, " tables"],
    sizes: Int[Array, " tables"],
    stack: StackPlan,
) -> PackedRows:
    """Writes one shard's table rows in place, slab by slab.

    Tables may begin before the block, and end after it.
    """
    layout = rows.layout
    slab, rows_per_line = _rows_per_slab(layout), layout.rows_per_line
    shard = jax.lax.axis_index(stack.shard_axes)
    # A table's rows on a shard are one range in each bank.
    banks = layout.banks
    bank = jnp.arange(offsets.size * banks, dtype=jnp.int32) % banks
    num_local = layout.row_of(layout.num_lines)
    begins, ends = (
        jnp.clip(stack.first_local_row(jnp.repeat(x, banks), shard, bank), 0, num_local)
        for x in (offsets, offsets + sizes)
    )
    # Extend the ranges to whole lines, which `merge_block` needs. Because of `is_own`
    # below, neighboring rows in these lines stay unchanged.
    begins = begins // rows_per_line * rows_per_line
    ends = -(-ends // rows_per_line) * rows_per_line
    num_slabs = -(-(ends - begins) // slab)
    end_slabs = jnp.cumsum(num_slabs)
    last_start = num_local - slab

    def fill_slab(slab_id: Any, rows: PackedRows) -> PackedRows:
        part = jnp.sum(end_slabs <= slab_id)
        i = part // layout.banks
        offset, size = offsets[i], sizes[i]
        slab_of_part = slab_id - (end_slabs[part] - num_slabs[part])
        # The last slab may overlap the previous slab. It then writes the same values.
        start = jnp.minimum(begins[part] + slab_of_part * slab, last_start)
        local_ids = start + jnp.arange(slab, dtype=jnp.int32)
        row_ids = layout.undealt(local_ids) * stack.num_shards + shard - offset
        is_own = (row_ids >= 0) & (row_ids < size)
        values = values_of(i, jnp.clip(row_ids, 0, size - 1))
        # If the values were fused with the write, XLA:CPU would compute them on one
        # core, without vector instructions.
        stored = computed_apart(store_rows(values, layout))
        return merge_block(rows, start, stored, is_own)

    # One loop goes over the slabs of all tables. Between nested loops, XLA:TPU would
    # copy the rows, which are 6.5 GB per device for the tables of DLRM-DCNv2.
    return jax.lax.fori_loop(0, end_slabs[-1], fill_slab, rows)


def _rows_per_slab(layout: RowLayout) -> int:
    """Chooses how many rows a slab has. They fill whole lines, and fit in the shard."""
    # A row counts as whole lines, since XLA:TPU may pad short rows to whole tiles.
    row_bytes = LANE_BYTES * round_up(layout.dim, layout.tile_lanes or 1)
    shard_bytes = LANE_BYTES * layout.num_lines * layout.lanes_per_line
    slab_bytes = min(_MAX_SLAB_BYTES, shard_bytes // _SLABS_PER_TABLE)
    num_rows = max(_MIN_SLAB_BYTES, slab_bytes) // row_bytes
    num_rows = max(1, num_rows // layout.rows_per_line) * layout.rows_per_line
    return min(num_rows, layout.row_of(layout.num_lines))


def logical_values(
    table: TablePlan, stack: StackPlan, plan: EmbeddingPlan, key: jax.Array
) -> Float[Array, "rows dim"]:
    """Initializes a whole table as a global array, one contiguous block per shard."""
    initializer = table.config.initializer
    assert initializer is not None
    shape = (table.num_rows, stack.dim)
    key = _key_of_words(key, _words_of_name(table.name))
    values = initializer(key, shape, jnp.float32)
    check_values(values, shape, [table])
    # `_deal_rows` needs a block size that is a multiple of the number of shards.
    block = round_up(-(-shape[0] // stack.num_shards), stack.num_shards)
    values = jnp.pad(values, ((0, block * stack.num_shards - shape[0]), (0, 0)))
    return constrain(values, plan, stack.rows_spec)


def check_values(
    values: Any, shape: tuple[int, int], tables: Sequence[TablePlan]
) -> None:
    shape_of = getattr(values, "shape", None)
    dtype_of = getattr(values, "dtype", None)
    if shape_of != shape or dtype_of != jnp.float32:
        got = f"{shape_of} and {dtype_of}" if shape_of else describe_value(values)
        names = ", ".join(repr(table.name) for table in tables)
        text = (
            f"TableConfig.initializer must return an array of shape {shape} and dtype "
            f"float32, got {got} for table {names}. A function that makes initializers "
            "must be called: jax.nn.initializers.glorot_uniform()."
        )
        raise about(ValueError(text), "TableConfig.initializer", values)


def _words_of_name(name: str) -> UInt32[np.ndarray, " 3"]:
    # Python's own hash of a string differs between processes.
    digest = hashlib.sha256(name.encode()).digest()
    return np.frombuffer(digest, "<u4", count=3).astype(np.uint32)


def _key_of_words(key: jax.Array, words: UInt32[Any, " 3"]) -> jax.Array:
    # `fold_in` takes 32 bits at a time. A single call couldn't keep all names apart.
    for i in range(3):
        key = jax.random.fold_in(key, words[i])
    return key


def _deal_rows(
    rows: PackedRows,
    values: Float[Array, "block dim"],
    shift: Int[Array, ""],
    table: TablePlan,
    stack: StackPlan,
) -> PackedRows:
    """Sends the rows in one shard's contiguous block to their owners."""
    # Shard `s` owns the table's rows `r` with `(row_offset + r) % num_shards == s`. The
    # block size is a multiple of `num_shards`, so row `i * num_shards + j` has the same
    # owner in every block.
    num_shards = stack.num_shards
    owners = jnp.arange(num_shards, dtype=jnp.int32)
    first_of_owner = (owners - table.row_offset) % num_shards
    by_owner = values.reshape(-1, num_shards, stack.dim)[:, first_of_owner]
    received = by_owner.transpose(1, 0, 2)
    if num_shards > 1:
        received = jax.lax.all_to_all(
            received, stack.shard_axes, split_axis=0, concat_axis=0, tiled=True
        )
    received = received.reshape(-1, stack.dim)
    first_row = first_of_owner[jax.lax.axis_index(stack.shard_axes)]

    def values_of(i: Any, row_ids: Int[Array, " rows"]) -> Float[Array, "rows dim"]:
        del i
        # Clipped ids may belong to another shard, and then their values aren't written.
        positions = jnp.maximum(row_ids - first_row, 0) // num_shards
        return gather_in_bounds(received, positions)

    offset = jnp.asarray([table.row_offset], jnp.int32) - shift
    size = jnp.asarray([table.num_rows], jnp.int32)
    return _fill_slabs(rows, values_of, offset, size, stack)

"""Creates the initial values of tables, equal on any number of devices.

A table's values depend on the seed, the table's name and the row. They never depend on
the stack, the shards or the packing. The initializer is called once for the whole
table, with the table's own key and logical shape, and XLA computes one contiguous block
per shard. One all-to-all then sends each row to its owner.

The initializer sees float32, whatever the tables are stored in. Values of narrow tables
are rounded to the nearest numbers of their type.

The last bits of a value may still differ between programs, because XLA fuses the
initializer's arithmetic differently in each.
"""

import functools
import hashlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from tpu_embedding.initializers import truncated_normal_initializer
from tpu_embedding.plan.on_mesh import constrain, in_auto_axes, on_shards
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan, TablePlan
from tpu_embedding.rows.packed_rows import (
    PackedRows,
    pack_stored,
    round_up,
    store_rows,
)


@functools.partial(jax.jit, static_argnames="plan")
def init_tables(plan: EmbeddingPlan, key: jax.Array) -> dict[str, PackedRows]:
    """Returns the stacked tables with their initial values.

    Args:
      plan: plan of the embedding layer.
      key: typed JAX random key; the only source of randomness.

    Returns:
      Stack name to packed rows, sharded over the plan's mesh.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> sorted(te.init_tables(plan, jax.random.key(0)))
      ['stack_0']
    """

    def init(key: jax.Array) -> dict[str, PackedRows]:
        return {stack.name: _init_stack(stack, plan, key) for stack in plan.stacks}

    specs = {stack.name: stack.rows_spec for stack in plan.stacks}
    return in_auto_axes(init, plan, specs)(key)


def _init_stack(stack: StackPlan, plan: EmbeddingPlan, key: jax.Array) -> PackedRows:
    # Each table is written as a block of ceil(vocabulary_size / num_shards) rows, of
    # which a shard may own one fewer. A spare row keeps the last block in bounds.
    rows = jnp.zeros(
        (stack.num_shards * (stack.rows_per_shard + 1), stack.layout.row_lanes),
        stack.layout.stored_dtype,
    )
    rows = constrain(rows, plan, stack.rows_spec)
    for table in stack.tables:
        values = store_rows(_logical_values(table, stack, plan, key), stack.layout)
        rows = on_shards(
            lambda rows, values, table=table: _deal_rows(rows, values, table, stack),
            plan,
            in_specs=stack.rows_spec,
            out_specs=stack.rows_spec,
        )(rows, values)
    return on_shards(
        lambda rows: pack_stored(rows[:-1], stack.layout),
        plan,
        in_specs=stack.rows_spec,
        out_specs=stack.rows_spec,
    )(rows)


def _logical_values(
    table: TablePlan, stack: StackPlan, plan: EmbeddingPlan, key: jax.Array
) -> Float[Array, "rows dim"]:
    """Returns the table's values, split into one contiguous block per shard. Global."""
    config = table.config
    initializer = config.initializer or truncated_normal_initializer(config.dim)
    shape = (config.vocabulary_size, config.dim)
    key = _key_of_table(key, table.name)
    values = initializer(key, shape, jnp.float32)
    shape_of = getattr(values, "shape", None)
    dtype_of = getattr(values, "dtype", None)
    if shape_of != shape or dtype_of != jnp.float32:
        raise ValueError(
            "TableConfig.initializer must return an array of the shape and dtype it is "
            f"given, {shape} and float32, got {shape_of} and {dtype_of} for table "
            f"{table.name!r}."
        )
    block = round_up(-(-shape[0] // stack.num_shards), stack.num_shards)
    values = jnp.pad(values, ((0, block * stack.num_shards - shape[0]), (0, 0)))
    return constrain(values, plan, stack.rows_spec)


def _key_of_table(key: jax.Array, name: str) -> jax.Array:
    """Returns the table's random key, derived from a hash of its name."""
    digest = hashlib.sha256(name.encode()).digest()
    for start in (0, 4, 8):
        word = int.from_bytes(digest[start : start + 4], "little")
        key = jax.random.fold_in(key, word)
    return key


def _deal_rows(
    rows: Shaped[Array, "local_rows lanes"],
    values: Shaped[Array, "block lanes"],
    table: TablePlan,
    stack: StackPlan,
) -> Shaped[Array, "local_rows lanes"]:
    """Sends the rows of a contiguous block to their owners. Per shard.

    Shard `s` owns the table's rows `r` with `(row_offset + r) % num_shards == s`, and
    stores them next to each other. The block size is a multiple of the number of
    shards. Row `i * num_shards + j` of every block therefore has the same owner.

    Args:
      rows: this shard's rows of the stack, as they are stored.
      values: this shard's block of the table's rows, as they are stored.
      table: the table that is written.
      stack: the stack of the table.

    Returns:
      `rows`, with those of the table replaced.
    """
    num_shards = stack.num_shards
    owners = jnp.arange(num_shards, dtype=jnp.int32)
    first_of_owner = (owners - table.row_offset) % num_shards
    by_owner = values.reshape(-1, num_shards, rows.shape[1])[:, first_of_owner]
    received = by_owner.transpose(1, 0, 2)
    if num_shards > 1:
        received = jax.lax.all_to_all(
            received, stack.shard_axes, split_axis=0, concat_axis=0, tiled=True
        )
    max_rows = -(-table.config.vocabulary_size // num_shards)
    block = received.reshape(-1, rows.shape[1])[:max_rows]
    shard = jax.lax.axis_index(stack.shard_axes)
    first_row = (table.row_offset + first_of_owner[shard]) // num_shards
    return jax.lax.dynamic_update_slice(
        rows, block, (first_row, jnp.zeros_like(first_row))
    )

"""The program that swaps cached rows for rows from the host.

Each device reads `K` rows from its cache, then fills their slots with rows from the
host. Rows travel as records; see `records.py`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.host_rows.cached_rows import CachedRows, MappedRows
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.shard_map import on_shards
from tpu_embedding.rows.access import gather_rows, set_rows
from tpu_embedding.rows.packed_rows import RowLayout
from tpu_embedding.xla import read_before_write


@functools.cache
def swap_program(hardware: HardwareInfo) -> Any:
    return jax.jit(
        _swap_rows,
        static_argnames="plan",
        donate_argnums=(0, 1),
        # Without these options, TPUs scatter into packed rows on the TensorCore.
        compiler_options=dict(hardware.compiler_options),
    )


def _swap_rows(
    table: MappedRows,
    slots: Sequence[CachedRows],
    moves: Int[Array, " moves"],
    records: UInt32[Array, "rows words"],
    plan: EmbeddingPlan,
) -> tuple[MappedRows, list[CachedRows], UInt32[Array, "rows words"]]:
    """Swaps rows in place, and returns the previous records. Shapes are global.

    Per shard, `moves` has `3 * K` integers: the slots, the local rows that enter, and
    the local rows that leave. Each of these three parts is padded with
    `PADDING_ROW_ID`. `records` has one record per slot. The table and `slots` are
    donated.
    """
    spec = plan.sample_spec
    arrays = [table, *slots]

    def swap(arrays, moves, records):
        at, fetched, left = moves.reshape(3, -1)
        old = [gather_rows(rows, at) for rows in arrays]
        old, arrays = read_before_write((old, arrays))
        new, first = [], 0
        for rows in arrays:
            dim = rows.layout.dim
            # Narrow rows are bfloat16 here, because the placement rejects int8.
            num_words = -(-dim // 2) if rows.layout.narrow_dtype else dim
            words = records[:, first : first + num_words]
            values = _rows_of_words(words, rows.layout, rows.lines.dtype)
            changed = set_rows(rows, at, values)
            new.append(dataclasses.replace(changed, version=rows.version + 1))
            first += num_words
        words = [_words_of_rows(x, y.layout) for x, y in zip(old, arrays, strict=True)]
        table: MappedRows = arrays[0]
        slot_of_row = table.slot_of_row
        for row_ids, slot in ((left, jnp.full_like(at, -1)), (fetched, at)):
            slot_of_row = slot_of_row.at[row_ids].set(
                slot, mode="drop", wrap_negative_indices=False
            )
        new[0] = dataclasses.replace(new[0], slot_of_row=slot_of_row)
        return new, jnp.concatenate(words, axis=1)

    rows_spec = table.host.stack.rows_spec
    new, left = on_shards(
        swap, plan, in_specs=(rows_spec, spec, spec), out_specs=(rows_spec, spec)
    )(arrays, moves, records)
    return new[0], new[1:], left


def _words_of_rows(rows: Float[Array, "rows *row"], layout: RowLayout) -> Any:
    words = jax.lax.bitcast_convert_type(rows, jnp.uint32)
    words = words.reshape(words.shape[0], layout.dim)
    if layout.narrow_dtype is None:
        return words
    # bfloat16 rows were read as float32, so the upper half of each word has their bits.
    # Two elements then share a word, with the first in the lower half, as in
    # `words_of_file_rows`.
    words = jnp.pad(words >> 16, ((0, 0), (0, layout.dim % 2)))
    return words[:, ::2] | words[:, 1::2] << 16


def _rows_of_words(
    words: UInt32[Array, "rows words"], layout: RowLayout, dtype: Any
) -> Array:
    """Inverts `_words_of_rows`."""
    if layout.narrow_dtype is not None:
        pairs = jnp.stack([words << 16, words & jnp.uint32(0xFFFF0000)], axis=2)
        words = pairs.reshape(words.shape[0], -1)[:, : layout.dim]
        dtype = jnp.float32
    rows = jax.lax.bitcast_convert_type(words, dtype)
    return rows.reshape(-1, *layout.row_shape)

"""Sums the gradients of rows in blocks of ids that stay in a CPU's cache.

It replaces rounds, spread, exchange and merge where one CPU device owns all rows.
Sorted by row, the ids of a batch are cut into blocks of equal size. A block gathers the
cotangents of its ids and adds them up by row, without a buffer for all ids. XLA:CPU
gathers on all cores. It adds on one core, which is fast only within the cache. A train
step of 26 tables with 20,000 rows of 32, 4,096 samples and Adagrad takes 28 ms instead
of 51 ms on two cores.

A block is a round of the gradient: an update finishes its rows before the next block
begins. A row whose ids continue in the next block is finished there.
"""

import dataclasses
from collections.abc import Callable
from typing import Final, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.hardware import MEBIBYTE
from tpu_embedding.lookup._dedup import rank_unique
from tpu_embedding.lookup._sum_by_row import ReadCotangents
from tpu_embedding.rows.packed_rows import LANE_BYTES, RowLayout, round_up
from tpu_embedding.rows.row_gradients import GradientRounds, RowGradients
from tpu_embedding.types import PADDING_ROW_ID, RowRange

Carry = TypeVar("Carry")

_BLOCK_BYTES: Final = MEBIBYTE
"""Bytes of the rows of a block, so that a block and its gradients fit into a cache."""

_BLOCK_ALIGNMENT: Final = 128
"""The ids of a block are a multiple of this."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class IdBlocks:
    """The ids of a batch, sorted by row, in blocks of equal size. Per shard.

    Attributes:
      row_ids: int32 `[blocks, block_size]`, rising; padding last.
      order: int32 `[blocks, block_size]`, position of each id before sorting.
      ranks: int32 `[blocks, block_size]`, number of distinct rows before each id's.
    """

    row_ids: Int[Array, "blocks block_size"]
    order: Int[Array, "blocks block_size"]
    ranks: Int[Array, "blocks block_size"]


def sorted_blocks(
    keys: Int[Array, " ids"], dim: int, ids_per_block: int | None = None
) -> IdBlocks:
    """Sorts ids by row, and cuts them into blocks. Per shard.

    Args:
      keys: row of each id; `PADDING_ROW_ID` for an id without a row.
      dim: columns of the table.
      ids_per_block: ids of a block; None: as many as keep their rows in a cache.
    """
    (num_ids,) = keys.shape
    if ids_per_block is None:
        in_cache = _BLOCK_BYTES // (LANE_BYTES * dim)
        ids_per_block = max(1, min(in_cache, num_ids))
        ids_per_block = round_up(ids_per_block, _BLOCK_ALIGNMENT)
    (keys,), order, ranks = rank_unique(keys)
    missing = -num_ids % ids_per_block

    def cut(values: Int[Array, " ids"], fill: int) -> Int[Array, "blocks block_size"]:
        padded = jnp.pad(values, (0, missing), constant_values=fill)
        return padded.reshape(-1, ids_per_block)

    return IdBlocks(
        row_ids=cut(keys, PADDING_ROW_ID),
        order=cut(order, 0),
        ranks=cut(ranks, PADDING_ROW_ID),
    )


def gradient_blocks(
    blocks: IdBlocks, read_cotangents: ReadCotangents, layout: RowLayout
) -> GradientRounds:
    """Sums the gradients of one block after the other. Per shard.

    Args:
      blocks: from `sorted_blocks`.
      read_cotangents: reads the cotangents of ids.
      layout: packing of the table.
    """
    num_blocks, ids_per_block = blocks.row_ids.shape
    nothing = jnp.zeros((layout.dim,), jnp.float32)
    first, open_sum, end_row = _sum_block(
        jnp.int32(0), blocks, nothing, read_cotangents, layout
    )
    if num_blocks == 1:
        return GradientRounds(first=first)
    num_used = jnp.sum(blocks.row_ids != PADDING_ROW_ID, dtype=jnp.int32)

    def fold_later(
        body: Callable[[Carry, RowGradients, RowRange], Carry], carry: Carry
    ) -> Carry:
        def run(state):
            index, open_sum, first_row, carry = state
            gradients, open_sum, end_row = _sum_block(
                index, blocks, open_sum, read_cotangents, layout
            )
            carry = body(carry, gradients, RowRange(first_row, end_row))
            return index + 1, open_sum, end_row, carry

        state = (jnp.int32(1), open_sum, end_row, carry)
        return jax.lax.while_loop(
            lambda state: state[0] * ids_per_block < num_used, run, state
        )[-1]

    return GradientRounds(
        first=first, first_rows=RowRange(jnp.int32(0), end_row), fold_later=fold_later
    )


def _sum_block(
    index: Int[Array, ""],
    blocks: IdBlocks,
    open_sum: Float[Array, " dim"],
    read_cotangents: ReadCotangents,
    layout: RowLayout,
) -> tuple[RowGradients, Float[Array, " dim"], Int[Array, ""]]:
    """Sums the gradients of one block.

    Args:
      index: number of the block.
      blocks: all of them.
      open_sum: what earlier blocks add to the first row of this one.
      read_cotangents: reads the cotangents of ids.
      layout: packing of the table.

    Returns:
      The gradients of finished rows, the sum of a row that continues in the next block,
      and the first row that is not finished.
    """
    num_blocks, ids_per_block = blocks.row_ids.shape
    ids, ranks = blocks.row_ids[index], blocks.ranks[index]
    positions = ranks - ranks[0]
    sums = jnp.zeros((ids_per_block, layout.dim), jnp.float32).at[0].set(open_sum)
    sums = sums.at[positions].add(
        read_cotangents(blocks.order[index]),
        mode="drop",
        indices_are_sorted=True,
        wrap_negative_indices=False,
    )
    row_ids = jnp.full((ids_per_block,), PADDING_ROW_ID, jnp.int32)
    row_ids = row_ids.at[positions].set(ids, mode="drop", wrap_negative_indices=False)
    next_id = blocks.row_ids[jnp.minimum(index + 1, num_blocks - 1), 0]
    next_id = jnp.where(index + 1 < num_blocks, next_id, PADDING_ROW_ID)
    continues = (next_id == ids[-1]) & (next_id != PADDING_ROW_ID)
    last = positions[-1]
    is_open = continues & (jnp.arange(ids_per_block, dtype=jnp.int32) == last)
    gradients = RowGradients(
        row_ids=jnp.where(is_open, PADDING_ROW_ID, row_ids),
        values=sums,
    )
    # If padding ends the block, its position is beyond all rows; the sum is not used.
    open_sum = jnp.where(continues, sums[jnp.minimum(last, ids_per_block - 1)], 0.0)
    return gradients, open_sum, jnp.minimum(next_id, layout.num_rows)

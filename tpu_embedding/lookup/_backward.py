"""The backward pass of one stack on one shard: turns cotangents into gradients.

A gradient is kept as routing and cotangents, on the devices that have its samples. So
gradients can be added exactly, by joining their samples. `gradient_rounds` brings a
gradient to the owners of its rows, in three stages. First, the source sums cotangents
by row (spread). Then it sends the sums (exchange). Then the owner adds the sums from
all sources (merge). The gradient also holds what the owners received in round 1, so
that a norm and the update after it share one exchange.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tpu_embedding.hardware import MEBIBYTE
from tpu_embedding.lookup._forward import (
    PoolingSpec,
    StackRouting,
    scale_samples,
    sent_ids,
)
from tpu_embedding.lookup._rounds import (
    Round,
    SentIds,
    exchange,
    fold_later_rounds,
    gather_from_replicas,
    rank_unique,
    unsort,
)
from tpu_embedding.optimizers.row_optimizer import InSequence, Touched
from tpu_embedding.plan.capacity import LANES
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.access import Parts, gather_lines
from tpu_embedding.rows.packed_rows import (
    LANE_BYTES,
    gather_in_bounds,
    round_up,
)
from tpu_embedding.rows.row_gradients import RowGradients, Sealed, seal
from tpu_embedding.types import PADDING_ROW_ID, RowRange
from tpu_embedding.xla import forward_fill

_MAX_CHUNKS: Final = 8
"""Maximum loop iterations in `_add_repeats`, reached if almost all ids are repeats."""

_MIN_CHUNK_SIZE: Final = 8 * LANES
"""Minimum repeats per iteration, so that small batches need only one iteration."""

_BLOCK_BYTES: Final = MEBIBYTE
"""Bytes of the rows in a block. Rows and gradients of this size fit in a cache."""

_BLOCK_ALIGNMENT: Final = 128
"""Blocks hold a multiple of this many ids."""

ReadCotangents = Callable[[Int[Array, " n"]], Float[Array, "n dim"]]
"""Gathers a cotangent per id, multiplied by the id's gain and its sample's scale."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class IdBlocks:
    """Ids sorted by row, padding last, in blocks of equal size.

    Attributes:
      order: positions before sorting.
      ranks: number of distinct smaller row ids, counted over all blocks.
    """

    row_ids: Int[Array, "blocks block_size"]
    order: Int[Array, "blocks block_size"]
    ranks: Int[Array, "blocks block_size"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StackGradient:
    """The gradient of a stacked table, on the shards that have its samples.

    Attributes:
      blocks: set if one CPU device owns all rows; else None.
      first: what the owners received in round 1. None if `blocks` is set, or if the
        backend replaces the update.
      is_partial: `[1]`, True if the backend could not look up all ids. None if
        programs have a fallback for that case. In a gradient of zeros, it is False.
    """

    routing: StackRouting
    cotangents: list[Float[Array, "_ dim"]]
    blocks: IdBlocks | None
    first: RowGradients | None
    is_partial: Bool[Array, "_"] | None

    def seal(self) -> Sealed:
        """Protects leaves from arithmetic, unless they scale with the gradient."""
        return seal(self, linear_fields=("cotangents", "values"))


def stack_gradient(
    routing: StackRouting,
    cotangents: Sequence[Float[Array, "_ dim"]],
    stack: StackPlan,
) -> Sealed:
    """Builds a sealed `StackGradient` from the loss derivatives of each feature."""
    blocks, first = None, None
    if stack.updates == "blocks":
        blocks = sorted_blocks(routing.keys, stack.dim)
    elif not stack.backend.replaces_update:
        sent = sent_ids(routing, stack)
        reader = cotangent_reader(cotangents, routing.poolings)
        first = _receive(sent.first, sent, reader, stack)
        routing = dataclasses.replace(routing, sent=sent)
    is_partial = None
    if stack.backend.must_run_all:
        is_partial = ~routing.backend_ids.fits
    gradient = StackGradient(
        routing=routing,
        cotangents=list(cotangents),
        blocks=blocks,
        first=first,
        is_partial=is_partial,
    )
    return gradient.seal()


def scale_gradient(gradient: Sealed, factor: Any) -> Sealed:
    """Scales the cotangents, and the sums that the owners already received."""
    old, factor = gradient.open(), jnp.asarray(factor, jnp.float32)
    new = dataclasses.replace(
        old,
        cotangents=[cotangent * factor for cotangent in old.cotangents],
        first=None if old.first is None else old.first.scaled(factor),
    )
    return new.seal()


def join_gradients(gradients: Sequence[Sealed], stack: StackPlan) -> Sealed:
    """Adds gradients by joining their samples into one batch."""
    # The sum then has each touched row once, as after a single lookup of all ids. The
    # ids cross the network again for this.
    opened = [gradient.open() for gradient in gradients]
    routings = [gradient.routing for gradient in opened]
    max_unique_ids = sum(routing.max_unique_ids for routing in routings)
    if not stack.keeps_duplicates:
        max_unique_ids = min(max_unique_ids, stack.num_rows)
    keys = jnp.concatenate([routing.keys for routing in routings])
    poolings = [pooling for routing in routings for pooling in routing.poolings]
    backend_ids = None
    if stack.backend.replaces_update:
        backend_ids = stack.backend.prepare_ids(keys, poolings, stack, are_joined=True)
    joined = StackRouting(
        keys=keys,
        sent=None,
        backend_ids=backend_ids,
        poolings=poolings,
        out_of_range=[n for routing in routings for n in routing.out_of_range],
        max_unique_ids=max_unique_ids,
    )
    cotangents = [array for gradient in opened for array in gradient.cotangents]
    total = stack_gradient(joined, cotangents, stack)
    if not stack.backend.must_run_all:
        return total
    # The update has a fallback for joined ids, but the lookups before it had none.
    is_partial = functools.reduce(jnp.logical_or, (x.is_partial for x in opened))
    return dataclasses.replace(total.open(), is_partial=is_partial).seal()


def gradient_rounds(gradient: Sealed, stack: StackPlan) -> Parts:
    """Brings a gradient to the owners of its rows, round by round."""
    opened = gradient.open()
    read_cotangents = cotangent_reader(opened.cotangents, opened.routing.poolings)
    if opened.blocks is not None:
        return gradient_blocks(opened.blocks, read_cotangents, stack.dim)
    sent, first = sent_ids(opened.routing, stack), opened.first
    if first is None:
        # The backend replaces the update, but can't run this step.
        first = _receive(sent.first, sent, read_cotangents, stack)
    if sent.size.holds_all:
        return Parts(first)
    end_of_first = sent.first.end_row[0]
    first = dataclasses.replace(first, covered=RowRange(jnp.int32(0), end_of_first))

    # Later rounds send their ids again, since keeping the received ids would use memory
    # in every step.
    def fold_later(body: Callable[[Any, RowGradients], Any], carry: Any) -> Any:
        def run_round(state: tuple[Any, Array], current: Round) -> tuple[Any, Array]:
            so_far, first_row = state
            end_row = current.end_row[0]
            received = dataclasses.replace(
                _receive(current, sent, read_cotangents, stack),
                covered=RowRange(first_row, end_row),
            )
            return body(so_far, received), end_row

        state = (carry, end_of_first)
        (result, _), _ = fold_later_rounds(run_round, state, sent, stack)
        return result

    return Parts(first, fold_later)


def _receive(
    current: Round,
    sent: SentIds,
    read_cotangents: ReadCotangents,
    stack: StackPlan,
) -> RowGradients:
    """Sums a round's cotangents by row: at the source, and again at the owner."""
    order, positions = sent.unique.order, current.buffer_positions
    by_row = spread(read_cotangents, order, positions, sent.size.buffer_size)
    received = RowGradients(row_ids=current.requests, values=exchange(by_row, stack))
    received = gather_from_replicas(received, stack)
    row_ids = received.row_ids
    match stack.optimizer.driver:
        case InSequence():
            return received
        case Touched(occurrence_norm=True):
            max_rows = min(row_ids.shape[0], stack.rows_per_shard)
            return dataclasses.replace(
                merge(row_ids, received.values, max_rows),
                occurrences=received.as_row_updates(),
            )
    if stack.num_devices == 1:
        # `spread` has already summed all occurrences of a row.
        return received
    max_rows = min(stack.num_replicas * sent.size.unique_rows, stack.rows_per_shard)
    return merge(row_ids, received.values, max_rows)


@jax.named_scope("spread")
def spread(
    read_cotangents: ReadCotangents,
    order: Int[Array, " ids"],
    positions: Int[Array, " ids"],
    buffer_size: int,
) -> Float[Array, "buffer dim"]:
    """Sums cotangents by row in the exchange buffer. Unused entries are undefined.

    Args:
      order: positions before sorting by row.
      positions: buffer position of each sorted id's row, or `buffer_size` if the id is
        not in this round.
    """
    # Each sum starts as the cotangent of the row's first occurrence. This avoids a
    # buffer of zeros, and leaves only repeats to scatter.
    is_first = jnp.diff(positions, prepend=-1) != 0
    first_ids = jnp.zeros((buffer_size,), jnp.int32)
    first_ids = first_ids.at[jnp.where(is_first, positions, buffer_size)].set(
        order, mode="drop", wrap_negative_indices=False
    )
    return _add_repeats(
        read_cotangents(first_ids),
        ~is_first & (positions < buffer_size),
        positions=positions,
        value_ids=order,
        read_values=lambda _, ids: read_cotangents(ids),
    )


def cotangent_reader(
    cotangents: Sequence[Float[Array, "_ dim"]],
    poolings: Sequence[PoolingSpec],
) -> ReadCotangents:
    """Builds the function that gathers cotangents for ids."""
    samples = jnp.concatenate(scale_samples(cotangents, poolings))
    sample_ids = None
    if any(p.sample_ids is not None or p.valence != 1 for p in poolings):
        sizes = [pooling.num_samples for pooling in poolings]
        firsts = itertools.accumulate(sizes[:-1], initial=0)
        sample_ids = jnp.concatenate(
            [
                pooling.samples_of_ids(functools.partial(jnp.add, first))
                for pooling, first in zip(poolings, firsts, strict=True)
            ]
        )
    gains = gain_of_each_id(poolings)

    def read_cotangents(ids: Int[Array, " n"]) -> Float[Array, "n dim"]:
        sample = ids if sample_ids is None else gather_in_bounds(sample_ids, ids)
        rows = gather_lines(samples, sample)
        return rows if gains is None else rows * gather_in_bounds(gains, ids)[:, None]

    return read_cotangents


def gain_of_each_id(
    poolings: Sequence[PoolingSpec],
) -> Float[Array, " all_ids"] | None:
    """Joins the gains of all features. None means that all gains are 1."""
    if all(pooling.gains is None for pooling in poolings):
        return None
    return jnp.concatenate(
        [
            jnp.ones((p.num_ids,), jnp.float32) if p.gains is None else p.gains
            for p in poolings
        ]
    )


@jax.named_scope("merge")
def merge(
    row_ids: Int[Array, " buffer"],
    gradients: Float[Array, "buffer dim"],
    num_rows: int,
) -> RowGradients:
    """Sums the gradients of equal rows, without communication.

    There may be at most `num_rows` distinct rows. In the result, each row appears once,
    in any order, and unused positions are padding.
    """
    if 2 * num_rows <= row_ids.shape[0]:
        return _merge_few_rows(row_ids, gradients, num_rows)
    # This works as in `spread`, except that first occurrences are already in place.
    (sorted_ids,), order, ranks = rank_unique(row_ids)
    is_first = jnp.diff(ranks, prepend=-1) > 0
    is_repeat = ~is_first & (sorted_ids != PADDING_ROW_ID)
    sums = _add_repeats(
        gradients,
        is_repeat,
        positions=forward_fill(jnp.where(is_first, order, -1)),
        value_ids=order,
        # Only first occurrences change, so repeats still hold the received values.
        read_values=gather_lines,
    )
    unique_ids = unsort(jnp.where(is_repeat, PADDING_ROW_ID, sorted_ids), order)
    return RowGradients(row_ids=unique_ids, values=sums)


def _merge_few_rows(
    row_ids: Int[Array, " buffer"],
    gradients: Float[Array, "buffer dim"],
    num_rows: int,
) -> RowGradients:
    """Sums gradients into a new buffer, at most half as long as the received one."""
    (sorted_ids,), order, ranks = rank_unique(row_ids)
    ranks = jnp.where(sorted_ids == PADDING_ROW_ID, num_rows, ranks)
    unique_ids = jnp.full((num_rows,), PADDING_ROW_ID, jnp.int32)
    sums = jnp.zeros((num_rows, gradients.shape[1]), gradients.dtype)
    sums = sums.at[unsort(ranks, order)].add(
        gradients, mode="drop", wrap_negative_indices=False
    )
    return RowGradients(
        row_ids=unique_ids.at[ranks].set(
            sorted_ids, mode="drop", wrap_negative_indices=False
        ),
        values=sums,
    )


def _add_repeats(
    sums: Float[Array, "rows dim"],
    is_repeat: Bool[Array, " n"],
    positions: Int[Array, " n"],
    value_ids: Int[Array, " n"],
    read_values: Callable[[Array, Int[Array, " chunk"]], Float[Array, "chunk dim"]],
) -> Float[Array, "rows dim"]:
    """Adds repeats to the sums of their rows, in place.

    Args:
      sums: initial sums, equal to the values of first occurrences.
      is_repeat: True for repeats. Occurrences may be in any order.
      positions: position in `sums` for each occurrence.
      read_values: maps the current sums and a chunk of `value_ids` to values.
    """
    num_positions = sums.shape[0]
    num_occurrences = is_repeat.shape[0]
    num_repeats = jnp.sum(is_repeat, dtype=jnp.int32)
    chunk_size = round_up(-(-num_occurrences // _MAX_CHUNKS), LANES)
    chunk_size = min(max(chunk_size, _MIN_CHUNK_SIZE), num_occurrences)
    # A sort moves repeats to the front, because a TPU scatters single integers slowly.
    positions, value_ids = jax.lax.sort(
        (jnp.where(is_repeat, positions, num_positions), value_ids),
        num_keys=1,
        is_stable=False,
    )
    # Without the padding, `dynamic_slice` would shift the last chunk to earlier
    # repeats, which would then be added twice.
    positions = jnp.pad(positions, (0, chunk_size), constant_values=num_positions)
    value_ids = jnp.pad(value_ids, (0, chunk_size))

    def add_chunk(carry):
        start, sums = carry
        chunk_ids = jax.lax.dynamic_slice_in_dim(value_ids, start, chunk_size)
        rows = jax.lax.dynamic_slice_in_dim(positions, start, chunk_size)
        values = read_values(sums, chunk_ids)
        sums = sums.at[rows].add(
            values, mode="drop", indices_are_sorted=True, wrap_negative_indices=False
        )
        return start + chunk_size, sums

    _, sums = jax.lax.while_loop(
        lambda carry: carry[0] < num_repeats, add_chunk, (jnp.int32(0), sums)
    )
    return sums


def sorted_blocks(
    keys: Int[Array, " ids"], dim: int, ids_per_block: int | None = None
) -> IdBlocks:
    """Sorts ids by row, and cuts them into blocks whose rows fit in a cache."""
    (num_ids,) = keys.shape
    if ids_per_block is None:
        in_cache = _BLOCK_BYTES // (LANE_BYTES * dim)
        ids_per_block = max(1, min(in_cache, num_ids))
        ids_per_block = round_up(ids_per_block, _BLOCK_ALIGNMENT)
    (row_ids,), order, ranks = rank_unique(keys)
    missing = -num_ids % ids_per_block

    def cut(values: Int[Array, " ids"], fill: int) -> Int[Array, "blocks block_size"]:
        padded = jnp.pad(values, (0, missing), constant_values=fill)
        return padded.reshape(-1, ids_per_block)

    return IdBlocks(
        row_ids=cut(row_ids, PADDING_ROW_ID),
        # Positions that fill up the last block read an arbitrary cotangent. Their rank
        # is past the end of all sums, so this cotangent is dropped.
        order=cut(order, 0),
        ranks=cut(ranks, PADDING_ROW_ID),
    )


def gradient_blocks(
    blocks: IdBlocks, read_cotangents: ReadCotangents, dim: int
) -> Parts:
    """Sums gradients block by block, when one CPU device owns all rows."""
    # XLA:CPU gathers on all cores but adds on one core, which is fast only within the
    # cache. For 26 tables with 20,000 rows of 32 values, an Adagrad step with 4,096
    # samples takes 28 ms with blocks and 51 ms without, on two cores.
    num_blocks, ids_per_block = blocks.row_ids.shape
    nothing = jnp.zeros((dim,), jnp.float32)
    first, open_sum = _sum_block(jnp.int32(0), nothing, blocks, read_cotangents)
    if num_blocks == 1:
        return Parts(first)
    num_used = jnp.sum(blocks.row_ids != PADDING_ROW_ID, dtype=jnp.int32)

    def fold_later(body: Callable[[Any, RowGradients], Any], carry: Any) -> Any:
        def has_ids(state: tuple[Array, Array, Any]) -> Bool[Array, ""]:
            index, *_ = state
            return index * ids_per_block < num_used

        def run_block(state: tuple[Array, Array, Any]) -> tuple[Array, Array, Any]:
            index, open_sum, so_far = state
            gradients, open_sum = _sum_block(index, open_sum, blocks, read_cotangents)
            return index + 1, open_sum, body(so_far, gradients)

        # `first` is block 0. The last used block leaves no row open.
        state = (jnp.int32(1), open_sum, carry)
        return jax.lax.while_loop(has_ids, run_block, state)[2]

    return Parts(first, fold_later)


def _sum_block(
    index: Int[Array, ""],
    open_sum: Float[Array, " dim"],
    blocks: IdBlocks,
    read_cotangents: ReadCotangents,
) -> tuple[RowGradients, Float[Array, " dim"]]:
    """Sums a block's gradients, except for a row that continues in the next block.

    `open_sum` is the first row's sum from earlier blocks. The new `open_sum` is the
    last row's sum for the next block.
    """
    num_blocks, ids_per_block = blocks.row_ids.shape
    ids, ranks = blocks.row_ids[index], blocks.ranks[index]
    positions = ranks - ranks[0]
    sums = jnp.zeros((ids_per_block, open_sum.shape[0]), jnp.float32)
    sums = sums.at[0].set(open_sum)
    sums = sums.at[positions].add(
        read_cotangents(blocks.order[index]),
        mode="drop",
        indices_are_sorted=True,
        wrap_negative_indices=False,
    )
    row_ids = jnp.full((ids_per_block,), PADDING_ROW_ID, jnp.int32)
    row_ids = row_ids.at[positions].set(ids, mode="drop", wrap_negative_indices=False)
    # A rule needs the whole gradient of a row, so a row that continues in the next
    # block is finished there.
    next_id = blocks.row_ids[jnp.minimum(index + 1, num_blocks - 1), 0]
    next_id = jnp.where(index + 1 < num_blocks, next_id, PADDING_ROW_ID)
    continues = (next_id == ids[-1]) & (next_id != PADDING_ROW_ID)
    last = positions[-1]
    is_open = continues & (jnp.arange(ids_per_block, dtype=jnp.int32) == last)
    gradients = RowGradients(
        row_ids=jnp.where(is_open, PADDING_ROW_ID, row_ids), values=sums
    )
    # In a block that ends with padding, `last` is past all sums, but then `continues`
    # is False.
    open_sum = jnp.where(continues, sums[jnp.minimum(last, ids_per_block - 1)], 0.0)
    return gradients, open_sum

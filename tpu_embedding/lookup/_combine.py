"""Stages 5 and 6: rows to activations, and cotangents back to rows.

`combine` and `spread` are each other's transpose: both are the sparse matrix
`[samples, places]` of the gains, times the scales of the samples.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._dedup import unsort
from tpu_embedding.lookup._flatten import PoolingSpec
from tpu_embedding.lookup._repeats import add_repeats
from tpu_embedding.lookup._route import IdsByRow
from tpu_embedding.lookup._running import running_sum
from tpu_embedding.lookup._sample_lines import sample_lines
from tpu_embedding.rows.kernels.kernel_bodies import DROPPED_ROW
from tpu_embedding.rows.kernels.row_kernels import ID_ALIGNMENT, write_rows
from tpu_embedding.rows.packed_rows import (
    PackedRows,
    RowLayout,
    clear_last_row,
    concatenate_rows,
    gather_in_bounds,
    gather_packed,
    gather_rows,
    gather_sums,
    round_up,
    scale_rows,
    unpack_rows,
)

_MAX_SLICES: Final = 128
"""Ids of a sample up to which each is an addition of its own in the program."""


def combine(
    rows: PackedRows,
    places: Int[Array, " all_ids"],
    bags: Sequence[PoolingSpec],
) -> list[Float[Array, "_ dim"]]:
    """Sums gain-weighted rows into their samples. Per shard; no communication.

    Args:
      rows: rows in the exchange buffer.
      places: place of each id's row in it; beyond the end where there is none: the
        last place of the buffer, which is no id's, is read for these.
      bags: the features of the stack.

    Returns:
      Float32 activations per feature. Samples without ids are zero.
    """
    # The last place is never an id's; reading it needs no mask on what is read.
    rows = clear_last_row(rows)
    lines = sample_lines(bags, rows.layout)
    valences = [_valence_in_kernel(bag) for bag in bags]
    left = [
        dataclasses.replace(bag, valence=bag.valence // valence)
        for bag, valence in zip(bags, valences, strict=True)
    ]
    if lines is not None:
        sums = lines.gather(rows, places, _num_ids(left), valences)
        pooled = [
            lines.unpack(
                _pool(bag, x, None if bag.gains is None else lines.gains(bag.gains))
            )
            for bag, x in zip(left, sums, strict=True)
        ]
        return _scale(pooled, bags)
    sums = gather_sums(rows, places, _num_ids(left), valences)
    if sums is None:
        # One gather for all features: a TPU starts and compiles it faster than many.
        sums = _split(gather_rows(rows, places), _num_ids(bags))
        left = bags
    pooled = [
        _pool(bag, x, None if bag.gains is None else bag.gains[:, None])
        for bag, x in zip(left, sums, strict=True)
    ]
    return _scale(pooled, bags)


def _scale(
    of_samples: Sequence[Float[Array, "_ dim"]], bags: Sequence[PoolingSpec]
) -> list[Float[Array, "_ dim"]]:
    """Normalises what is of samples as their combiners do."""
    return [
        x if bag.scales is None else x * bag.scales[:, None]
        for x, bag in zip(of_samples, bags, strict=True)
    ]


def _valence_in_kernel(bag: PoolingSpec) -> int:
    """Returns how many rows of a sample a kernel sums: all, if none has a weight."""
    is_plain = bag.sample_ids is None and bag.gains is None
    return max(1, bag.valence) if is_plain else 1


def _pool(
    bag: PoolingSpec, rows: Float[Array, "ids _"], gains: Float[Array, "ids _"] | None
) -> Float[Array, "samples _"]:
    """Sums the rows of each sample, times their gains; or lines of rows."""
    if gains is not None:
        rows = rows * gains
    if bag.sample_ids is not None:
        return jax.ops.segment_sum(
            rows, bag.sample_ids, bag.num_samples, indices_are_sorted=True
        )
    if bag.valence == 1:
        return rows
    if bag.valence > _MAX_SLICES:
        return rows.reshape(bag.valence, -1, rows.shape[1]).sum(axis=0)
    # Slices are added where they lie; a reduction would have them copied out first.
    return functools.reduce(jnp.add, jnp.split(rows, bag.valence))


def spread(
    cotangents: Sequence[Float[Array, "_ dim"]],
    uses: IdsByRow,
    bags: Sequence[PoolingSpec],
    layout: RowLayout,
) -> PackedRows:
    """Sums the cotangents of all samples that used a row. Per shard.

    Args:
      cotangents: per feature of the stack.
      uses: the ids of each row.
      bags: the features of the stack.
      layout: of the exchange buffer.

    Returns:
      The gradient of each row in the exchange buffer; anything in unused places.
    """
    cotangents = _scale(cotangents, bags)
    sources = _sources_of_kernel(cotangents, bags, layout)
    if sources is not None:
        return _spread_by_kernel(sources, uses, bags, layout)
    buffer_size = layout.num_rows
    num_samples = sum(bag.num_samples for bag in bags)
    lines = sample_lines(bags, layout)
    if lines is None:
        of_samples = concatenate_rows(cotangents, layout.buffer_layout(num_samples))
    else:
        of_samples = lines.pack(cotangents)
    samples, gains = _samples_of_ids(bags), _gains_of_ids(bags)

    def of_ids(ids: Int[Array, " n"]) -> PackedRows:
        sample = ids if samples is None else gather_in_bounds(samples, ids)
        place = sample if lines is None else lines.place_of(sample)
        rows = gather_packed(of_samples, place)
        return rows if gains is None else scale_rows(rows, gather_in_bounds(gains, ids))

    is_first = jnp.diff(uses.places, prepend=-1) != 0
    first_ids = jnp.zeros((buffer_size,), jnp.int32)
    first_ids = first_ids.at[jnp.where(is_first, uses.places, buffer_size)].set(
        uses.order, mode="drop", wrap_negative_indices=False
    )
    return add_repeats(
        of_ids(first_ids),
        ~is_first & (uses.places < buffer_size),
        places=uses.places,
        occurrences=uses.order,
        values_of=lambda _, ids: unpack_rows(of_ids(ids)),
    )


def _sources_of_kernel(
    cotangents: Sequence[Float[Array, "_ dim"]],
    bags: Sequence[PoolingSpec],
    layout: RowLayout,
) -> list[Float[Array, "_ lanes"]] | None:
    """Returns the cotangents in lines for `write_rows`; None where it cannot be used.

    It can where all samples of a feature have equally many ids, none has a weight, and
    samples fill tiles and lines.
    """
    if layout.runner is None or any(
        bag.sample_ids is not None
        or bag.gains is not None
        or bag.valence == 0
        or bag.num_samples == 0
        or bag.num_samples % ID_ALIGNMENT
        for bag in bags
    ):
        return None
    if layout.rows_per_line == 1:
        return list(cotangents)
    lines = sample_lines(bags, layout)
    return None if lines is None else [lines.lines_of(x) for x in cotangents]


def _spread_by_kernel(
    sources: Sequence[Float[Array, "_ lanes"]],
    uses: IdsByRow,
    bags: Sequence[PoolingSpec],
    layout: RowLayout,
) -> PackedRows:
    """Spreads with a kernel that writes each cotangent where it belongs.

    That is the place of its row in the buffer for the first use of a row; further uses
    are put aside, and added.
    """
    assert layout.runner is not None
    buffer_size = layout.num_rows
    aside = layout.buffer_layout(
        round_up(uses.order.shape[0], ID_ALIGNMENT * layout.rows_per_line)
    )
    is_used = uses.places < buffer_size
    is_new = jnp.diff(uses.places, prepend=-1) != 0
    is_repeat = is_used & ~is_new
    repeats = jnp.maximum(running_sum(is_repeat.astype(jnp.int32)) - 1, 0)
    place = jnp.where(is_repeat, buffer_size + repeats, uses.places)
    place = unsort(jnp.where(is_used, place, DROPPED_ROW), uses.order)
    sums, values_aside = write_rows(
        sources,
        [bag.valence for bag in bags],
        [
            jnp.where(place < buffer_size, place, DROPPED_ROW),
            jnp.where(place < buffer_size, DROPPED_ROW, place - buffer_size),
        ],
        [buffer_size, aside.num_rows],
        layout.dim,
        layout.runner,
    )
    packed_aside = PackedRows(lines=values_aside, layout=aside)
    return add_repeats(
        PackedRows(lines=sums, layout=layout),
        is_repeat,
        places=uses.places,
        occurrences=repeats,
        values_of=lambda _, repeats: gather_rows(packed_aside, repeats),
    )


def _samples_of_ids(bags: Sequence[PoolingSpec]) -> Int[Array, " all_ids"] | None:
    """Numbers the samples of all features; None where each has one id, in order."""
    if all(bag.sample_ids is None and bag.valence == 1 for bag in bags):
        return None
    samples, first = [], 0
    for bag in bags:
        of_bag = bag.sample_ids
        if of_bag is None:
            of_bag = jnp.tile(jnp.arange(bag.num_samples), bag.valence)
        # Unused ids have the number after the last; no row is theirs.
        samples.append(first + jnp.minimum(of_bag, bag.num_samples - 1))
        first += bag.num_samples
    return jnp.concatenate(samples)


def _gains_of_ids(bags: Sequence[PoolingSpec]) -> Float[Array, " all_ids"] | None:
    if all(bag.gains is None for bag in bags):
        return None
    return jnp.concatenate(
        [
            jnp.ones((size,), jnp.float32) if bag.gains is None else bag.gains
            for bag, size in zip(bags, _num_ids(bags), strict=True)
        ]
    )


def _split(rows: Float[Array, "_ _"], sizes: list[int]) -> list[Float[Array, "_ _"]]:
    return jnp.split(rows, list(itertools.accumulate(sizes))[:-1])


def _num_ids(bags: Sequence[PoolingSpec]) -> list[int]:
    return [
        bag.num_samples * bag.valence
        if bag.sample_ids is None
        else bag.sample_ids.shape[0]
        for bag in bags
    ]

"""Stage 6, spread: cotangents are summed into the rows that their samples used.

The transpose of `combine`: each id adds its sample's cotangent, times gain and scale,
to the gradient of its row in the exchange buffer.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._combine import scale_samples
from tpu_embedding.lookup._dedup import unsort
from tpu_embedding.lookup._flatten_to_owners import PoolingSpec
from tpu_embedding.lookup._repeats import add_repeats
from tpu_embedding.lookup._route import IdsByRow
from tpu_embedding.lookup._running_sums import running_sum
from tpu_embedding.lookup._sample_lines import sample_lines
from tpu_embedding.plan.backends import BatchBackends
from tpu_embedding.rows.access import gather_packed, gather_rows
from tpu_embedding.rows.kernels.kernel_limits import ID_ALIGNMENT
from tpu_embedding.rows.packed_rows import (
    PackedRows,
    RowLayout,
    concatenate_rows,
    gather_in_bounds,
    round_up,
    scale_rows,
    unpack_rows,
)


@jax.named_scope("spread")
def spread(
    cotangents: Sequence[Float[Array, "_ dim"]],
    ids_by_row: IdsByRow,
    poolings: Sequence[PoolingSpec],
    layout: RowLayout,
    backends: BatchBackends,
) -> PackedRows:
    """Sums the cotangents of all samples that used a row. Per shard; no communication.

    Args:
      cotangents: per feature of the stack.
      ids_by_row: the ids of each row.
      poolings: the features of the stack.
      layout: packing of the exchange buffer.
      backends: the choice for this batch.

    Returns:
      The gradient of each row of the exchange buffer. Unused places hold anything.
    """
    if backends.spread.backend == "xla":
        cotangents_of = cotangent_reader(cotangents, poolings, layout, backends)
        return _spread_by_xla(cotangents_of, ids_by_row, layout.num_rows)
    cotangents = scale_samples(cotangents, poolings)
    return _spread_by_kernel(cotangents, ids_by_row, poolings, layout, backends)


def _spread_by_xla(
    cotangents_of: Callable[[Int[Array, " n"]], PackedRows],
    ids_by_row: IdsByRow,
    buffer_size: int,
) -> PackedRows:
    """Gathers the cotangent of each row's first id, and adds those of its repeats."""
    places = ids_by_row.places
    is_first = jnp.diff(places, prepend=-1) != 0
    first_ids = jnp.zeros((buffer_size,), jnp.int32)
    first_ids = first_ids.at[jnp.where(is_first, places, buffer_size)].set(
        ids_by_row.order, mode="drop", wrap_negative_indices=False
    )
    return add_repeats(
        cotangents_of(first_ids),
        ~is_first & (places < buffer_size),
        places=places,
        value_ids=ids_by_row.order,
        read_values=lambda _, ids: unpack_rows(cotangents_of(ids)),
    )


def cotangent_reader(
    cotangents: Sequence[Float[Array, "_ dim"]],
    poolings: Sequence[PoolingSpec],
    layout: RowLayout,
    backends: BatchBackends,
) -> Callable[[Int[Array, " n"]], PackedRows]:
    """Returns a function that gathers the cotangents of ids, times gain and scale.

    Args:
      cotangents: per feature of the stack.
      poolings: the features of the stack.
      layout: packing of the exchange buffer.
      backends: the choice for this batch.
    """
    cotangents = scale_samples(cotangents, poolings)
    num_samples = sum(pooling.num_samples for pooling in poolings)
    lines = sample_lines(backends, layout)
    if lines is None:
        samples = concatenate_rows(cotangents, layout.resized(num_samples))
    else:
        samples = lines.pack(cotangents)
    samples = dataclasses.replace(samples, kernels=backends.kernels)
    sample_ids, gains = _sample_of_each_id(poolings), _gain_of_each_id(poolings)

    def cotangents_of(ids: Int[Array, " n"]) -> PackedRows:
        sample = ids if sample_ids is None else gather_in_bounds(sample_ids, ids)
        place = sample if lines is None else lines.place_of(sample)
        rows = gather_packed(samples, place)
        return rows if gains is None else scale_rows(rows, gather_in_bounds(gains, ids))

    return cotangents_of


def _spread_by_kernel(
    cotangents: Sequence[Float[Array, "_ dim"]],
    ids_by_row: IdsByRow,
    poolings: Sequence[PoolingSpec],
    layout: RowLayout,
    backends: BatchBackends,
) -> PackedRows:
    """Writes each cotangent from where its sample lies to where its row lies.

    The first id of a row writes to the row's place in the exchange buffer. Repeats
    write to a second buffer, from which they are added.
    """
    from tpu_embedding.rows.kernels.row_kernels import DROPPED_ROW, write_rows

    lines = sample_lines(backends, layout)
    sources = list(cotangents) if lines is None else map(lines.lines_of, cotangents)
    buffer_size = layout.num_rows
    repeats_layout = layout.resized(
        round_up(ids_by_row.order.shape[0], ID_ALIGNMENT * layout.rows_per_line)
    )
    is_used = ids_by_row.places < buffer_size
    is_new = jnp.diff(ids_by_row.places, prepend=-1) != 0
    is_repeat = is_used & ~is_new
    repeats = jnp.maximum(running_sum(is_repeat.astype(jnp.int32)) - 1, 0)
    place = jnp.where(is_repeat, buffer_size + repeats, ids_by_row.places)
    place = unsort(jnp.where(is_used, place, DROPPED_ROW), ids_by_row.order)
    first_lines, repeat_lines = write_rows(
        list(sources),
        [pooling.valence for pooling in poolings],
        [
            jnp.where(place < buffer_size, place, DROPPED_ROW),
            jnp.where(place < buffer_size, DROPPED_ROW, place - buffer_size),
        ],
        [buffer_size, repeats_layout.num_rows],
        layout.dim,
        backends.spread.kernel_backend,
    )
    repeat_rows = PackedRows(
        lines=repeat_lines, layout=repeats_layout, kernels=backends.kernels
    )
    return add_repeats(
        PackedRows(lines=first_lines, layout=layout, kernels=backends.kernels),
        is_repeat,
        places=ids_by_row.places,
        value_ids=repeats,
        read_values=lambda _, repeats: gather_rows(repeat_rows, repeats),
    )


def _sample_of_each_id(
    poolings: Sequence[PoolingSpec],
) -> Int[Array, " all_ids"] | None:
    """Numbers the samples of all features; None if each has one id, in order."""
    if all(p.sample_ids is None and p.valence == 1 for p in poolings):
        return None
    samples, first = [], 0
    for pooling in poolings:
        sample_ids = pooling.sample_ids
        if sample_ids is None:
            sample_ids = jnp.tile(jnp.arange(pooling.num_samples), pooling.valence)
        # Unused ids have the number after the last sample; no row is theirs.
        samples.append(first + jnp.minimum(sample_ids, pooling.num_samples - 1))
        first += pooling.num_samples
    return jnp.concatenate(samples)


def _gain_of_each_id(
    poolings: Sequence[PoolingSpec],
) -> Float[Array, " all_ids"] | None:
    """Returns the gains of all features; None if every id has gain 1."""
    if all(pooling.gains is None for pooling in poolings):
        return None
    return jnp.concatenate(
        [
            jnp.ones((p.num_ids,), jnp.float32) if p.gains is None else p.gains
            for p in poolings
        ]
    )

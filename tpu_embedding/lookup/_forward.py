"""The forward pass of one stack on one shard: turns ids into activations.

`route_stack` turns ids into keys, and sends the keys to the owners of their rows. Round
by round, `read_stack` then gathers rows, sends them back and combines them.

A *key* is an int32, `owner * rows_per_shard + local row`. One sort of the keys brings
equal ids together and also groups ids by destination. The largest key,
`PADDING_ROW_ID`, marks padding, ids outside their table, and ids that are excluded
because of their weight.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from tpu_embedding.config import Combiner
from tpu_embedding.lookup._rounds import (
    Round,
    SentIds,
    fetch_rows,
    fold_later_rounds,
    quantize,
    send_ids,
)
from tpu_embedding.plan.backend import Activations
from tpu_embedding.plan.capacity import Gathers
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.access import gather_lines, num_missing, read_rows
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.types import PADDING_ROW_ID, AxisSize
from tpu_embedding.xla import read_before_write, zeros_unless

_MAX_UNROLLED_VALENCE: Final = 128
"""Largest valence whose sums `pool_feature` unrolls."""

ReadRows = Callable[[Shaped[Array, "n ..."]], Float[Array, "n dim"]]
"""Reads the rows at some positions. Ids without a row give zeros."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureInput:
    """Ids of one feature, before they become rows.

    Attributes:
      weights: None means weight 1 for every id.
      sample_ids: output sample of each id, ascending, with `num_samples` in unused
        positions. None means that ids are in `valence` blocks: the first ids of all
        samples, then the second ids, and so on. A TPU adds such blocks without moving
        them.
      valence: ids per sample, if `sample_ids` is None.
      is_sample: `[num_samples]`, False for samples that only fill up the batch. None
        means that all samples are real, or that the difference doesn't matter.
    """

    ids: Int[Array, " ids"]
    weights: Float[Array, " ids"] | None
    sample_ids: Int[Array, " ids"] | None
    num_samples: AxisSize = dataclasses.field(metadata={"static": True})
    valence: int = dataclasses.field(metadata={"static": True})
    is_sample: Bool[Array, "_"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingSpec:
    """A sparse matrix that pools rows into the samples of one feature.

    The forward pass multiplies by this matrix, and the backward pass by its transpose.
    Each entry is an id's gain times its sample's scale, which depends on the combiner.
    If gains or scales are None, they are all 1. Other fields are from `FeatureInput`.
    """

    gains: Float[Array, " ids"] | None
    scales: Float[Array, " samples"] | None
    sample_ids: Int[Array, " ids"] | None
    num_samples: AxisSize = dataclasses.field(metadata={"static": True})
    valence: int = dataclasses.field(metadata={"static": True})

    @property
    def num_ids(self) -> AxisSize:
        """Number of ids, padding included."""
        if self.sample_ids is None:
            return self.num_samples * self.valence
        return self.sample_ids.shape[0]

    def samples_of_ids(
        self, number: Callable[[Int[Array, " n"]], Int[Array, " n"]]
    ) -> Int[Array, " ids"]:
        """Computes `number(sample)` for each id. Unused ids use the last sample."""
        if self.sample_ids is not None:
            # Unused ids have sample id `num_samples`. Without the minimum, this would
            # be the first sample of the next feature.
            return number(jnp.minimum(self.sample_ids, self.num_samples - 1))
        samples = jnp.arange(self.num_samples, dtype=jnp.int32)
        return jnp.tile(number(samples), self.valence)

    @property
    def is_copy(self) -> bool:
        """True if each sample is a single row, apart from its scale."""
        return self.gains is None and self.sample_ids is None and self.valence == 1


@jax.named_scope("flatten")
def flatten(
    inputs: Sequence[FeatureInput],
    features: Sequence[FeaturePlan],
    stack: StackPlan,
) -> tuple[Int[Array, " all_ids"], list[PoolingSpec], list[Int[Array, ""]]]:
    """Turns ids into keys.

    Returns:
      Three values. The keys of all features, in one array. Then the poolings and the
      counts of ids out of range, both from `rows_and_poolings`.
    """
    if stack.keeps_duplicates:
        inputs = [_in_order_of_samples(feature_input) for feature_input in inputs]
    row_ids, poolings, out_of_range = rows_and_poolings(inputs, features)
    sizes = [feature_input.ids.shape[0] for feature_input in inputs]
    offsets = _value_of_each_id([feature.row_offset for feature in features], sizes)
    # PADDING_ROW_ID plus an offset would overflow.
    is_padding = row_ids == PADDING_ROW_ID
    stack_rows = jnp.where(is_padding, PADDING_ROW_ID, row_ids + offsets)
    # Rows aren't negative, so `div` avoids the sign corrections of `//` and `%`.
    local_row = jax.lax.div(stack_rows, jnp.int32(stack.num_shards))
    owner = stack_rows - local_row * stack.num_shards
    keys = owner * stack.rows_per_shard + stack.layout.dealt(local_row)
    keys = jnp.where(stack_rows == PADDING_ROW_ID, PADDING_ROW_ID, keys)
    return keys, poolings, out_of_range


def rows_and_poolings(
    inputs: Sequence[FeatureInput], features: Sequence[FeaturePlan]
) -> tuple[Int[Array, " all_ids"], list[PoolingSpec], list[Int[Array, ""]]]:
    """Applies id policies and combiners.

    Returns:
      Three values. The table rows of all ids, in one array. An id that reads nothing
      has `PADDING_ROW_ID`. Then a `PoolingSpec` per feature. Then, per feature, a count
      of ids outside its table.
    """
    row_ids, out_of_range = _apply_id_policies(inputs, features)
    sizes = [feature_input.ids.shape[0] for feature_input in inputs]
    rows_of_feature = split_by_feature(row_ids, sizes)
    poolings = []
    for i, (feature_input, feature) in enumerate(zip(inputs, features, strict=True)):
        default_id = feature.config.default_id
        if default_id is not None:
            feature_input, rows_of_feature[i] = _fill_empty_samples(
                feature_input, rows_of_feature[i], default_id
            )
        gains, scales = _gains_and_scales(
            feature_input, rows_of_feature[i], feature.combiner
        )
        poolings.append(
            PoolingSpec(
                gains=gains,
                scales=scales,
                sample_ids=feature_input.sample_ids,
                num_samples=feature_input.num_samples,
                valence=feature_input.valence,
            )
        )
    if any(feature.config.default_id is not None for feature in features):
        row_ids = jnp.concatenate(rows_of_feature)
    return row_ids, poolings, out_of_range


def max_unique_ids(
    inputs: Sequence[FeatureInput], features: Sequence[FeaturePlan], stack: StackPlan
) -> int:
    """Bounds the number of unique ids that a shard looks up, to size its buffers."""
    if stack.keeps_duplicates:
        return sum(feature_input.ids.shape[0] for feature_input in inputs)
    # A table adds no more unique ids than it has rows, even if features share it.
    ids_of_table: dict[int, int] = {}
    rows_of_table = {}
    for feature_input, feature in zip(inputs, features, strict=True):
        table = feature.row_offset
        num_ids = feature_input.ids.shape[0]
        ids_of_table[table] = ids_of_table.get(table, 0) + num_ids
        rows_of_table[table] = feature.num_rows
    return sum(min(n, rows_of_table[table]) for table, n in ids_of_table.items())


def _in_order_of_samples(feature_input: FeatureInput) -> FeatureInput:
    """Reorders ids from blocks to sample order, for rules that need this order."""
    valence = feature_input.valence
    if feature_input.sample_ids is not None or valence == 1:
        return feature_input

    def reorder(values: Array) -> Array:
        return values.reshape(valence, -1).T.reshape(-1)

    ids, weights = feature_input.ids, feature_input.weights
    samples = jnp.arange(feature_input.num_samples, dtype=jnp.int32)
    return dataclasses.replace(
        feature_input,
        ids=reorder(ids),
        weights=None if weights is None else reorder(weights),
        sample_ids=jnp.repeat(samples, valence),
        valence=1,
    )


def _apply_id_policies(
    inputs: Sequence[FeatureInput], features: Sequence[FeaturePlan]
) -> tuple[Int[Array, " all_ids"], list[Int[Array, ""]]]:
    """Turns ids into table rows. Ids that look up nothing become padding."""
    # Compile time grows with the number of arrays, so all features share one.
    sizes = [feature_input.ids.shape[0] for feature_input in inputs]
    ids = jnp.concatenate([feature_input.ids for feature_input in inputs])
    num_rows = _value_of_each_id([feature.num_rows for feature in features], sizes)
    is_padding = ids == PADDING_ROW_ID
    is_inside = (ids >= 0) & (ids < num_rows)
    is_outside = ~is_padding & ~is_inside
    if len(set(sizes)) == 1:
        is_outside = is_outside.reshape(len(sizes), sizes[0])
        out_of_range = list(jnp.sum(is_outside, axis=1, dtype=jnp.int32))
    else:
        masks = split_by_feature(is_outside, sizes)
        out_of_range = [jnp.sum(mask, dtype=jnp.int32) for mask in masks]
    clips = [feature.config.out_of_range_ids == "clip" for feature in features]
    if any(clips):
        is_clipped = _value_of_each_id(clips, sizes)
        ids = jnp.where(is_clipped, jnp.clip(ids, 0, num_rows - 1), ids)
        is_inside = jnp.where(is_clipped, ~is_padding, is_inside)
    checked_weights = [
        feature_input.weights if leaves_out_weights(feature) else None
        for feature_input, feature in zip(inputs, features, strict=True)
    ]
    if any(weights is not None for weights in checked_weights):
        # NaN weights must reach the loss. They do, because `NaN <= 0` is False.
        is_left_out = [
            jnp.zeros(size, bool) if weights is None else weights <= 0
            for weights, size in zip(checked_weights, sizes, strict=True)
        ]
        is_inside &= ~jnp.concatenate(is_left_out)
    return jnp.where(is_inside, ids, PADDING_ROW_ID), out_of_range


def _value_of_each_id(values: Sequence[int], sizes: Sequence[AxisSize]) -> Array:
    """Repeats each value for its feature's ids.

    If all values are equal, the result is a scalar.
    """
    # jax_enable_x64 would change the default integer type.
    dtype = jnp.bool_ if isinstance(values[0], bool) else jnp.int32
    if len(set(values)) == 1:
        return jnp.asarray(values[0], dtype)
    if len(set(sizes)) == 1:
        by_feature = jnp.asarray(values, dtype)[:, None]
        return jnp.broadcast_to(by_feature, (len(values), sizes[0])).reshape(-1)
    pairs = zip(values, sizes, strict=True)
    return jnp.concatenate([jnp.full(size, value, dtype) for value, size in pairs])


def split_by_feature(values: Array, sizes: Sequence[AxisSize]) -> list[Array]:
    return jnp.split(values, list(itertools.accumulate(sizes))[:-1])


def leaves_out_weights(feature: FeaturePlan) -> bool:
    """Tells whether ids with a weight of 0 or less are dropped."""
    # TensorFlow's safe_embedding_lookup_sparse drops them only for mean and sqrtn.
    is_checked = feature.config.validate_weights_and_indices
    return is_checked and feature.combiner != "sum"


def _fill_empty_samples(
    feature_input: FeatureInput, row_ids: Int[Array, " ids"], default_id: int
) -> tuple[FeatureInput, Int[Array, " ids"]]:
    """Sets the first id to the default id, with weight 1, in samples without a row."""
    is_row = row_ids != PADDING_ROW_ID
    sample_ids, num_samples = feature_input.sample_ids, feature_input.num_samples
    if sample_ids is None:
        is_empty = ~is_row.reshape(-1, num_samples).any(axis=0)
        if feature_input.is_sample is not None:
            is_empty &= feature_input.is_sample
        is_default = jnp.pad(is_empty, (0, row_ids.shape[0] - num_samples))
    else:
        num_rows = jax.ops.segment_sum(
            is_row.astype(jnp.int32), sample_ids, num_samples, indices_are_sorted=True
        )
        is_empty = num_rows == 0
        if feature_input.is_sample is not None:
            is_empty &= feature_input.is_sample
        # `to_feature_input` added a position to each sample, so each has a first one.
        is_first = jnp.diff(sample_ids, prepend=-1) != 0
        is_default = is_first & is_empty.at[sample_ids].get(
            mode="fill", fill_value=False, indices_are_sorted=True
        )
    weights = feature_input.weights
    if weights is not None:
        weights = jnp.where(is_default, 1.0, weights)
    return (
        dataclasses.replace(feature_input, weights=weights),
        jnp.where(is_default, default_id, row_ids),
    )


def _gains_and_scales(
    feature_input: FeatureInput,
    row_ids: Int[Array, " ids"],
    combiner: Combiner,
) -> tuple[Float[Array, " ids"] | None, Float[Array, " samples"] | None]:
    """Computes the gain of each id, and the scale of each sample.

    A scale is 1 for sum, 1 / sum(w) for mean and 1 / sqrt(sum(w**2)) for sqrtn, or 0 if
    the denominator is 0.
    """
    is_single = feature_input.sample_ids is None and feature_input.valence == 1
    is_used = row_ids != PADDING_ROW_ID
    gains = feature_input.weights
    if gains is not None:
        # Ids without a row must not change denominators, even if their weight is NaN.
        gains = jnp.where(is_used, gains, 0.0)
    if combiner == "sum" or (gains is None and is_single):
        return gains, None
    weights = is_used.astype(jnp.float32) if gains is None else gains
    if combiner == "sqrtn":
        weights = weights**2
    if feature_input.sample_ids is None:
        denominators = weights.reshape(feature_input.valence, -1).sum(axis=0)
    else:
        denominators = jax.ops.segment_sum(
            weights,
            feature_input.sample_ids,
            feature_input.num_samples,
            indices_are_sorted=True,
        )
    # Zeros are replaced before the root, whose derivative at 0 is infinite.
    is_zero = denominators == 0
    denominators = jnp.where(is_zero, 1.0, denominators)
    if combiner == "sqrtn":
        denominators = jnp.sqrt(denominators)
    return gains, jnp.where(is_zero, 0.0, 1 / denominators)


@jax.named_scope("combine")
def pool_buffer(
    rows: Float[Array, "buffer dim"],
    positions: Int[Array, " all_ids"],
    poolings: Sequence[PoolingSpec],
    gathers: Gathers,
) -> list[Float[Array, "_ dim"]]:
    """Sums gain-weighted rows from an exchange buffer into their samples.

    `positions` has each id's position in the buffer, which is past the end for ids
    without a row. After all rounds are added, `samples_of` scales the sums.
    """
    # The last entry of the buffer is always unused. Ids without a row read zeros from
    # it, which avoids a mask on the gathered rows.
    last = rows.shape[0] - 1
    zeros = jnp.zeros((1, rows.shape[1]), rows.dtype)
    rows = jax.lax.dynamic_update_slice(rows, zeros, (last, 0))

    def rows_at(positions):
        return gather_lines(rows, jnp.minimum(positions, last))

    return pool(rows_at, positions, poolings, gathers)


@jax.named_scope("combine")
def pool(
    rows_at: ReadRows,
    positions: Int[Array, " all_ids"],
    poolings: Sequence[PoolingSpec],
    gathers: Gathers,
) -> list[Float[Array, "_ dim"]]:
    """Sums gain-weighted rows into samples, where each id reads `rows_at(position)`."""
    if gathers != "by_feature" and all(pooling.is_copy for pooling in poolings):
        # One array for all features compiles faster. `samples_of` splits it.
        return [rows_at(positions)]
    if gathers == "whole":
        at, rows_at = rows_at(positions), lambda rows: rows
    else:
        # With `jit`, features that have the same number of ids share one trace.
        at, rows_at = positions, jax.jit(rows_at)
    at = split_by_feature(at, [pooling.num_ids for pooling in poolings])
    return [pool_feature(*x, rows_at) for x in zip(poolings, at, strict=True)]


def samples_of(
    sums: Sequence[Float[Array, "_ dim"]], poolings: Sequence[PoolingSpec]
) -> list[Float[Array, "_ dim"]]:
    """Scales the sums over all rounds to activations, one array per feature."""
    if len(sums) < len(poolings):
        sums = split_by_feature(sums[0], [pooling.num_samples for pooling in poolings])
    return scale_samples(sums, poolings)


def scale_samples(
    samples: Sequence[Float[Array, "_ dim"]], poolings: Sequence[PoolingSpec]
) -> list[Float[Array, "_ dim"]]:
    return [
        rows if pooling.scales is None else rows * pooling.scales[:, None]
        for rows, pooling in zip(samples, poolings, strict=True)
    ]


def pool_feature(
    pooling: PoolingSpec, at: Shaped[Array, "ids ..."], rows_at: ReadRows
) -> Float[Array, "samples dim"]:
    """Sums the gain-weighted rows `rows_at(at)` into the samples of one feature."""
    gains, valence = pooling.gains, pooling.valence
    if pooling.sample_ids is None and 1 < valence <= _MAX_UNROLLED_VALENCE:
        # Adding slices reads rows in place; a reduction would copy them first.
        terms = [rows_at(nth) for nth in jnp.split(at, valence)]
        if gains is not None:
            pairs = zip(terms, jnp.split(gains, valence), strict=True)
            terms = [rows * nth_gains[:, None] for rows, nth_gains in pairs]
        return functools.reduce(jnp.add, terms)
    rows = rows_at(at)
    if gains is not None:
        rows = rows * gains[:, None]
    if pooling.sample_ids is not None:
        return jax.ops.segment_sum(
            rows, pooling.sample_ids, pooling.num_samples, indices_are_sorted=True
        )
    if valence == 1:
        return rows
    return rows.reshape(valence, -1, rows.shape[1]).sum(axis=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StackRouting:
    """Ids routed to their rows, for both passes.

    Attributes:
      sent: the ids at the owners. None if this device reads its own rows, or if the
        backend replaces the lookup. `stack_gradient` may then send the ids later.
      backend_ids: see `Backend.prepare_ids`.
      out_of_range: number of ids outside the table, one array `[1]` per feature.
    """

    keys: Int[Array, " ids"]
    sent: SentIds | None
    backend_ids: Any
    poolings: list[PoolingSpec]
    out_of_range: list[Int[Array, "_"]]
    max_unique_ids: int = dataclasses.field(metadata={"static": True})


def route_stack(
    inputs: Sequence[FeatureInput],
    features: Sequence[FeaturePlan],
    stack: StackPlan,
) -> StackRouting:
    """Sends ids to the owners of their rows.

    Routing doesn't read tables, so it may run before a table is updated.
    """
    keys, poolings, out_of_range = flatten(inputs, features, stack)
    max_unique = max_unique_ids(inputs, features, stack)
    sent = send_ids(keys, max_unique, stack) if stack.sends_ids else None
    return StackRouting(
        keys=keys,
        sent=sent,
        backend_ids=stack.backend.prepare_ids(keys, poolings, stack),
        poolings=poolings,
        out_of_range=[count[None] for count in out_of_range],
        max_unique_ids=max_unique,
    )


def read_stack(
    table: PackedRows, routing: StackRouting, stack: StackPlan
) -> tuple[list[Float[Array, "_ dim"]], StackRouting, dict[str, Int[Array, "one *n"]]]:
    """Reads and combines rows.

    Returns:
      Three values. Float32 activations per feature. Then the routing for the backward
      pass. Then counts by `LookupStats` field, each with a first axis of length 1. The
      counts lack `num_ids` and `requested_rows` if the lookup sent no ids. They lack
      `missing_rows` if the device has all rows that it owns.
    """
    poolings = routing.poolings

    def read_own_rows(table: PackedRows) -> Activations:
        def rows_at(row_ids: Int[Array, " ids"]) -> Float[Array, "ids dim"]:
            rows = read_rows(table, row_ids).astype(jnp.float32)
            rows = quantize(rows, stack.quantization)
            # Set zeros after `quantize`, because it may map 0 to another number.
            is_row = row_ids < stack.rows_per_shard
            return zeros_unless(is_row, rows)

        sums = pool(rows_at, routing.keys, poolings, stack.gathers)
        missing = num_missing(table, routing.keys)
        return samples_of(sums, poolings), jnp.int32(1), missing

    def read_rounds(table: PackedRows) -> Activations:
        sent = sent_ids(routing, stack)

        def read_round(current: Round) -> tuple[list[Array], Any]:
            rows = fetch_rows(table, current.requests, stack)
            positions = sent.positions(current)
            sums = pool_buffer(rows, positions, poolings, stack.gathers)
            return sums, num_missing(table, current.requests)

        def add_round(total: Any, current: Round) -> Any:
            return jax.tree.map(jnp.add, total, read_round(current))

        (sums, missing), rounds = fold_later_rounds(
            add_round, read_round(sent.first), sent, stack
        )
        return samples_of(sums, poolings), rounds, missing

    owns_all_rows = routing.sent is None and stack.num_shards == 1
    activations, rounds, missing = stack.backend.look_up(
        table,
        routing.backend_ids,
        poolings,
        read_own_rows if owns_all_rows else read_rounds,
        stack,
    )
    activations, routing = _read_before_update(activations, routing)
    sent, counts = routing.sent, {"rounds": rounds[None]}
    if sent is not None:
        counts["num_ids"] = sent.unique.first_positions[-1:]
        counts["requested_rows"] = jnp.diff(sent.unique.first_ranks)[None]
    if missing is not None:
        counts["missing_rows"] = missing[None]
    return activations, routing, counts


def sent_ids(routing: StackRouting, stack: StackPlan) -> SentIds:
    """Sends ids to the owners, unless the lookup already did."""
    if routing.sent is not None:
        return routing.sent
    return send_ids(routing.keys, routing.max_unique_ids, stack)


def _read_before_update(
    activations: list[Float[Array, "_ dim"]], routing: StackRouting
) -> tuple[list[Float[Array, "_ dim"]], StackRouting]:
    """Orders table reads before the writes of an update."""
    sent = routing.sent
    # An update writes to the rows that the routing names. With one barrier, the routing
    # is available only after the activations, so all writes come after the reads.
    # Otherwise, if the derivative of the loss doesn't use the activations, XLA may
    # write first, and copy the table to keep old rows.
    reads = (activations, routing.keys, routing.backend_ids)
    if sent is None:
        activations, keys, backend_ids = read_before_write(reads)
    else:
        reads = (*reads, sent.unique.order, sent.first)
        activations, keys, backend_ids, order, first = read_before_write(reads)
        unique = dataclasses.replace(sent.unique, order=order)
        sent = dataclasses.replace(sent, unique=unique, first=first)
    return activations, dataclasses.replace(
        routing, keys=keys, sent=sent, backend_ids=backend_ids
    )

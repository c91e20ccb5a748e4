"""Stage 1, flatten: finds the owner of each id, for all features of a stack at once.

The ids become one array of keys. A *key* is an int32 that names the owner of a row and
the row at that owner: `owner * rows_per_shard + local row`. One sort of the keys
therefore brings equal ids together and groups them by destination. Ids that look up
nothing get the largest key: padding, ids outside their table, and ids that their weight
excludes.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tpu_embedding.config import Combiner
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.types import PADDING_ROW_ID, AxisSize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureInput:
    """The ids of one feature, before they are resolved to rows. Per shard.

    Attributes:
      ids: int32 `[ids]`.
      weights: float32 `[ids]`; None: every id has weight 1.
      sample_ids: int32 `[ids]`, the output sample of each id, rising; `num_samples` in
        unused positions. None: the first ids of all samples come first, then the second
        ids, and so on up to `valence`. A TPU adds such blocks without moving them.
      num_samples: output samples of this shard.
      valence: ids per sample, if `sample_ids` is None.
      is_sample: bool `[num_samples]`, False for samples that only fill up the batch;
        None: all are real, or it makes no difference.
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
    """The weights that pool the rows of one feature into samples. Per shard.

    Attributes:
      gains: float32 `[ids]`, factor of each id's row; None: all are 1.
      scales: float32 `[samples]`, factor by which the combiner normalises each sample's
        sum; None: all are 1.
      sample_ids: see `FeatureInput`.
      num_samples: see `FeatureInput`.
      valence: see `FeatureInput`.
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
        """Returns `number(sample)` for the sample of each id.

        Unused ids, of no sample and no row, get the number of the last sample.
        """
        if self.sample_ids is not None:
            return number(jnp.minimum(self.sample_ids, self.num_samples - 1))
        samples = jnp.arange(self.num_samples, dtype=jnp.int32)
        return jnp.tile(number(samples), self.valence)

    @property
    def is_copy(self) -> bool:
        """True if each sample is the row of one id, up to its scale."""
        return self.gains is None and self.sample_ids is None and self.valence == 1


@jax.named_scope("flatten")
def flatten(
    inputs: Sequence[FeatureInput],
    features: Sequence[FeaturePlan],
    stack: StackPlan,
) -> tuple[Int[Array, " all_ids"], list[PoolingSpec], list[Int[Array, ""]]]:
    """Turns the features of a stack into keys and pooling specs. Per shard.

    Args:
      inputs: one per feature of the stack.
      features: their plans.
      stack: the stack's plan.

    Returns:
      The keys of all features, one feature after the other. A `PoolingSpec` per
      feature. The number of ids outside the table, per feature.
    """
    if stack.keeps_duplicates:
        inputs = [_in_order_of_samples(feature_input) for feature_input in inputs]
    row_ids, poolings, out_of_range = rows_and_poolings(inputs, features)
    sizes = [feature_input.ids.shape[0] for feature_input in inputs]
    offsets = _value_of_each_id([feature.row_offset for feature in features], sizes)
    is_padding = row_ids == PADDING_ROW_ID
    stack_rows = jnp.where(is_padding, PADDING_ROW_ID, row_ids + offsets)
    return _keys_of(stack_rows, stack), poolings, out_of_range


def rows_and_poolings(
    inputs: Sequence[FeatureInput], features: Sequence[FeaturePlan]
) -> tuple[Int[Array, " all_ids"], list[PoolingSpec], list[Int[Array, ""]]]:
    """Applies the policies and the combiners of features. Per shard.

    Args:
      inputs: ids of each feature.
      features: their plans.

    Returns:
      The row of its table that each position reads, one feature after the other;
      `PADDING_ROW_ID` where it reads none. The weights of the rows, and the number of
      ids outside the table, per feature.
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
    """Returns an upper bound on the unique ids of a shard.

    A table adds as many as it has ids or rows, whichever are fewer.
    """
    if stack.keeps_duplicates:
        return sum(feature_input.ids.shape[0] for feature_input in inputs)
    ids_of_table: dict[int, int] = {}
    rows_of_table = {}
    for feature_input, feature in zip(inputs, features, strict=True):
        table = feature.row_offset
        num_ids = feature_input.ids.shape[0]
        ids_of_table[table] = ids_of_table.get(table, 0) + num_ids
        rows_of_table[table] = feature.num_rows
    return sum(min(n, rows_of_table[table]) for table, n in ids_of_table.items())


def _in_order_of_samples(feature_input: FeatureInput) -> FeatureInput:
    """Puts the ids of each sample side by side, for rules that see occurrences."""
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
    """Applies the features' policies. Ids that look up nothing become padding.

    All features are treated as one array, since compile time grows with the number of
    arrays.

    Returns:
      Row ids within the tables, and the number of ids outside the table per feature.
    """
    sizes = [feature_input.ids.shape[0] for feature_input in inputs]
    ids = jnp.concatenate([feature_input.ids for feature_input in inputs])
    num_rows = _value_of_each_id([feature.num_rows for feature in features], sizes)
    is_padding = ids == PADDING_ROW_ID
    is_inside = (ids >= 0) & (ids < num_rows)
    out_of_range = _count_by_feature(~is_padding & ~is_inside, sizes)
    clips = [feature.config.out_of_range_ids == "clip" for feature in features]
    if any(clips):
        is_clipped = _value_of_each_id(clips, sizes)
        ids = jnp.where(is_clipped, jnp.clip(ids, 0, num_rows - 1), ids)
        is_inside = jnp.where(is_clipped, ~is_padding, is_inside)
    left_out = [
        # A weight of NaN counts, so that it reaches the loss.
        feature_input.weights <= 0
        if feature_input.weights is not None and leaves_out_weights(feature)
        else None
        for feature_input, feature in zip(inputs, features, strict=True)
    ]
    if any(each is not None for each in left_out):
        is_inside &= ~jnp.concatenate(
            [
                jnp.zeros(size, bool) if each is None else each
                for each, size in zip(left_out, sizes, strict=True)
            ]
        )
    return jnp.where(is_inside, ids, PADDING_ROW_ID), out_of_range


def _value_of_each_id(values: Sequence[int], sizes: Sequence[AxisSize]) -> Array:
    """Returns the value of the feature of each id, `[all_ids]`, or a scalar of all."""
    # Not the default integer type, which jax_enable_x64 changes.
    dtype = jnp.bool_ if isinstance(values[0], bool) else jnp.int32
    if len(set(values)) == 1:
        return jnp.asarray(values[0], dtype)
    if len(set(sizes)) == 1:
        by_feature = jnp.asarray(values, dtype)[:, None]
        return jnp.broadcast_to(by_feature, (len(values), sizes[0])).reshape(-1)
    pairs = zip(values, sizes, strict=True)
    return jnp.concatenate([jnp.full(size, value, dtype) for value, size in pairs])


def _count_by_feature(
    is_counted: Bool[Array, " all_ids"], sizes: Sequence[AxisSize]
) -> list[Int[Array, ""]]:
    if len(set(sizes)) == 1:
        by_feature = is_counted.reshape(len(sizes), sizes[0])
        return list(jnp.sum(by_feature, axis=1, dtype=jnp.int32))
    parts = split_by_feature(is_counted, sizes)
    return [jnp.sum(part, dtype=jnp.int32) for part in parts]


def split_by_feature(values: Array, sizes: Sequence[AxisSize]) -> list[Array]:
    """Cuts what is in one array, one feature after the other."""
    return jnp.split(values, list(itertools.accumulate(sizes))[:-1])


def leaves_out_weights(feature: FeaturePlan) -> bool:
    """Returns True if ids of weight 0 or less are left out."""
    is_checked = feature.config.validate_weights_and_indices
    return is_checked and feature.combiner != "sum"


def _fill_empty_samples(
    feature_input: FeatureInput, row_ids: Int[Array, " ids"], default_id: int
) -> tuple[FeatureInput, Int[Array, " ids"]]:
    """Puts the default id, with weight 1, into the first position of empty samples.

    A sample is empty if none of its positions has a row. Each sample has a position.
    """
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


def _keys_of(stack_rows: Int[Array, " ids"], stack: StackPlan) -> Int[Array, " ids"]:
    """Returns the key of each row of a stack; padding stays padding."""
    local_row = jax.lax.div(stack_rows, jnp.int32(stack.num_shards))
    owner = stack_rows - local_row * stack.num_shards
    keys = owner * stack.rows_per_shard + stack.layout.dealt(local_row)
    return jnp.where(stack_rows == PADDING_ROW_ID, PADDING_ROW_ID, keys)


def _gains_and_scales(
    feature_input: FeatureInput,
    row_ids: Int[Array, " ids"],
    combiner: Combiner,
) -> tuple[Float[Array, " ids"] | None, Float[Array, " samples"] | None]:
    """Returns the gain of each id and the scale of each sample.

    The scale is 1 for sum, 1 / sum(w) for mean and 1 / sqrt(sum(w**2)) for sqrtn. It is
    0 if the denominator is 0.
    """
    is_single = feature_input.sample_ids is None and feature_input.valence == 1
    is_used = row_ids != PADDING_ROW_ID
    gains = feature_input.weights
    if gains is not None:
        gains = jnp.where(is_used, gains, 0.0)
    if combiner == "sum" or (gains is None and is_single):
        return gains, None
    weights = is_used.astype(jnp.float32) if gains is None else gains
    match combiner:
        case "mean":
            denominators = _sum_by_sample(weights, feature_input)
        case "sqrtn":
            denominators = _sum_by_sample(weights**2, feature_input)
    # Zeros are replaced before the root, whose derivative at 0 is infinite.
    is_zero = denominators == 0
    denominators = jnp.where(is_zero, 1.0, denominators)
    if combiner == "sqrtn":
        denominators = jnp.sqrt(denominators)
    return gains, jnp.where(is_zero, 0.0, 1 / denominators)


def _sum_by_sample(
    values: Float[Array, " ids"], feature_input: FeatureInput
) -> Float[Array, " samples"]:
    if feature_input.sample_ids is None:
        return values.reshape(feature_input.valence, -1).sum(axis=0)
    return jax.ops.segment_sum(
        values,
        feature_input.sample_ids,
        feature_input.num_samples,
        indices_are_sorted=True,
    )

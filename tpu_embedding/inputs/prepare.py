"""Checks a batch on the host, and gives ragged features a static size.

Dense int32 ids that lie inside their tables may enter a jitted step directly. This
module does what a jitted step cannot do: raise an error that names the feature and the
id, read 64-bit ids, and split ragged features by shard.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax
import numpy as np

from tpu_embedding.inputs.agreed_sizes import agree_on_demands
from tpu_embedding.inputs.buffer_sizes import BufferSizes, size_of_batch
from tpu_embedding.inputs.forms import HostIds, is_real, read_ids
from tpu_embedding.inputs.ragged_shards import RaggedShards
from tpu_embedding.inputs.shard_inputs import (
    check_dtypes,
    feature_shape,
    refuse_unequal_batches,
)
from tpu_embedding.inputs.sparse_ids import from_sparse
from tpu_embedding.inputs.wide_ids import (
    check_wide,
    join_words,
    refuse_unreadable,
    with_words,
)
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import AnyPlan, EmbeddingPlan
from tpu_embedding.types import (
    PADDING_ROW_ID,
    DenseIds,
    FeatureIds,
    RaggedIds,
    ShardedRaggedIds,
    SparseIds,
)

Samples = Literal["global", "process"]
"""Samples that a process passes: the global batch, or those of its own devices."""


def prepare_features(
    features: Any,
    plan: AnyPlan,
    weights: Any = None,
    sizes: BufferSizes | None = None,
    *,
    samples: Samples = "global",
) -> Any:
    """Checks the ids of a batch on the host and gives them static shapes.

    Ragged features are split by shard and padded. No id is lost. Each new padded size
    costs one more compilation of the step, so pass one `BufferSizes` to all calls. It
    settles after one or two sizes. Without it, `FeatureConfig.expected_valence` sets
    the size in ids per sample, and the size doubles until it holds the batch.

    Args:
      features: nest like the plan's `feature_config`, whose dicts may lack keys;
        leaves are integer arrays `[batch]` or `[batch, valence]` (unused places hold
        `PADDING_ROW_ID`), nested lists, `DenseIds`, `RaggedIds`, `SparseIds`, or
        objects with the fields of `tf.RaggedTensor` or `tf.SparseTensor`. Global; any
        integer dtype. Those of dynamic tables may also be `Ids64`.
      plan: plan of the layer, or its part `EmbeddingPlan.for_loaders()`.
      weights: None, or the same nest with weights, or None, per feature: in the form of
        the ids, or an array; for ragged and sparse features `[num_values]`.
      sizes: remembers the sizes of earlier batches; None: each batch has its own.
      samples: `"global"`: the features are those of the global batch. `"process"`: of
        the samples `plan.process_samples(batch_size)`. All processes then call this
        function for each batch, as they agree on the sizes of ragged features.

    Returns:
      The nest with NumPy arrays: int32 ids, `Ids64` for dynamic tables, and float32
      weights. Pass it to the layer, or to `tpu_embedding.inputs.shard_batch` first,
      with the same `samples`.

    Raises:
      TypeError: if ids are no integers, or their container has no clear meaning.
      ValueError: if the nest has another structure, an id lies outside its table and
        the feature's policy is `"error"`, or shapes do not fit each other.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> prepare_features({"watched": [[1, 2], [3]]}, plan)["watched"].batch_size
      2
    """
    plan = plan.for_batch(features)
    num_parts = num_parts_of(samples, plan)
    leaves = plan.flatten(features)
    weight_leaves: list[Any] = [None] * len(leaves)
    if weights is not None:
        weight_leaves = plan.flatten(weights, "weights")
    read = [
        _read_feature(ids, feature)
        for ids, feature in zip(leaves, plan.features, strict=True)
    ]
    refuse_unequal_batches(
        (feature, host_ids.batch_size)
        for host_ids, feature in zip(read, plan.features, strict=True)
        if host_ids.batch_shape
    )
    _refuse_uneven_parts(read, num_parts, plan)
    checked = [
        _check_feature(host_ids, weight, feature, plan, num_parts)
        for host_ids, weight, feature in zip(
            read, weight_leaves, plan.features, strict=True
        )
    ]
    prepared = _pad_ragged(checked, plan, sizes, num_parts)
    for i, (ids, leaf) in enumerate(zip(prepared, leaves, strict=True)):
        if isinstance(ids, DenseIds) and ids.weights is None:
            if not isinstance(leaf, DenseIds | SparseIds):
                prepared[i] = ids.ids
    nest = jax.tree.unflatten(plan.feature_tree, prepared)
    shapes = plan.flatten(global_shapes(nest, num_parts))
    for ids, feature in zip(shapes, plan.features, strict=True):
        feature_shape(ids, feature, plan)
    for i, feature in enumerate(plan.features):
        if feature.table.dynamic:
            prepared[i] = with_words(prepared[i])
    return jax.tree.unflatten(plan.feature_tree, prepared)


def shard_batch(batch: Any, plan: EmbeddingPlan, *, samples: Samples = "global") -> Any:
    """Puts a nest of arrays on the plan's devices, split along their first axis.

    Args:
      batch: nest of arrays on the host.
      plan: plan of the layer.
      samples: `"global"`: each process passes the same global batch, and puts the
        shards of its own devices. An array whose first axis is no multiple of the
        number of devices is copied to each device. `"process"`: each process passes
        the samples `plan.process_samples(batch_size)` only, in arrays of equal shapes.

    Returns:
      The nest with global arrays.

    Raises:
      ValueError: if an integer does not fit in 32 bits, or the samples of a process
        cannot be split over its devices.
    """
    num_parts = num_parts_of(samples, plan)

    def place(array):
        array = _check_fits_int32(np.asarray(array))
        if num_parts > 1 and array.ndim:
            return _place_part(array, plan, num_parts)
        divides = array.ndim and array.shape[0] % plan.num_shards == 0
        sharding = plan.batch_sharding if divides else plan.replicated
        if sharding.is_fully_addressable:
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    return jax.tree.map(place, batch)


def _place_part(array: np.ndarray, plan: EmbeddingPlan, num_parts: int) -> jax.Array:
    """Puts the part of one process on its devices."""
    num_shards = plan.num_shards // num_parts
    if array.shape[0] % num_shards:
        raise ValueError(
            f"shard_batch(samples='process') needs a multiple of {num_shards} samples, "
            f"the shards of this process, got an array of shape {array.shape}; pad the "
            "batch with samples of weight 0."
        )
    shape = (array.shape[0] * num_parts, *array.shape[1:])
    return jax.make_array_from_process_local_data(plan.batch_sharding, array, shape)


def num_parts_of(samples: Samples, plan: AnyPlan) -> int:
    """Returns the number of different parts that processes pass; 1 for global ones.

    Raises:
      ValueError: if `samples` is unknown, or processes cannot pass parts on this mesh.
    """
    if samples not in get_args(Samples):
        raise ValueError(
            f"samples must be one of {get_args(Samples)}, got {samples!r}; it says "
            "which samples each process passes."
        )
    if samples == "global":
        return 1
    if plan.num_process_parts is None:
        raise ValueError(
            "samples='process' needs a mesh in which the devices of each process are "
            "consecutive and equal in number; sort them by process_index, or pass the "
            "global batch with samples='global'."
        )
    return plan.num_process_parts


def global_shapes(nest: Any, num_parts: int) -> Any:
    """Returns arrays like the global batch that prepared parts form, without values.

    They are views of one element, and take no memory.
    """
    if num_parts == 1:
        return nest

    def view(array: np.ndarray) -> np.ndarray:
        shape = (array.shape[0] * num_parts, *array.shape[1:])
        return np.broadcast_to(np.zeros((), array.dtype), shape)

    return jax.tree.map(view, nest)


def _check_fits_int32(array: np.ndarray) -> np.ndarray:
    """Refuses integers of which JAX would keep the lower half only."""
    is_wide = np.issubdtype(array.dtype, np.integer) and array.dtype.itemsize > 4
    if is_wide and array.size and not jax.config.read("jax_enable_x64"):
        low, high = array.min(), array.max()
        if low < np.iinfo(np.int32).min or high > np.iinfo(np.int32).max:
            raise ValueError(
                f"shard_batch got {array.dtype} values from {low} to {high}, which an "
                "int32 cannot hold; pass ids through prepare_features first."
            )
    return array


def _read_feature(ids: Any, feature: FeaturePlan) -> HostIds:
    if ids is None:
        raise ValueError(
            f"Feature {feature.name!r} is None; pass its ids, or leave its key "
            "out of the batch."
        )
    if isinstance(ids, ShardedRaggedIds):
        raise TypeError(f"Feature {feature.name!r} has been prepared already.")
    if feature.table.dynamic:
        ids = join_words(ids, feature)
        refuse_unreadable(ids, feature)
    host_ids = read_ids(ids, f"feature {feature.name!r}")
    shape = host_ids.batch_shape
    if not isinstance(host_ids.ids, DenseIds):
        if len(shape) > 1 and feature.config.output_shape is None:
            raise ValueError(
                f"Ids of feature {feature.name!r} have {len(shape)} axes of samples, "
                f"{shape}; set FeatureConfig.output_shape to {shape}."
            )
    if host_ids.batch_size == 0:
        raise ValueError(
            f"Feature {feature.name!r} must have at least one sample, got a batch of "
            f"shape {shape}."
        )
    return host_ids


def _refuse_uneven_parts(read: list[HostIds], num_parts: int, plan: AnyPlan) -> None:
    """Refuses parts of processes that their devices cannot share equally."""
    if num_parts == 1:
        return
    num_shards = plan.num_shards // num_parts
    for host_ids, feature in zip(read, plan.features, strict=True):
        if feature.config.output_shape is not None and not feature.config.has_own_batch:
            raise ValueError(
                f"Feature {feature.name!r} has an output_shape, so processes cannot "
                "pass parts of it; pass the global batch with samples='global'."
            )
        if host_ids.batch_size % num_shards:
            raise ValueError(
                f"Feature {feature.name!r} must have a multiple of {num_shards} "
                "samples with samples='process', as many as the process has devices, "
                f"got {host_ids.batch_size}; pad the batch with samples of weight 0."
            )


def _check_feature(
    host_ids: HostIds,
    weights: Any,
    feature: FeaturePlan,
    plan: AnyPlan,
    num_parts: int,
) -> DenseIds | RaggedShards:
    """Returns int32 ids and float32 weights, checked; ragged ids dealt to shards."""
    array = _read_weights(weights, host_ids, feature)
    ids = _check_ids(host_ids, array, feature)
    if isinstance(ids, RaggedIds):
        min_valence = 0
        if feature.config.default_id is not None:
            ids, min_valence = _fill_empty_samples(ids), 1
        return RaggedShards.of(
            ids,
            plan.num_shards // num_parts,
            num_parts=num_parts,
            min_valence=min_valence,
        )
    return ids


def _check_ids(
    host_ids: HostIds, weights: np.ndarray | None, feature: FeaturePlan
) -> DenseIds | RaggedIds:
    """Returns int32 or uint64 ids, checked and with weights; none stays sparse."""
    ids, values = host_ids.ids, host_ids.values
    if not values.size and not isinstance(ids, DenseIds):
        values = values.astype(np.int32)  # NumPy takes empty lists for floats.
    check_dtypes(values, weights, feature)
    where = "position" if isinstance(ids, DenseIds) else "value"
    check = check_wide if feature.table.dynamic else _check_range
    ids = host_ids.with_values(check(values, _holds_padding(host_ids), feature, where))
    if isinstance(ids, SparseIds):
        return from_sparse(ids, weights, feature)
    return dataclasses.replace(ids, weights=weights)


def _read_weights(
    weights: Any, host_ids: HostIds, feature: FeaturePlan
) -> np.ndarray | None:
    """Returns the weights as float32, in the order of the values of the ids."""
    if weights is None:
        weights = host_ids.ids.weights
    if weights is None:
        return None
    owner = f"feature {feature.name!r}"
    read = read_ids(weights, owner, "Weights")
    if read.ids.weights is not None:
        raise ValueError(
            f"Weights of {owner} must be held in place of ids, got a "
            f"{type(read.ids).__name__} that has weights of its own."
        )
    if not isinstance(read.ids, DenseIds):
        _check_same_places(read, host_ids, owner)
    array = read.values
    if not is_real(array.dtype):
        raise TypeError(
            f"Weights of {owner} must be real numbers, got dtype {array.dtype}."
        )
    with np.errstate(over="ignore"):  # It becomes infinite, which is refused.
        array = array.astype(np.float32)
    is_finite = np.isfinite(array)
    if not is_finite.all():
        place = tuple(int(i) for i in np.argwhere(~is_finite)[0])
        raise ValueError(
            f"Weights of {owner} must be finite, got {array[place]} at {place}."
        )
    return array


def _check_same_places(read: HostIds, host_ids: HostIds, owner: str) -> None:
    """Refuses ragged or sparse weights whose structure is not that of the ids."""
    ids, weights = host_ids.ids, read.ids
    if type(ids) is not type(weights):
        raise TypeError(
            f"Weights of {owner} must be an array or {type(ids).__name__}, as its ids "
            f"are, got {type(weights).__name__}."
        )
    names = (
        ("indices", "dense_shape") if isinstance(ids, SparseIds) else ("row_splits",)
    )
    for name in names:
        of_ids = np.asarray(getattr(ids, name))
        of_weights = np.asarray(getattr(weights, name))
        if not np.array_equal(of_ids, of_weights):
            raise ValueError(
                f"Weights of {owner} must have the {name} of its ids.\n"
                f"  ids: {_shorten(of_ids)}\n  weights: {_shorten(of_weights)}"
            )


def _shorten(array: np.ndarray) -> str:
    return np.array2string(array, threshold=20, separator=", ")


def _holds_padding(host_ids: HostIds) -> bool:
    """Returns whether `PADDING_ROW_ID` marks places without an id, and is no id itself.

    Dense ids need such marks. Ragged and sparse ids have them where `hash_ids` or a
    `Vocabulary`, which return int32, was given padding.
    """
    is_dense = isinstance(host_ids.ids, DenseIds)
    return is_dense or host_ids.values.dtype == np.int32


def _check_range(
    ids: np.ndarray, holds_padding: bool, feature: FeaturePlan, where: str
) -> np.ndarray:
    """Returns a copy of the ids as int32.

    Ids that no int32 holds become -1, or the largest id for the policy `"clip"`. That
    one lies outside of any table, so that no other plan reads a row of its own for it.
    """
    vocabulary_size = feature.table.vocabulary_size
    policy = feature.config.out_of_range_ids
    if ids.dtype.kind not in "iu":  # such as int4, which NumPy cannot compare
        ids = ids.astype(np.int64)
    if not ids.size or (ids.min() >= 0 and ids.max() < vocabulary_size):
        return ids.astype(np.int32)
    is_padding = (ids == PADDING_ROW_ID) & holds_padding
    is_outside = ((ids < 0) | (ids >= vocabulary_size)) & ~is_padding
    if policy == "error" and is_outside.any():
        place = tuple(int(i) for i in np.argwhere(is_outside)[0])
        raise ValueError(
            f"Ids of feature {feature.name!r} must lie in [0, {vocabulary_size}), the "
            f"rows of its table, got {ids[place]} at {where} {place}, and "
            f"{int(is_outside.sum())} such ids in all. Correct the data, number "
            "ids with gaps by te.inputs.Vocabulary or te.inputs.hash_ids, or set "
            "FeatureConfig.out_of_range_ids to 'drop' or 'clip'."
        )
    # The conversion would wrap ids that an int32 cannot hold. Replace them first.
    is_foreign = is_outside & ((ids < 0) | (ids >= PADDING_ROW_ID))
    largest = PADDING_ROW_ID - 1
    replacement = np.where(ids < 0, -1, -1 if policy != "clip" else largest)
    kept = np.where(is_foreign, 0, ids).astype(np.int32)
    return np.where(is_foreign, replacement, kept).astype(np.int32)


def _pad_ragged(
    checked: list[DenseIds | RaggedShards],
    plan: AnyPlan,
    sizes: BufferSizes | None,
    num_parts: int,
) -> list[FeatureIds]:
    """Pads ragged features, whose sizes are chosen together."""
    demands = {
        i: ids.demand(feature)
        for i, (ids, feature) in enumerate(zip(checked, plan.features, strict=True))
        if isinstance(ids, RaggedShards)
    }
    if num_parts > 1 and demands:
        agreed = agree_on_demands(list(demands.values()), sizes)
        demands = dict(zip(demands, agreed, strict=True))
    if sizes is None:
        chosen = [size_of_batch(demand) for demand in demands.values()]
    else:
        chosen = sizes.choose(list(demands.values()))
    size_of = dict(zip(demands, chosen, strict=True))
    return [
        ids if isinstance(ids, DenseIds) else ids.padded(size_of[i])
        for i, ids in enumerate(checked)
    ]


def _fill_empty_samples(ids: RaggedIds) -> RaggedIds:
    """Gives each sample without a place one that holds padding, for `default_id`."""
    row_splits, weights = np.asarray(ids.row_splits), ids.weights
    is_empty = row_splits[1:] == row_splits[:-1]
    places = row_splits[:-1][is_empty]
    return RaggedIds(
        values=np.insert(np.asarray(ids.values), places, PADDING_ROW_ID),
        row_splits=row_splits + np.concatenate([[0], np.cumsum(is_empty)]),
        weights=None if weights is None else np.insert(weights, places, 0.0),
    )

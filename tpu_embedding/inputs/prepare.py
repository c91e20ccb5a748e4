"""Checks a batch on the host, and gives ragged features a static size.

Dense int32 ids that lie inside their tables may enter a jitted step directly. This
module does what a jitted step cannot do: raise an error that names the feature and the
id, read 64-bit ids, and split ragged features by shard.
"""

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import numpy as np

from tpu_embedding.inputs.buffer_sizes import BufferSizes, choose_sizes
from tpu_embedding.inputs.containers import (
    HostIds,
    batch_shape_of,
    is_real,
    read_ids,
)
from tpu_embedding.inputs.ragged_shards import demand_of, from_sparse, pad_to_shards
from tpu_embedding.inputs.shard_inputs import (
    check_dtypes,
    feature_shape,
    refuse_unequal_batches,
)
from tpu_embedding.plan.features import FeaturePlan, InputPlan
from tpu_embedding.plan.plan import AnyPlan, EmbeddingPlan
from tpu_embedding.types import (
    DenseIds,
    RaggedIds,
    ShardedRaggedIds,
    SparseIds,
    ids_of,
    with_ids,
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
        leaves are integer arrays `[batch]` or `[batch, valence]` (unused positions hold
        `PADDING_ROW_ID`), nested lists, `DenseIds`, `RaggedIds`, `SparseIds`, or
        objects with the fields of `tf.RaggedTensor` or `tf.SparseTensor`. Global; any
        integer dtype. For tables of 64-bit ids, also pairs of words of 32 bits.
      plan: plan of the layer, or its part `EmbeddingPlan.for_loaders()`.
      weights: None, or the same nest with weights, or None, per feature: in the form of
        the ids, or an array; for ragged and sparse features `[num_values]`.
      sizes: remembers the sizes of earlier batches; None: each batch has its own.
      samples: `"global"`: the features are those of the global batch. `"process"`: of
        the samples `plan.process_samples(batch_size)`. All processes then call this
        function for each batch, as they agree on the sizes of ragged features.

    Returns:
      The nest with NumPy arrays: int32 ids, or pairs of words for tables of 64-bit
      ids, and float32 weights. Pass it to the layer, or to
      `tpu_embedding.inputs.shard_batch` first, with the same `samples`.

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
    read = list(map(_read_feature, plan.flatten(features), plan.features))
    _refuse_batches(read, num_parts, plan)
    weight_leaves: list[Any] = [None] * len(read)
    if weights is not None:
        weight_leaves = plan.flatten(weights, "weights")
    checked = list(map(_check_feature, read, weight_leaves, plan.features))
    part = InputPlan(
        features=plan.features,
        feature_tree=plan.feature_tree,
        num_shards=plan.num_shards // num_parts,
    )
    padded = _pad_ragged(checked, part, sizes, num_parts)
    for ids, feature in zip(padded, plan.features, strict=True):
        feature_shape(ids, feature, part)  # rejects shapes that do not fit
    return plan.unflatten(list(map(_for_step, padded, plan.features)))


def _for_step(ids: DenseIds | ShardedRaggedIds, feature: FeaturePlan) -> Any:
    """Returns the ids of a feature in the container that the step takes."""
    if isinstance(ids, DenseIds) and ids.weights is None:
        return feature.inputs.for_step(ids.ids)
    return feature.inputs.for_step(ids)


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

    def put(array):
        array = _check_fits_int32(np.asarray(array))
        if num_parts > 1 and array.ndim:
            return _put_part(array, plan, num_parts)
        sharding = plan.sharding_of_samples(array.shape)
        if sharding.is_fully_addressable:
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    return jax.tree.map(put, batch)


def _put_part(array: np.ndarray, plan: EmbeddingPlan, num_parts: int) -> jax.Array:
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


def _check_fits_int32(array: np.ndarray) -> np.ndarray:
    """Rejects integers that JAX would cut to their lower half."""
    has_64_bits = np.issubdtype(array.dtype, np.integer) and array.dtype.itemsize > 4
    if has_64_bits and array.size and not jax.config.read("jax_enable_x64"):
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
    host_ids = read_ids(feature.inputs.read(ids, feature), f"feature {feature.name!r}")
    shape = batch_shape_of(host_ids)
    if isinstance(host_ids, SparseIds):
        if len(shape) > 1 and feature.config.output_shape is None:
            raise ValueError(
                f"Ids of feature {feature.name!r} have {len(shape)} axes of samples, "
                f"{shape}; set FeatureConfig.output_shape to {shape}."
            )
    if math.prod(shape) == 0:
        raise ValueError(
            f"Feature {feature.name!r} must have at least one sample, got a batch of "
            f"shape {shape}."
        )
    return host_ids


def _refuse_batches(read: list[HostIds], num_parts: int, plan: AnyPlan) -> None:
    """Rejects unequal batches, and parts that a process cannot deal to its devices."""
    refuse_unequal_batches(
        (feature, math.prod(batch_shape_of(ids)))
        for ids, feature in zip(read, plan.features, strict=True)
        if batch_shape_of(ids)
    )
    if num_parts == 1:
        return
    num_shards = plan.num_shards // num_parts
    for ids, feature in zip(read, plan.features, strict=True):
        batch_size = math.prod(batch_shape_of(ids))
        if feature.config.output_shape is not None and not feature.config.has_own_batch:
            raise ValueError(
                f"Feature {feature.name!r} has an output_shape, so processes cannot "
                "pass parts of it; pass the global batch with samples='global'."
            )
        if batch_size % num_shards:
            raise ValueError(
                f"Feature {feature.name!r} must have a multiple of {num_shards} "
                "samples with samples='process', as many as the process has devices, "
                f"got {batch_size}; pad the batch with samples of weight 0."
            )


def _check_feature(
    host_ids: HostIds, weights: Any, feature: FeaturePlan
) -> DenseIds | RaggedIds:
    """Returns checked ids and float32 weights; none stays sparse."""
    weights = _read_weights(weights, host_ids, feature)
    is_dense, values = isinstance(host_ids, DenseIds), np.asarray(ids_of(host_ids))
    if not values.size and not is_dense:
        values = values.astype(np.int32)  # NumPy takes empty lists for floats.
    check_dtypes(values, weights, feature)
    # Dense ids need marks of positions without an id. Ragged and sparse ids have them
    # where `hash_ids` or a `Vocabulary`, which return int32, was given padding.
    holds_padding = is_dense or values.dtype == np.int32
    where = "position" if is_dense else "value"
    checked = feature.inputs.check(values, holds_padding, feature, where)
    ids = with_ids(host_ids, checked)
    if isinstance(ids, SparseIds):
        return from_sparse(ids, weights, feature)
    return dataclasses.replace(ids, weights=weights)


def _read_weights(
    weights: Any, host_ids: HostIds, feature: FeaturePlan
) -> np.ndarray | None:
    """Returns the weights as float32, in the order of the values of the ids."""
    if weights is None:
        weights = host_ids.weights
    if weights is None:
        return None
    owner = f"feature {feature.name!r}"
    read = read_ids(weights, owner, "Weights")
    if read.weights is not None:
        raise ValueError(
            f"Weights of {owner} must be held instead of ids, got a "
            f"{type(read).__name__} that has weights of its own."
        )
    if not isinstance(read, DenseIds):
        _check_same_places(read, host_ids, owner)
    array = np.asarray(ids_of(read))
    if not is_real(array.dtype):
        raise TypeError(
            f"Weights of {owner} must be real numbers, got dtype {array.dtype}."
        )
    with np.errstate(over="ignore"):  # It becomes infinite, which is rejected.
        array = array.astype(np.float32)
    is_finite = np.isfinite(array)
    if not is_finite.all():
        position = tuple(int(i) for i in np.argwhere(~is_finite)[0])
        raise ValueError(
            f"Weights of {owner} must be finite, got {array[position]} at {position}."
        )
    return array


def _check_same_places(weights: HostIds, ids: HostIds, owner: str) -> None:
    """Rejects ragged or sparse weights whose structure differs from the ids'."""
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


def _pad_ragged(
    checked: list[DenseIds | RaggedIds],
    part: InputPlan,
    sizes: BufferSizes | None,
    num_parts: int,
) -> list[Any]:
    """Pads ragged features, whose sizes are chosen together."""
    demands = {
        i: demand_of(ids, feature, part.num_shards)
        for i, (ids, feature) in enumerate(zip(checked, part.features, strict=True))
        if isinstance(ids, RaggedIds)
    }
    chosen = choose_sizes(list(demands.values()), sizes, num_parts)
    padded: list[Any] = list(checked)
    for i, size in zip(demands, chosen, strict=True):
        padded[i] = pad_to_shards(padded[i], part.num_shards, size, num_parts)
    return padded

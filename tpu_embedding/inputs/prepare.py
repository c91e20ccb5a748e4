"""Checks a batch on the host and pads ragged features to a static size.

A jitted step takes dense int32 ids as they are. This module does what the step can't:
raise errors that name the feature and the id, read 64-bit ids, and split ragged ids by
shard.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np

from tpu_embedding.argument_checks import about, invalid
from tpu_embedding.inputs.buffer_sizes import BufferSizes, RaggedDemand, choose_sizes
from tpu_embedding.inputs.containers import MAX_SAMPLES, HostIds, read_ids
from tpu_embedding.inputs.shard_inputs import (
    check_equal_batches,
    checked_shape,
)
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import AnyPlan, EmbeddingPlan
from tpu_embedding.types import (
    DenseIds,
    RaggedIds,
    ShardedRaggedIds,
    SparseIds,
    ids_of,
    padding_of,
    with_ids,
)

Samples = Literal["global", "process"]
"""Samples that a process passes: the global batch or only its devices' samples."""


def prepare_features(
    features: Any,
    plan: AnyPlan,
    weights: Any = None,
    sizes: BufferSizes | None = None,
    *,
    samples: Samples = "global",
) -> Any:
    """Checks a batch on the host and pads it to static shapes.

    Ragged features are split by shard and padded, without losing ids. Each new padded
    size recompiles the step, so pass one `BufferSizes` to all your calls: sizes then
    settle after one or two changes. Without it, a size starts at
    `FeatureConfig.expected_valence` ids per sample, and doubles until it holds the
    batch.

    Args:
      features: nest like the plan's `feature_config`. Dicts may omit features. Leaves
        are integer arrays, nested lists, `DenseIds`, `RaggedIds`, `SparseIds`, or
        objects with the fields of `tf.RaggedTensor` or `tf.SparseTensor`. Arrays are
        `[batch]` or `[batch, valence]`, with `PADDING_ROW_ID` in unused positions. Ids
        may have any integer dtype. Tables with 64-bit ids also take pairs of 32-bit
        words.
      plan: plan of the layer, or its part `EmbeddingPlan.for_loaders()`.
      weights: the same nest with weights or None per feature. Weights have the same
        form as the ids, or are an array. For ragged and sparse features, the array is
        `[num_values]`. Defaults to the weights in the id containers.
      sizes: sizes from earlier batches. By default, each batch has its own.
      samples: `"global"` if you pass the global batch, `"process"` if you pass only the
        samples for this process, `plan.process_samples(batch_size)`. If `"process"`,
        all processes must call this function for each batch, to agree on ragged sizes.

    Returns:
      The nest with NumPy arrays. Ids are int32, or pairs of 32-bit words for tables
      with 64-bit ids. Weights are float32. Pass the nest to the layer, or first to
      `tpu_embedding.inputs.shard_batch` with the same `samples`.

    Raises:
      TypeError: if ids are not integers, or their container is ambiguous.
      ValueError: if the nest has a different structure, or shapes do not fit each
        other. Also raised if an id is outside its table and the policy is `"error"`.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> prepare_features({"watched": [[1, 2], [3]]}, plan)["watched"].batch_size
      2
    """
    plan, leaves = plan.match(features)
    num_parts = num_parts_of(samples, plan)
    num_shards = plan.num_shards // num_parts
    weight_leaves: list[Any] = [None] * len(leaves)
    if weights is not None:
        weight_leaves = plan.flatten(weights, "weights")
    read = list(map(_read_feature, leaves, weight_leaves, plan.features))
    # Check all forms first, so that an invalid batch doesn't change sizes.
    shapes = list(map(checked_shape, read, plan.features))
    check_equal_batches(shapes, plan.features)
    for shape, feature in zip(shapes, plan.features, strict=True):
        config = feature.config
        has_shape = config.output_shape is not None and not config.has_own_batch
        if num_parts > 1 and has_shape:
            rule = f"be 'global', because feature {feature.name!r} has an output_shape"
            raise invalid("samples", rule, "process")
        if num_parts > 1 and shape.batch_size % num_shards:
            raise _uneven(f"Feature {feature.name!r}", num_shards, shape.batch_size)
    checked = list(map(_check_values, read, plan.features))
    padded = _pad_ragged(checked, plan.features, num_shards, sizes, num_parts)
    for i, (ids, feature) in enumerate(zip(padded, plan.features, strict=True)):
        # Plain arrays and `DenseIds` would compile two programs for the same batch.
        if isinstance(ids, DenseIds) and ids.weights is None:
            ids = ids.ids
        padded[i] = feature.inputs.for_step(ids)
    return plan.unflatten(padded)


def shard_batch(batch: Any, plan: EmbeddingPlan, *, samples: Samples = "global") -> Any:
    """Puts a nest of arrays on the plan's devices, split along their first axis.

    Args:
      batch: nest of arrays on the host.
      plan: plan of the layer.
      samples: if `"global"`, each process passes the same global batch. Arrays whose
        first axis is not a multiple of the device count are then copied to each device.
        If `"process"`, each process passes only the samples
        `plan.process_samples(batch_size)`, in arrays with equal shapes.

    Returns:
      The nest with global arrays.

    Raises:
      ValueError: if an integer does not fit in 32 bits, or a process cannot split its
        samples over its devices.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> batch = prepare_features({"watched": np.arange(8)}, plan)
      >>> shard_batch(batch, plan)["watched"].sharding == plan.batch_sharding
      True
    """
    num_parts = num_parts_of(samples, plan)
    num_shards = plan.num_shards // num_parts

    def put(array):
        array = np.asarray(array)
        has_64_bits = np.issubdtype(array.dtype, np.integer) and array.itemsize > 4
        if has_64_bits and array.size and not jax.config.read("jax_enable_x64"):
            # JAX would truncate 64-bit integers.
            low, high = array.min(), array.max()
            if low < np.iinfo(np.int32).min or high > np.iinfo(np.int32).max:
                fix = "Pass ids through prepare_features first."
                rule = "fit in int32"
                raise invalid("shard_batch: batch", rule, [int(low), int(high)], fix)
        if num_parts > 1 and array.ndim:
            if array.shape[0] % num_shards:
                raise _uneven("shard_batch: batch", num_shards, array)
            return jax.make_array_from_process_local_data(
                plan.batch_sharding,
                array,
                (array.shape[0] * num_parts, *array.shape[1:]),
            )
        sharding = plan.sharding_of_samples(array.shape)
        if sharding.is_fully_addressable:
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    return jax.tree.map(put, batch)


def num_parts_of(samples: Samples, plan: AnyPlan) -> int:
    """Counts the parts in which a batch is passed. A global batch has one part."""
    if samples not in get_args(Samples):
        fix = "Use 'process' if each process passes only its own samples."
        raise invalid("samples", f"be one of {get_args(Samples)}", samples, fix)
    if samples == "global":
        return 1
    if plan.num_process_parts is None:
        rule = "be 'global' unless devices of each process are consecutive in the mesh "
        fix = "Sort the mesh's devices by process_index, or pass the global batch."
        raise invalid("samples", f"{rule}and equal in number", samples, fix)
    return plan.num_process_parts


def _uneven(name: str, num_shards: int, value: Any) -> ValueError:
    rule = f"have a multiple of {num_shards} samples, the process's number of devices"
    fix = "Pad the batch with samples of weight 0, or pass samples='global'."
    return invalid(name, rule, value, fix)


def _read_feature(ids: Any, weights: Any, feature: FeaturePlan) -> HostIds:
    owner = f"feature {feature.name!r}"
    if ids is None:
        fix = "Pass its ids, or leave its key out of the batch."
        raise invalid(f"Ids of {owner}", "not be None", ids, fix)
    if isinstance(ids, ShardedRaggedIds):
        raise invalid(f"Ids of {owner}", "not be prepared twice", ids, kind=TypeError)
    host_ids = read_ids(feature.inputs.read(ids, feature), owner)
    weights = host_ids.weights if weights is None else weights
    if weights is None:
        return host_ids
    read = read_ids(weights, owner, "Weights")
    # Weight lists of equal lengths look like a dense array.
    if isinstance(host_ids, RaggedIds) and np.ndim(ids_of(read)) == 2:
        read = RaggedIds.from_lists(ids_of(read))
    if read.weights is not None:
        rule = "be the values of their container, without weights of its own"
        raise invalid(f"Weights of {owner}", rule, read)
    if not isinstance(read, DenseIds):
        _check_same_positions(read, host_ids, owner)
    return dataclasses.replace(host_ids, weights=np.asarray(ids_of(read)))


def _check_same_positions(weights: HostIds, ids: HostIds, owner: str) -> None:
    field = f"Weights of {owner}"
    if type(ids) is not type(weights):
        rule = f"be an array or {type(ids).__name__}, like its ids"
        raise invalid(field, rule, weights, kind=TypeError)
    names = (
        ("indices", "dense_shape") if isinstance(ids, SparseIds) else ("row_splits",)
    )
    for name in names:
        expected, given = (np.asarray(getattr(x, name)) for x in (ids, weights))
        if not np.array_equal(expected, given):
            text = f"{field} must have the same {name} as its ids, got"
            for owner, array in (("ids", expected), ("weights", given)):
                shown = np.array2string(array, threshold=20, separator=", ")
                text += f"\n  {owner}: {shown}"
            raise about(ValueError(text), field, weights)


def _check_values(host_ids: HostIds, feature: FeaturePlan) -> DenseIds | RaggedIds:
    """Checks ids and weights by value. Sparse ids become dense or ragged."""
    weights = host_ids.weights
    if weights is not None:
        with np.errstate(over="ignore"):  # Infinity is rejected below.
            weights = np.asarray(weights).astype(np.float32)
        is_finite = np.isfinite(weights)
        if not is_finite.all():
            position = tuple(int(i) for i in np.argwhere(~is_finite)[0])
            fix = f"Its position is {position}. Use 0 for missing weights."
            value = float(weights[position])
            name = f"Weights of feature {feature.name!r}"
            raise invalid(name, "be finite", value, fix)
    is_dense, values = isinstance(host_ids, DenseIds), np.asarray(ids_of(host_ids))
    # Dense ids mark positions without an id. Ragged and sparse ids contain such marks
    # only if `hash_ids` or a `Vocabulary` was given padding. Their results are int32.
    holds_padding = is_dense or values.dtype == np.int32
    where = "position" if is_dense else "value"
    values = feature.inputs.check(values, holds_padding, feature, where)
    ids = dataclasses.replace(with_ids(host_ids, values), weights=weights)
    return _from_sparse(ids, feature) if isinstance(ids, SparseIds) else ids


def _from_sparse(ids: SparseIds, feature: FeaturePlan) -> RaggedIds | DenseIds:
    """Turns checked sparse ids into ragged ones, or into dense ones for sequences."""
    # In a sequence, the last coordinate is the position, so gaps stay empty. Otherwise,
    # it only orders ids within a sample.
    axes: Any = tuple(np.asarray(ids.indices).astype(np.int64, copy=False).T)
    largest = np.iinfo(np.int64).max  # Largest index. A uint64 size may be larger.
    shape = tuple(min(int(size), largest) for size in ids.dense_shape)
    # NumPy checks all coordinates in C. If it raises, search for the wrong one.
    try:
        samples = np.ravel_multi_index(axes[:-1], shape[:-1])
        positions = np.ravel_multi_index(axes[-1:], shape[-1:])
    except ValueError:
        given = np.asarray(ids.indices)
        is_outside = ((given < 0) | (given >= np.asarray(shape))).any(axis=1)
        i = int(is_outside.argmax())
        name = f"indices of feature {feature.name!r}"
        rule = f"be within dense_shape {list(shape)} at value {i}"
        raise invalid(name, rule, given[i].tolist()) from None
    batch_size, values = math.prod(shape[:-1]), np.asarray(ids.values)
    if length := feature.config.max_sequence_length:
        if batch_size * length > MAX_SAMPLES:
            name = f"dense_shape of feature {feature.name!r}"
            most = f"{MAX_SAMPLES // length} samples for max_sequence_length={length}"
            raise invalid(name, f"have at most {most}", batch_size)
        is_kept = positions < length
        targets = samples[is_kept] * np.int64(length) + positions[is_kept]
        # Coordinates are usually in order, so comparing neighbors avoids most sorts.
        ascending = targets
        if not (targets[1:] > targets[:-1]).all():
            ascending = np.sort(targets)
        is_repeated = ascending[1:] == ascending[:-1]
        if is_repeated.any():
            repeated = int(ascending[is_repeated.argmax()])
            field = f"indices of feature {feature.name!r}"
            rule = "occur only once in a sequence"
            raise invalid(field, rule, list(divmod(repeated, length)))
        matrix = np.full(batch_size * length, padding_of(values.dtype))
        matrix[targets] = values[is_kept]
        return DenseIds(ids=matrix.reshape(batch_size, length))
    # Sort only if neighbors are out of order. The sort is stable, so ids with
    # equal coordinates keep their order, as in a batch that is already sorted.
    weights, before, after = ids.weights, samples[:-1], samples[1:]
    in_order = (after > before) | (positions[1:] >= positions[:-1])
    if not in_order.all() or not (after >= before).all():
        order = np.lexsort((positions, samples))
        values = values[order]
        weights = None if weights is None else weights[order]
    row_splits = np.zeros(batch_size + 1, np.int64)
    np.cumsum(np.bincount(samples, minlength=batch_size), out=row_splits[1:])
    return RaggedIds(values=values, row_splits=row_splits, weights=weights)


def _pad_ragged(
    checked: list[DenseIds | RaggedIds],
    features: Sequence[FeaturePlan],
    num_shards: int,
    sizes: BufferSizes | None,
    num_parts: int,
) -> list[Any]:
    # Processes exchange demands once per batch, and a growth resizes all features, so
    # collect the demands first.
    splits_by_feature, demands = {}, []
    for i, (ids, feature) in enumerate(zip(checked, features, strict=True)):
        if not isinstance(ids, RaggedIds):
            continue
        row_splits = np.asarray(ids.row_splits).astype(np.int64, copy=False)
        batch_size = len(row_splits) - 1
        samples = -(-batch_size // num_shards)
        ends = np.arange(num_shards)[:, None] * samples + np.arange(samples + 1)
        # Past the last sample, splits repeat the last end, which adds empty samples.
        splits = splits_by_feature[i] = row_splits[np.minimum(ends, batch_size)]
        lengths = np.diff(row_splits).astype(np.float64)
        demands.append(
            RaggedDemand(
                feature_name=feature.name,
                expected_valence=feature.config.expected_valence,
                samples_per_shard=samples,
                num_ids=int((splits[:, -1] - splits[:, 0]).max()),
                num_samples=batch_size,
                valence_sum=float(lengths.sum()),
                valence_square_sum=float(lengths @ lengths),
            )
        )
    chosen = choose_sizes(demands, sizes, num_parts)
    padded: list[Any] = list(checked)
    for (i, splits), size in zip(splits_by_feature.items(), chosen, strict=True):
        padded[i] = _pad_to_shards(padded[i], splits, size, num_parts)
    return padded


def _pad_to_shards(
    ids: RaggedIds, splits: np.ndarray, size: int, num_parts: int
) -> ShardedRaggedIds:
    """Copies ids into buffers. `splits` are int64 `[num_shards, samples + 1]`."""
    bounds = np.append(splits[:, 0], splits[-1, -1])

    def padded(array: Any, padding: np.generic) -> np.ndarray:
        buffers = np.full((len(splits), size), padding)
        for buffer, begin, end in zip(buffers, bounds, bounds[1:], strict=False):
            buffer[: end - begin] = array[begin:end]
        return buffers

    values = np.asarray(ids.values)
    return ShardedRaggedIds(
        values=padded(values, padding_of(values.dtype)),
        row_splits=(splits - splits[:, :1]).astype(np.int32),
        weights=None if ids.weights is None else padded(ids.weights, np.float32(0)),
        batch_size=(len(np.asarray(ids.row_splits)) - 1) * num_parts,
    )

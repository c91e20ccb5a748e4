"""Names each id of a device's samples once, for models that transform rows.

The batches of a sequence model repeat most of their ids. Such a model looks up the
unique ids of each device as a plain feature, transforms each row once, and then gathers
the results into the positions of the samples with `expand`. The gradient of a value
sums over its positions.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tpu_embedding.inputs.buffer_sizes import BufferSizes, RaggedDemand, choose_sizes
from tpu_embedding.inputs.prepare import Samples, num_parts_of
from tpu_embedding.plan.plan import AnyPlan, EmbeddingPlan
from tpu_embedding.plan.shard_map import in_auto_axes, on_shards
from tpu_embedding.types import AxisSize, IdArray, RaggedIds, padding_of

_MAX_RANGE_PER_ID: Final = 16
"""Range of ids, per id, up to which a mark per value is faster than a sort."""


class UniqueIds(NamedTuple):
    """The different ids of each device's samples, and the position of each use of one.

    Attributes:
      ids: `[num_devices * size]`; the different ids of each device, rising, then
        padding. Look them up as a feature with `output_shape=(-1,)`.
      index: nest of the ids, each int32 `[batch]` or `[batch, valence]`: the position
        of each id among those of its device; `size` where there is no id.
      size: ids per device, padding included.
    """

    ids: np.ndarray
    index: Any
    size: int

    def attribute_ids(self, attributes: Any) -> np.ndarray:
        """Returns the attribute of each unique id, such as the artist of each item.

        Look the result up as one more feature with `output_shape=(-1,)`, whose rows are
        aligned with those of the ids. If many ids have one attribute, pass it to
        `unique_ids` first, and expand the rows of the attributes to those of the ids.

        Args:
          attributes: nest like the ids, with the attribute of the id in each position.
            All positions of an id must hold the same one, which is not checked.

        Returns:
          `[num_devices * size]`, padded like the ids.

        Raises:
          ValueError: if an attribute has more or fewer positions than the ids.

        Example:
          >>> import tpu_embedding as te
          >>> plan = te.make_plan(te.FeatureConfig(table=te.TableConfig(
          ...     vocabulary_size=10, dim=4)))
          >>> songs = te.inputs.unique_ids(np.array([[7, 2, 7]]), plan, "feature")
          >>> songs.attribute_ids(np.array([[5, 3, 5]]))[:2].tolist()
          [3, 5]
        """
        is_ragged = lambda x: isinstance(x, RaggedIds)  # noqa: E731
        leaves = jax.tree.leaves(attributes, is_leaf=is_ragged)
        indices = jax.tree.leaves(self.index)
        shapes = [index.shape for index in indices]
        arrays = [
            _as_array(x, shape[1] if len(shape) > 1 else None)
            for x, shape in zip(leaves, shapes, strict=False)
        ]
        if [x.shape for x in arrays] != shapes or len(leaves) != len(shapes):
            raise ValueError(
                "UniqueIds.attribute_ids needs an attribute in each position of the "
                f"ids, {shapes}, got {[x.shape for x in arrays]}; give both of one "
                "batch."
            )
        arrays = _as_one_dtype(arrays)
        num_devices = len(self.ids) // self.size
        found = np.full((num_devices, self.size), padding_of(arrays[0].dtype))
        parts = (_parts(x, num_devices) for x in (indices, arrays))
        for of_device, index, attribute in zip(found, *parts, strict=True):
            is_id = index < self.size
            of_device[index[is_id]] = attribute[is_id]
        return found.reshape(-1)


def unique_ids(
    ids: Any,
    plan: AnyPlan | None,
    feature: str,
    sizes: BufferSizes | None = None,
    *,
    length: int | None = None,
    samples: Samples = "global",
) -> UniqueIds:
    """Finds the different ids of the samples of each device. It runs on the host.

    Each device then reads and exchanges a row once, however many of its samples need
    it, and the model transforms it once. The gradient of `te.functional.expand` sums
    over the positions of a row before anything is sent. So an optimizer that asks for
    each occurrence of an id sees one per device and row.

    Args:
      ids: integers `[batch]` or `[batch, valence]`, with `PADDING_ROW_ID` in unused
        positions (or `2**64 - 1` among uint64), or `RaggedIds`. Or a nest of these,
        such as a history and a candidate, which share the rows.
      plan: plan of the layer, or its part `EmbeddingPlan.for_loaders()`; None: one
        device has all samples, as in a served model.
      feature: name of the feature that looks the unique ids up. Its `expected_valence`
        is the mean number of different ids on a device, divided by its samples, and
        sets the first size.
      sizes: remembers the sizes of earlier batches, as in `prepare_features`; None:
        each batch has a size of its own. No id is left out.
      length: positions of a sample of `RaggedIds`; longer samples are cut.
      samples: the samples that this process passes, as in `prepare_features`.

    Returns:
      The unique ids and the index. Ids that do not fit in 32 bits are for tables
      of 64-bit ids. Their padding is the reserved id, so their feature needs
      `out_of_range_ids="drop"`.

    Raises:
      ValueError: if the nest has arrays of different batches, or ragged ids without a
        length.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="song")
      >>> songs = te.FeatureConfig(table=table, output_shape=(-1,))
      >>> plan = te.make_plan({"songs": songs})
      >>> played = te.RaggedIds.from_lists([[7, 7, 2], [2]])
      >>> unique = te.inputs.unique_ids(played, plan, "songs", length=3)
      >>> batch = te.inputs.prepare_features({"songs": unique.ids}, plan)
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> rows = te.functional.lookup(tables, batch, plan).activations["songs"]
      >>> te.functional.expand(jnp.tanh(rows), unique.index, plan).shape
      (2, 3, 4)
    """
    num_processes = num_parts_of(samples, plan) if plan else 1
    is_ragged = lambda x: isinstance(x, RaggedIds)  # noqa: E731
    nest = jax.tree.map(lambda x: _as_array(x, length), ids, is_leaf=is_ragged)
    leaves, tree = jax.tree.flatten(nest)
    if len({len(x) for x in leaves}) != 1:
        raise ValueError(
            "unique_ids needs ids of one batch, got arrays of shapes "
            f"{[x.shape for x in leaves]}."
        )
    leaves = _as_one_dtype(leaves)
    num_devices = plan.num_shards // num_processes if plan else 1
    parts = list(_parts(leaves, num_devices))
    unique, ranks = zip(*map(_rank, parts), strict=True)
    expected_valence = _expected_valence(plan, feature) if plan else None
    demand = RaggedDemand(
        feature_name=feature,
        expected_valence=expected_valence,
        **_counts(unique, len(leaves[0])),
    )
    (size,) = choose_sizes([demand], sizes, num_processes)
    size = max(1, min(size, len(parts[0])))
    padded = np.full((num_devices, size), padding_of(leaves[0].dtype))
    for of_device, found in zip(padded, unique, strict=True):
        of_device[: len(found)] = found
    index = [np.where(x < 0, np.int32(size), x) for x in _joined(ranks, leaves)]
    return UniqueIds(
        ids=padded.reshape(-1), index=jax.tree.unflatten(tree, index), size=size
    )


def _as_array(ids: Any, length: int | None) -> np.ndarray:
    """Returns integers `[batch, ...]`. Ragged ids are cut or padded to `length`."""
    if not isinstance(ids, RaggedIds):
        array = np.asarray(ids)
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
            raise ValueError(
                "unique_ids needs integers [batch] or [batch, valence], or RaggedIds, "
                f"got {array.dtype} of shape {array.shape}; make RaggedIds of lists by "
                "te.RaggedIds.from_lists."
            )
        return array
    if length is None:
        raise ValueError(
            "unique_ids needs the length of a sample for RaggedIds, got length=None; "
            "give the length of the longest sequence."
        )
    values, row_splits = np.asarray(ids.values), np.asarray(ids.row_splits)
    if values.dtype != np.uint64:
        values = values.astype(np.int64)  # Fewer bits cannot mark padding.
    row_splits = row_splits.astype(np.int64, copy=False)
    is_used = np.arange(length) < np.diff(row_splits)[:, None]
    positions = row_splits[:-1, None] + np.arange(length)
    padded = np.full(is_used.shape, padding_of(values.dtype), values.dtype)
    padded[is_used] = values[positions[is_used]]
    return padded


def _as_one_dtype(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the ids as int32 if it holds all of them, else as uint64."""
    masks = [x != padding_of(x.dtype) for x in arrays]
    limits = np.iinfo(np.int32)
    used = (x[mask] for x, mask in zip(arrays, masks, strict=True))
    fits = all(
        not x.size or (x.min() >= limits.min and x.max() <= limits.max) for x in used
    )
    dtype = np.dtype(np.int32 if fits else np.uint64)
    return [
        np.where(mask, x.astype(dtype), padding_of(dtype))
        for x, mask in zip(arrays, masks, strict=True)
    ]


def _parts(arrays: list[np.ndarray], num_devices: int) -> Iterator[np.ndarray]:
    """Yields the ids of each device's samples, one array after the other."""
    per_device = -(-len(arrays[0]) // num_devices)
    for device in range(num_devices):
        samples = slice(device * per_device, (device + 1) * per_device)
        yield np.concatenate([x[samples].reshape(-1) for x in arrays])


def _joined(parts: Sequence[np.ndarray], arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Returns arrays of the given shapes from parts in the order of `_parts`."""
    joined = [np.empty(x.shape, np.int32) for x in arrays]
    per_device = -(-len(arrays[0]) // len(parts))
    for device, part in enumerate(parts):
        samples = slice(device * per_device, (device + 1) * per_device)
        start = 0
        for array in joined:
            of_device = array[samples]
            end = start + of_device.size
            of_device[...] = part[start:end].reshape(of_device.shape)
            start = end
    return joined


def _rank(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the different ids, rising, and the rank of each id; -1 for padding."""
    is_id = ids != padding_of(ids.dtype)
    used = ids[is_id]
    ranks = np.full(ids.shape, -1, np.int32)
    lowest, highest = (used.min(), used.max()) if used.size else (0, 0)
    num_values = int(highest) - int(lowest) + 1
    if num_values > _MAX_RANGE_PER_ID * used.size:
        unique, ranks[is_id] = np.unique(used, return_inverse=True)
        return unique, ranks
    offsets = used - lowest
    is_used = np.zeros(num_values, bool)
    is_used[offsets] = True
    rank_of = np.cumsum(is_used, dtype=np.int32) - 1
    ranks[is_id] = rank_of[offsets]
    return np.flatnonzero(is_used).astype(ids.dtype) + lowest, ranks


def _expected_valence(plan: AnyPlan, name: str) -> float | int | None:
    """Returns the expected valence of a feature.

    Raises:
      ValueError: if the plan has no feature of this name.
    """
    for feature in plan.features:
        if feature.name == name:
            return feature.config.expected_valence
    raise ValueError(
        "unique_ids needs the name of the feature that looks the ids up, got "
        f"{name!r}; the plan has {[feature.name for feature in plan.features]}."
    )


def _counts(unique: Sequence[np.ndarray], batch_size: int) -> dict[str, Any]:
    """Returns the numbers of a `RaggedDemand`, on which the buffer's size depends.

    Their spread is that of ids which come one by one at random, because the number of
    unique ids is no sum over samples.
    """
    counts = [len(ids) for ids in unique]
    mean = sum(counts) / batch_size
    return {
        "samples_per_shard": -(-batch_size // len(unique)),
        "num_ids": max(counts),
        "num_samples": batch_size,
        "valence_sum": float(sum(counts)),
        "valence_square_sum": batch_size * (mean**2 + mean),
    }


_MAX_SUMMED_POSITIONS: Final = 2**15
"""Positions whose gradients are converted to float32 at a time."""


def expand(
    values: Float[Array, "rows ..."], index: Any, plan: EmbeddingPlan | None
) -> Any:
    """Gathers the values of unique ids into the positions of the samples.

    Each device has the values of its samples, so nothing crosses the network. JAX
    differentiates it in reverse mode. The gradients of a value are summed in float32,
    and rounded once.

    Args:
      values: `[num_devices * size, ...]`, global, of any float type; one per unique id,
        such as the output of an MLP of its row.
      index: from `tpu_embedding.inputs.unique_ids`, or a nest of such arrays.
      plan: plan of the lookup; None: all values are on one device.

    Returns:
      Values of each position, of the same type: `[batch, ...]` or `[batch, positions,
      ...]`, like the index. Zeros where there is no id.

    Raises:
      ValueError: if the devices do not divide the values.

    Example:
      >>> values = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> expand(values, jnp.array([[1, 1, 0], [2, 0, 2]]), None)[:, :, 0].tolist()
      [[3.0, 3.0, 1.0], [0.0, 1.0, 0.0]]
    """
    num_parts = 1 if plan is None else plan.num_shards
    if values.shape[0] % num_parts:
        raise ValueError(
            "expand needs one value per unique id, with as many ids on each of "
            f"{num_parts} devices, got values of shape {values.shape}; transform all "
            "rows of the activation."
        )
    # All axes of a value lie side by side.
    flat = values.reshape(values.shape[0], -1)

    def expand_into(index: IdArray) -> Array:
        positions = jnp.asarray(index)
        if plan is None:
            expanded = _expand(flat, positions)
        else:
            expanded = _expand_on_mesh(flat, positions, plan)
        return expanded.reshape(*index.shape, *values.shape[1:])

    return jax.tree.map(expand_into, index)


def _expand_on_mesh(values: Array, index: Array, plan: EmbeddingPlan) -> Array:
    """Expands values on the devices that hold them."""
    spec, num_parts = plan.batch_sharding.spec, plan.num_shards
    batch_size, per_part = index.shape[0], values.shape[0] // num_parts

    def run(values: Array, index: Array) -> Array:
        # Samples without ids fill up the batch, so that the devices divide it.
        room = ((0, -batch_size % num_parts), *((0, 0),) * (index.ndim - 1))
        index = jnp.pad(index, room, constant_values=per_part)
        on_mesh = on_shards(_expand, plan, in_specs=(spec, spec), out_specs=spec)
        return on_mesh(values, index)[:batch_size]

    out_spec = plan.sharding_of_samples(index.shape).spec
    return in_auto_axes(run, plan, out_spec)(values, index)


@jax.named_scope("expand")
def _expand(values: Array, index: Array) -> Array:
    """Gathers values; zeros for an index past the last. Per device."""
    return _gather(values.shape[0], values, index)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(num_values: AxisSize, values: Array, index: Array) -> Array:
    del num_values
    return values.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _gather_forward(num_values, values, index):
    return _gather(num_values, values, index), index


def _gather_backward(num_values, index, cotangents):
    """Sums the cotangents of each value in float32.

    Narrow cotangents are converted some positions at a time: a float32 copy of all
    would take more memory than anything else in the step of a sequence model.
    """
    width, dtype = cotangents.shape[-1], cotangents.dtype
    index, cotangents = index.reshape(-1), cotangents.reshape(-1, width)
    num_positions, sum_dtype = index.shape[0], jnp.promote_types(dtype, jnp.float32)
    at_a_time = num_positions
    if dtype != sum_dtype:
        at_a_time = min(num_positions, _MAX_SUMMED_POSITIONS)

    def add(start, size, sums):
        positions = jax.lax.dynamic_slice_in_dim(index, start, size)
        summands = jax.lax.dynamic_slice_in_dim(cotangents, start, size)
        return sums.at[positions].add(
            summands.astype(sum_dtype), mode="drop", wrap_negative_indices=False
        )

    num_slices = num_positions // max(1, at_a_time)
    sums = jax.lax.fori_loop(
        0,
        num_slices,
        lambda i, sums: add(i * at_a_time, at_a_time, sums),
        jnp.zeros((num_values, width), sum_dtype),
    )
    start = num_slices * at_a_time
    sums = add(start, num_positions - start, sums)
    return sums.astype(dtype), None


_gather.defvjp(_gather_forward, _gather_backward)

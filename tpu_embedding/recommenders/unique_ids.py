"""Finds each device's unique ids, for models that transform rows.

Most ids in a batch of sequences occur several times. A model that looks up unique ids
transforms each row once. `expand` then gathers the results into the positions, and its
gradient sums over the positions of each id.
"""

import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tpu_embedding.argument_checks import invalid
from tpu_embedding.inputs.buffer_sizes import BufferSizes, RaggedDemand, choose_sizes
from tpu_embedding.inputs.prepare import Samples, num_parts_of
from tpu_embedding.plan.plan import AnyPlan, EmbeddingPlan
from tpu_embedding.plan.shard_map import in_auto_axes, on_shards
from tpu_embedding.types import AxisSize, IdArray, RaggedIds, padding_of

_MAX_RANGE_PER_ID: Final = 16
"""Maximum ratio of the ids' range to their number. Up to this ratio, it is faster to
mark each value in the range than to sort."""


class UniqueIds(NamedTuple):
    """The unique ids of each device, and the position of each id among them.

    Attributes:
      ids: `[num_devices * size]`: each device's unique ids in ascending order, then
        padding. Look them up as a feature with `output_shape=(-1,)`.
      index: int32 arrays `[batch]` or `[batch, valence]`, nested like the ids. They
        hold each id's position among its device's `ids`, or `size` for padding.
      size: ids per device, including padding.

    Example:
      >>> import tpu_embedding as te
      >>> unique = te.inputs.unique_ids(np.array([7, 2, 7]), None, "songs")
      >>> unique.index.tolist()
      [1, 0, 1]
    """

    ids: np.ndarray
    index: Any
    size: int

    def attribute_ids(self, attributes: Any) -> np.ndarray:
        """Finds an attribute for each unique id, such as the artist of a song.

        Look up the result as another feature with `output_shape=(-1,)`. Its rows are
        aligned with the rows for `ids`. If many ids share an attribute, first pass the
        result to `unique_ids`. Then look up the unique attributes, and expand their
        rows to the ids.

        Args:
          attributes: arrays nested like the ids, with an attribute in each position. An
            id must have the same attribute in all positions, which is not checked.

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
        leaves = jax.tree.leaves(attributes, is_leaf=_is_ragged)
        indices = jax.tree.leaves(self.index)
        shapes = [index.shape for index in indices]
        arrays = [
            _padded(leaf, shape[1] if len(shape) > 1 else None)
            for leaf, shape in zip(leaves, shapes, strict=False)
        ]
        if [x.shape for x in arrays] != shapes or len(leaves) != len(shapes):
            field, rule = "UniqueIds.attribute_ids: attributes", f"have shapes {shapes}"
            fix = "Pass an attribute for each id of the same batch."
            raise invalid(field, rule, [x.shape for x in arrays], fix)
        attribute, padding = _joined(arrays)
        index, _ = _joined(indices)
        num_devices = len(self.ids) // self.size
        per_device = -(-len(index) // num_devices)
        result = np.full((num_devices, self.size), padding)
        for device in range(num_devices):
            own_samples = slice(device * per_device, (device + 1) * per_device)
            is_id = index[own_samples] < self.size
            result[device, index[own_samples][is_id]] = attribute[own_samples][is_id]
        return result.reshape(-1)


def unique_ids(
    ids: Any,
    plan: AnyPlan | None,
    feature: str,
    sizes: BufferSizes | None = None,
    *,
    length: int | None = None,
    samples: Samples = "global",
) -> UniqueIds:
    """Finds the unique ids in the samples on each device. Runs on the host.

    Each device then reads and exchanges a row once, however many samples need the row.
    Your model also transforms the row once. `te.functional.expand` sums the gradients
    at all positions of a row before they are sent. So an optimizer that treats each
    occurrence of an id separately sees one occurrence per device and row.

    Args:
      ids: integers `[batch]` or `[batch, valence]`, or `RaggedIds`. In integer arrays,
        unused positions have `PADDING_ROW_ID`, or `2**64 - 1` if the ids are uint64.
        You can also pass a nest of these types, such as a dict with a history and a
        candidate that share the rows.
      plan: layer plan, or `plan.for_loaders()`. If it is None, one device has all
        samples, as in a served model.
      feature: name of the feature that looks up the unique ids. Its `expected_valence`
        is the mean number of unique ids on a device, divided by the device's sample
        count. It determines the first size.
      sizes: remembers earlier sizes, as in `prepare_features`. By default, each batch
        has its own size. No ids are dropped.
      length: positions per sample for `RaggedIds`. Longer samples are truncated.
      samples: the samples that this process passes; see `prepare_features`.

    Returns:
      The unique ids and the index. If an id doesn't fit in 32 bits, all ids are uint64,
      for tables with 64-bit ids. Their padding is the reserved id, so the feature needs
      `out_of_range_ids="drop"`.

    Raises:
      ValueError: if batch sizes differ, if ragged ids have no `length`, or if the plan
        has no such feature.

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
    num_processes, num_devices, expected_valence = 1, 1, None
    if plan is not None:
        num_processes = num_parts_of(samples, plan)
        num_devices = plan.num_shards // num_processes
        configs = {planned.name: planned.config for planned in plan.features}
        if feature not in configs:
            rule = f"look up the ids, like the plan's features {list(configs)}"
            raise invalid("unique_ids: feature", rule, feature)
        expected_valence = configs[feature].expected_valence
    leaves, tree = jax.tree.flatten(ids, is_leaf=_is_ragged)
    arrays = [_padded(leaf, length) for leaf in leaves]
    if len({len(x) for x in arrays}) != 1:
        batch_sizes = [len(x) for x in arrays]
        raise invalid("unique_ids: ids", "have one batch size", batch_sizes)
    joined, padding = _joined(arrays)
    batch_size, num_positions = joined.shape
    per_device = -(-batch_size // num_devices)
    index = np.empty(joined.shape, np.int32)
    unique = []
    for device in range(num_devices):
        own_samples = slice(device * per_device, (device + 1) * per_device)
        unique_of_device, index[own_samples] = _rank(joined[own_samples], padding)
        unique.append(unique_of_device)
    counts = list(map(len, unique))
    # Unique ids are not counted per sample, so the sum of squares is estimated as if
    # ids arrived independently at random.
    mean = sum(counts) / batch_size
    demand = RaggedDemand(
        feature_name=feature,
        expected_valence=expected_valence,
        samples_per_shard=per_device,
        num_ids=max(counts),
        num_samples=batch_size,
        valence_sum=float(sum(counts)),
        valence_square_sum=batch_size * (mean**2 + mean),
    )
    (size,) = choose_sizes([demand], sizes, num_processes)
    # A device never has more unique ids than positions. `attribute_ids` divides by the
    # size, so the size is at least 1.
    size = max(1, min(size, per_device * num_positions))
    padded = np.full((num_devices, size), padding)
    for device, count in enumerate(counts):
        padded[device, :count] = unique[device]
    index[index < 0] = size
    ends = np.cumsum([x[0].size for x in arrays])
    columns = np.split(index, ends[:-1], axis=1)
    shaped = [x.reshape(array.shape) for x, array in zip(columns, arrays, strict=True)]
    return UniqueIds(ids=padded.reshape(-1), index=tree.unflatten(shaped), size=size)


def _is_ragged(leaf: Any) -> bool:
    return isinstance(leaf, RaggedIds)


def _padded(ids: Any, length: int | None) -> np.ndarray:
    """Makes an integer array. Ragged ids are padded or truncated to `length`."""
    if not isinstance(ids, RaggedIds):
        array = np.asarray(ids)
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
            rule = "be integers [batch] or [batch, valence], or RaggedIds"
            fix = "Convert lists with te.RaggedIds.from_lists."
            raise invalid("unique_ids: ids", rule, array, fix)
        return array
    if length is None:
        fix = "Pass the length of the longest sequence."
        raise invalid("unique_ids: length", "be an int for RaggedIds", length, fix)
    values, row_splits = np.asarray(ids.values), np.asarray(ids.row_splits)
    if values.dtype != np.uint64:
        # Narrower types can't hold the padding.
        values = values.astype(np.int64)
    row_splits = row_splits.astype(np.int64, copy=False)
    is_used = np.arange(length) < np.diff(row_splits)[:, None]
    positions = row_splits[:-1, None] + np.arange(length)
    padded = np.full(is_used.shape, padding_of(values.dtype), values.dtype)
    padded[is_used] = values[positions[is_used]]
    return padded


def _joined(arrays: list[np.ndarray]) -> tuple[np.ndarray, np.generic]:
    """Joins arrays to `[batch, positions]`, and finds the padding for their dtype."""
    columns = [x.reshape(len(x), x[:1].size) for x in arrays]
    masks = [x != padding_of(x.dtype) for x in columns]
    limits = np.iinfo(np.int32)
    used = [x[mask] for x, mask in zip(columns, masks, strict=True)]
    fits = all(
        x.min(initial=0) >= limits.min and x.max(initial=0) <= limits.max for x in used
    )
    # Use int32 if possible, so that only tables with 64-bit ids get wide ids. A
    # negative id becomes the uint64 with the same bits.
    dtype = np.dtype(np.int32 if fits else np.uint64)
    joined = np.concatenate([x.astype(dtype) for x in columns], axis=1)
    padding = padding_of(dtype)
    joined[~np.concatenate(masks, axis=1)] = padding
    return joined, padding


def _rank(ids: np.ndarray, padding: Any) -> tuple[np.ndarray, np.ndarray]:
    """Finds the unique ids, ascending, and each id's rank. Padding has rank -1."""
    is_id = ids != padding
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


_MAX_SUMMED_POSITIONS: Final = 2**15
"""Maximum number of positions whose gradients are converted to float32 at once."""


def expand(
    values: Float[Array, "rows ..."], index: Any, plan: EmbeddingPlan | None
) -> Any:
    """Gathers values from unique ids into sample positions.

    Each device has the values for its samples, so nothing crosses the network. You can
    differentiate `expand` in reverse mode: all gradients for a value are summed in
    float32, and the sum is rounded once.

    Args:
      values: one value per unique id, such as an MLP's output for the id's row. The
        array is global, `[num_devices * size, ...]`, in any float type.
      index: index from `tpu_embedding.inputs.unique_ids`, or a nest with some of its
        arrays.
      plan: plan for the lookup. If it is None, all values are on one device.

    Returns:
      A value per position, in the same type: `[batch, ...]` or
      `[batch, positions, ...]`, like the index. Padding gives zeros.

    Raises:
      ValueError: if the device count doesn't divide the value count.

    Example:
      >>> values = jnp.array([[1.0, 2.0], [3.0, 4.0]])
      >>> expand(values, jnp.array([[1, 1, 0], [2, 0, 2]]), None)[:, :, 0].tolist()
      [[3.0, 3.0, 1.0], [0.0, 1.0, 0.0]]
    """
    num_devices = 1 if plan is None else plan.num_shards
    if values.shape[0] % num_devices:
        rule = f"have a value per unique id, equally many on {num_devices} devices"
        fix = "Transform all rows of the activation."
        raise invalid("expand: values", rule, list(values.shape), fix)
    flat = values.reshape(values.shape[0], -1)

    def expand_on_mesh(index: Array, plan: EmbeddingPlan) -> Array:
        batch_size, spec = index.shape[0], plan.batch_sharding.spec

        def run(values: Array, index: Array) -> Array:
            # Add samples without ids, so that all devices get equally many samples.
            room = ((0, -batch_size % num_devices), *((0, 0),) * (index.ndim - 1))
            no_id = values.shape[0] // num_devices
            index = jnp.pad(index, room, constant_values=no_id)
            on_mesh = on_shards(_expand, plan, in_specs=(spec, spec), out_specs=spec)
            return on_mesh(values, index)[:batch_size]

        out_spec = plan.sharding_of_samples(index.shape).spec
        return in_auto_axes(run, plan, out_spec)(flat, index)

    def expand_leaf(leaf: IdArray) -> Array:
        index = jnp.asarray(leaf)
        expanded = _expand(flat, index) if plan is None else expand_on_mesh(index, plan)
        return expanded.reshape(*index.shape, *values.shape[1:])

    return jax.tree.map(expand_leaf, index)


@jax.named_scope("expand")
def _expand(values: Array, index: Array) -> Array:
    """Gathers values on one device. An index past the end gives zeros."""
    return _gather(values.shape[0], values, index)


# JAX's own derivative would sum narrow cotangents in their narrow type.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(num_values: AxisSize, values: Array, index: Array) -> Array:
    del num_values
    return values.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _gather_forward(num_values, values, index):
    return _gather(num_values, values, index), index


def _gather_backward(num_values, index, cotangents):
    width, dtype = cotangents.shape[-1], cotangents.dtype
    index, cotangents = index.reshape(-1), cotangents.reshape(-1, width)
    num_positions, sum_dtype = index.shape[0], jnp.promote_types(dtype, jnp.float32)
    # Narrow cotangents are converted in slices, because a float32 copy of all of them
    # would take more memory than anything else in a sequence model's step.
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

"""Data types shared by users, lookups and optimizers.

All are pytrees of plain data, without mesh or device.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from tpu_embedding.argument_checks import right_names

PADDING_ROW_ID: Final = 2**31 - 1
"""Row id of unused positions, in padded user input and in internal buffers.

It is positive because JAX wraps -1 to the last row even under `mode="drop"`.
"""

NO_ID_64: Final = np.uint64(2**64 - 1)
"""Marks a position without an id among uint64 ids."""


def padding_of(dtype: np.dtype) -> np.generic:
    """Finds the value that marks a missing id among int32 rows or uint64 ids."""
    return NO_ID_64 if dtype == np.uint64 else np.int32(PADDING_ROW_ID)


IdArray = Array | np.ndarray

AxisSize = Any
"""Size of an axis: an int, or a symbolic dimension while a program is exported."""


@right_names(values="ids")
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseIds:
    """Ids with a fixed number of positions per sample, and their weights.

    If you have no weights, you can pass a plain array instead.

    Attributes:
      ids: global array of integers, `[batch]` or `[batch, valence]`. Set unused
        positions in a `[batch, valence]` array to `PADDING_ROW_ID`.
      weights: float32, shaped like `ids`. Defaults to weight 1 for every id.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table, combiner="sum"))
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> ids = np.array([[1, 2], [3, PADDING_ROW_ID]])
      >>> weighted = DenseIds(ids=ids, weights=np.array([[0.5, 2.0], [1.0, 0.0]]))
      >>> te.functional.lookup(tables, weighted, plan).activations.shape
      (2, 4)
    """

    ids: IdArray
    weights: IdArray | None = None


@right_names(
    ids="values",
    lengths="row_splits=np.cumsum([0, *lengths])",
    row_lengths="row_splits=np.cumsum([0, *row_lengths])",
    offsets="row_splits, the offsets followed by the number of values",
)
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedIds:
    """Any number of ids per sample, on the host.

    Compiled steps need static shapes, so convert your batches with
    `tpu_embedding.inputs.prepare_features`.

    Attributes:
      values: integers `[num_values]`, all ids in sample order.
      row_splits: integers `[batch + 1]` that rise from 0 to `num_values` and never
        decrease. Sample `i` owns `values[row_splits[i]:row_splits[i + 1]]`.
      weights: float32 `[num_values]`. Defaults to weight 1 for every id.

    Example:
      >>> ids = RaggedIds(values=np.array([1, 2, 3, 4]), row_splits=[0, 3, 3, 4])
      >>> ids.values[ids.row_splits[0] : ids.row_splits[1]].tolist()
      [1, 2, 3]
    """

    values: IdArray
    row_splits: IdArray
    weights: IdArray | None = None

    @classmethod
    def from_lists(
        cls, lists: Sequence[Sequence[Any]], weights: Sequence[Any] | None = None
    ) -> "RaggedIds":
        """Makes ragged ids from one list per sample.

        Args:
          lists: `[batch]` id lists. Their lengths may differ.
          weights: `[batch]` lists of numbers with the same lengths, or None.

        Raises:
          TypeError: if a sample is a string instead of a list.
          ValueError: if weights and ids differ in length.

        Example:
          >>> RaggedIds.from_lists([[1, 2, 3], [], [4]]).row_splits.tolist()
          [0, 3, 3, 4]
        """
        text = next((x for x in (lists, *lists) if isinstance(x, str | bytes)), None)
        if text is not None:
            raise TypeError(
                "RaggedIds.from_lists needs one list of ids per sample, got the string "
                f"{text!r}; write [[string] for string in strings] for one id each."
            )
        lengths = [len(ids) for ids in lists]
        values = [value for ids in lists for value in ids]
        # NumPy turns empty lists into float arrays, and pads strings to the longest.
        is_text = bool(values) and isinstance(values[0], str | bytes)
        dtype = object if is_text else None
        ragged = cls(
            values=np.asarray(values, dtype if values else np.int32),
            row_splits=np.cumsum([0, *lengths]),
        )
        if weights is None:
            return ragged
        lengths_of_weights = [len(sample_weights) for sample_weights in weights]
        if lengths_of_weights != lengths:
            raise ValueError(
                "RaggedIds.from_lists needs one weight per id, got lists of lengths "
                f"{lengths_of_weights} for ids of lengths {lengths}."
            )
        flat = [weight for sample_weights in weights for weight in sample_weights]
        return dataclasses.replace(ragged, weights=np.asarray(flat, np.float32))

    @classmethod
    def from_lengths(
        cls, values: IdArray, lengths: IdArray, weights: IdArray | None = None
    ) -> "RaggedIds":
        """Makes ragged ids from flat values, like a TorchRec `KeyedJaggedTensor`.

        Args:
          values: integers `[num_values]`, all ids in sample order.
          lengths: integers `[batch]`, ids per sample, at least 0.
          weights: float32 `[num_values]`, or None.

        Raises:
          TypeError: if the lengths are not integers.
          ValueError: if a length is negative, or they don't add up to the number of
            values or weights.

        Example:
          >>> RaggedIds.from_lengths([1, 2, 3, 4], [3, 0, 1]).row_splits.tolist()
          [0, 3, 3, 4]
        """
        values, sizes = np.asarray(values), np.asarray(lengths)
        if sizes.size and not np.issubdtype(sizes.dtype, np.integer):
            raise TypeError(
                "RaggedIds.from_lengths: lengths must be integers, got dtype "
                f"{sizes.dtype}."
            )
        # NumPy turns an empty list into a float array.
        sizes = sizes.astype(np.int64)
        counts = {"values": len(values)}
        if weights is not None:
            counts["weights"] = len(weights)
        if sizes.ndim != 1 or (sizes < 0).any() or {*counts.values()} != {sizes.sum()}:
            raise ValueError(
                "RaggedIds.from_lengths: lengths must be [batch], at least 0, and add "
                f"up to the number of values, got shape {list(sizes.shape)}, minimum "
                f"{sizes.min(initial=0)} and sum {sizes.sum()} for {counts}."
            )
        return cls(values=values, row_splits=np.cumsum([0, *sizes]), weights=weights)


@right_names(ids="values", shape="dense_shape")
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseIds:
    """Ids with their coordinates, as in `tf.sparse.SparseTensor`.

    The arrays are on the host. Convert them for your step with
    `tpu_embedding.inputs.prepare_features`.

    Attributes:
      indices: integers `[num_values, rank]`, rank at least 2, in any order. The last
        column is the position within the sample.
      values: integers `[num_values]`, the ids.
      dense_shape: integers `[rank]`. All axes but the last form the batch. With rank
        above 2, set `FeatureConfig.output_shape` to `dense_shape[:-1]`.
      weights: float32 `[num_values]`. Defaults to weight 1 for every id.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table))
      >>> indices = np.array([[0, 0], [0, 1], [2, 0]])
      >>> values = np.array([7, 8, 9])
      >>> ids = SparseIds(indices=indices, values=values, dense_shape=[3, 2])
      >>> te.inputs.prepare_features(ids, plan).batch_size
      3
    """

    indices: IdArray
    values: IdArray
    dense_shape: IdArray
    weights: IdArray | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedRaggedIds:
    """Ragged ids, split by shard and padded to a static size.

    Each shard gets `ceil(batch / num_shards)` consecutive samples. Empty samples fill
    up the last shards.

    Attributes:
      values: int32 `[num_shards, values_per_shard]`, global, padded with
        `PADDING_ROW_ID`.
      row_splits: int32 `[num_shards, samples_per_shard + 1]`, global. In each shard,
        the splits start at 0.
      weights: float32, shaped like `values`. Defaults to weight 1 for every id.
      batch_size: samples in the batch, without the empty ones.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table))
      >>> ids = te.inputs.prepare_features([[1, 2, 3], [4]], plan)
      >>> isinstance(ids, ShardedRaggedIds), ids.values.shape[0] == plan.num_shards
      (True, True)
    """

    values: IdArray
    row_splits: IdArray
    weights: IdArray | None = None
    batch_size: AxisSize = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowIds:
    """Row numbers that replace a feature's ids.

    Lookups take `RowIds` for tables whose ids are not row numbers. Note that they are
    valid for one step only, because the next step may give the rows to other ids. So
    store your ids between steps, never `RowIds`.

    Attributes:
      ids: int32, in the form of the feature: an array, `DenseIds` or
        `ShardedRaggedIds`. An id without a row is `PADDING_ROW_ID`.

    Example:
      >>> RowIds(jax.numpy.array([3, 1])).ids.tolist()
      [3, 1]
    """

    ids: Any


FeatureIds = IdArray | DenseIds | RaggedIds | SparseIds | ShardedRaggedIds | RowIds


def ids_of(feature: Any) -> Any:
    match feature:
        case DenseIds():
            return feature.ids
        case RaggedIds() | SparseIds() | ShardedRaggedIds():
            return feature.values
    return feature


def with_ids(feature: Any, ids: Any) -> Any:
    """Replaces a feature's ids; positions and weights stay."""
    match feature:
        case DenseIds():
            return dataclasses.replace(feature, ids=ids)
        case RaggedIds() | SparseIds() | ShardedRaggedIds():
            return dataclasses.replace(feature, values=ids)
    return ids


def batch_shape_of(ids: FeatureIds) -> tuple[AxisSize, ...]:
    """Finds the batch shape: all axes but the last, or all if there is only one."""
    match ids:
        case RaggedIds():
            return (np.shape(ids.row_splits)[0] - 1,)
        case ShardedRaggedIds():
            return (ids.batch_size,)
        case SparseIds():
            return tuple(int(size) for size in ids.dense_shape[:-1])
    shape = np.shape(ids_of(ids))
    return shape if len(shape) <= 1 else shape[:-1]


def is_integer(dtype: Any) -> bool:
    """Accepts integers of any width, but not bools and `timedelta64`."""
    # JAX knows int4 and similar types, which `np.issubdtype` does not know.
    return jax.numpy.issubdtype(dtype, np.integer) and np.dtype(dtype).kind != "m"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowUpdates:
    """A stacked table's sparse gradient or update, with distinct rows.

    Inside `shard_map`, the arrays hold one shard's rows. Outside, they concatenate all
    shards.

    Attributes:
      values: float32 `[num_rows, dim]`; zero in unused positions. It is the first
        pytree leaf, so code that reads the first dtype sees a float.
      row_ids: int32 `[num_rows]`, row ids within the shard. Unused positions hold
        `PADDING_ROW_ID`.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table), optimizer="adagrad")
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> result = te.functional.lookup(tables, np.array([1, 1, 2]), plan)
      >>> ones = np.ones((3, 4))
      >>> gradients = te.functional.compute_gradients(result.routing, ones, plan)
      >>> float(gradients.row_updates("stack_0").values.max())  # row 1 counts twice
      2.0
    """

    values: Float[Array, "num_rows dim"]
    row_ids: Int[Array, " num_rows"]


class RowRange(NamedTuple):
    """Half-open range of shard rows, `first_row` to `end_row`; int32 scalars."""

    first_row: Int[Array, ""]
    end_row: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupStats:
    """Global counts from one lookup, for metrics.

    Attributes:
      rounds: exchange rounds, int32 scalars by stack name. More than 1 means that skew
        spilled some ids to later rounds. Some backends look rows up without an exchange
        and count 0 rounds. They count 1 or more if the ids were beyond their limits.
      out_of_range: ids outside their table, int32 scalars by feature name. These ids
        were dropped or clipped; see `FeatureConfig.out_of_range_ids`.
      num_ids: ids in the batch, except padding and dropped ids, int32 scalars by stack
        name. Stacks whose ids stay on their device are missing from this dict and from
        `requested_rows`.
      requested_rows: rows that all devices requested from each shard, int32
        `[num_shards]` by stack name. A device requests equal ids once, unless the
        optimizer needs each occurrence.
      missing_rows: reads that returned NaN because the row was not on its device, int32
        scalars by stack name. The dict has only stacks whose devices may lack rows.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> ids = {"watched": np.array([1, 2, 99])}
      >>> stats = te.functional.lookup(tables, ids, plan).stats
      >>> int(stats.out_of_range["watched"])
      1
    """

    rounds: dict[str, Int[Array, ""]]
    out_of_range: dict[str, Int[Array, ""]]
    num_ids: dict[str, Int[Array, ""]]
    requested_rows: dict[str, Int[Array, " shards"]]
    missing_rows: dict[str, Int[Array, ""]] = dataclasses.field(default_factory=dict)

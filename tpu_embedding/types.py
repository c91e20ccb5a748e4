"""The values that travel between the user, the lookup and the optimizers.

Everything here is plain data: no mesh, no device, no arithmetic. All classes are
pytrees, so they pass through `jax.jit`, `jax.shard_map` and checkpoints.
"""

import dataclasses
from typing import Final, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

PADDING_ROW_ID: Final = 2**31 - 1
"""The row id that fills unused places, in ids that the user pads and in our buffers.

It is positive because JAX wraps -1 to the last row even under `mode="drop"`.
"""

IdArray = Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseIds:
    """Ids of a feature with a fixed number of places per sample, with weights.

    A plain array of ids means the same as `DenseIds(ids=array)`.

    Attributes:
      ids: integers `[batch]` or `[batch, valence]`, global. Unused places of a
        `[batch, valence]` array hold `PADDING_ROW_ID`.
      weights: float32 of the same shape, or None where every id weighs 1.
    """

    ids: IdArray
    weights: IdArray | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedIds:
    """Ids of a feature with any number of ids per sample, as they lie on the host.

    `tpu_embedding.prepare_features` turns it into `ShardedRaggedIds`, the static
    shape that a compiled step needs.

    Attributes:
      values: integers `[num_values]`, the ids of sample 0, then of sample 1, ...
      row_splits: integers `[batch + 1]`, rising from 0 to `num_values`; sample `i`
        owns `values[row_splits[i]:row_splits[i + 1]]`.
      weights: float32 `[num_values]`, or None where every id weighs 1.
    """

    values: IdArray
    row_splits: IdArray
    weights: IdArray | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseIds:
    """Ids of a feature by coordinates, as in `tf.sparse.SparseTensor`, on the host.

    Attributes:
      indices: integers `[num_values, rank]`, rank at least 2, in any order; the last
        column is the place within the sample.
      values: integers `[num_values]`.
      dense_shape: integers `[rank]`; all but the last make up the batch. With rank
        above 2, set `FeatureConfig.output_shape` to `dense_shape[:-1]`.
      weights: float32 `[num_values]`, or None where every id weighs 1.
    """

    indices: IdArray
    values: IdArray
    dense_shape: IdArray
    weights: IdArray | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedRaggedIds:
    """A ragged feature cut by shard and padded to a static size.

    Samples are dealt to the shards in order, `ceil(batch / num_shards)` each; the
    last shards may hold empty samples.

    Attributes:
      values: int32 `[num_shards, values_per_shard]`, global; padded with
        `PADDING_ROW_ID`.
      row_splits: int32 `[num_shards, samples_per_shard + 1]`, global; each row
        counts from 0 within its shard.
      weights: float32 like `values`, or None.
      batch_size: samples of the batch before it was padded to the shards.
    """

    values: IdArray
    row_splits: IdArray
    weights: IdArray | None = None
    batch_size: int = dataclasses.field(metadata={"static": True})


FeatureIds = IdArray | DenseIds | RaggedIds | SparseIds | ShardedRaggedIds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowUpdates:
    """A sparse gradient or update of one stacked table, each row at most once.

    Attributes:
      values: float32 `[num_rows, dim]`. `values` comes first among the leaves so
        that code which asks the first leaf for its dtype sees a float.
      row_ids: int32 `[num_rows]`, row within the shard; `PADDING_ROW_ID` where the
        place is unused, and its values are zero. Per shard inside `shard_map`; the
        shards' parts one after the other in the global view.
    """

    values: Float[Array, "num_rows dim"]
    row_ids: Int[Array, " num_rows"]


class RowRange(NamedTuple):
    """The rows of a shard from `first_row` to before `end_row`, int32 scalars."""

    first_row: Int[Array, ""]
    end_row: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupStats:
    """What a lookup counted, for the metrics of the step. Global values.

    Attributes:
      rounds: stack name to int32 scalar: exchanges it took; more than 1 under skew.
      out_of_range: feature name to int32 scalar: ids outside their table that were
        left out (or clipped, where the feature's policy says so).
    """

    rounds: dict[str, Int[Array, ""]]
    out_of_range: dict[str, Int[Array, ""]]

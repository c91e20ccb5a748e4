"""Data types that the user, the lookup and the optimizers exchange.

All of them are plain data: no mesh, no device, no arithmetic. The dataclasses and
`RowRange` are pytrees, so they pass through `jax.jit`, `jax.shard_map` and checkpoints.
"""

import dataclasses
from typing import Final, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

PADDING_ROW_ID: Final = 2**31 - 1
"""Row id of unused places, in padded user input and in internal buffers.

It is positive because JAX wraps -1 to the last row even under `mode="drop"`.
"""

IdArray = Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseIds:
    """Ids of a feature with a fixed number of places per sample, and their weights.

    A plain array of ids means the same as `DenseIds(ids=array)`.

    Attributes:
      ids: integers `[batch]` or `[batch, valence]`, global. Unused places of a
        `[batch, valence]` array hold `PADDING_ROW_ID`.
      weights: float32, shaped like `ids`. None means weight 1 for every id.
    """

    ids: IdArray
    weights: IdArray | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedIds:
    """Ids of a feature with any number of ids per sample, on the host.

    `tpu_embedding.prepare_features` converts it to `ShardedRaggedIds`, which has the
    static shape that a compiled step needs.

    Attributes:
      values: integers `[num_values]`, the ids of all samples, in sample order.
      row_splits: integers `[batch + 1]`, rising from 0 to `num_values`; sample `i`
        owns `values[row_splits[i]:row_splits[i + 1]]`.
      weights: float32 `[num_values]`. None means weight 1 for every id.
    """

    values: IdArray
    row_splits: IdArray
    weights: IdArray | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseIds:
    """Ids of a feature with their coordinates, as in `tf.sparse.SparseTensor`.

    It lives on the host; `tpu_embedding.prepare_features` converts it for the step.

    Attributes:
      indices: integers `[num_values, rank]`, rank at least 2, in any order. The last
        column is the position within the sample.
      values: integers `[num_values]`, the ids.
      dense_shape: integers `[rank]`. All axes but the last form the batch. With rank
        above 2, set `FeatureConfig.output_shape` to `dense_shape[:-1]`.
      weights: float32 `[num_values]`. None means weight 1 for every id.
    """

    indices: IdArray
    values: IdArray
    dense_shape: IdArray
    weights: IdArray | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedRaggedIds:
    """Ids of a ragged feature, split by shard and padded to a static size.

    Each shard gets `ceil(batch / num_shards)` consecutive samples. Empty samples fill
    up the last shards.

    Attributes:
      values: int32 `[num_shards, values_per_shard]`, global, padded with
        `PADDING_ROW_ID`.
      row_splits: int32 `[num_shards, samples_per_shard + 1]`, global. The splits of
        each shard start at 0.
      weights: float32, shaped like `values`. None means weight 1 for every id.
      batch_size: number of samples in the batch, without the empty ones.
    """

    values: IdArray
    row_splits: IdArray
    weights: IdArray | None = None
    batch_size: int = dataclasses.field(metadata={"static": True})


FeatureIds = IdArray | DenseIds | RaggedIds | SparseIds | ShardedRaggedIds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowUpdates:
    """A sparse gradient or update of one stacked table, with distinct rows.

    Per shard inside `shard_map`. The global view concatenates all shards.

    Attributes:
      values: float32 `[num_rows, dim]`; zero in unused places. It is the first pytree
        leaf, so code that reads the dtype of the first leaf sees a float.
      row_ids: int32 `[num_rows]`, row ids within the shard. Unused places hold
        `PADDING_ROW_ID`.
    """

    values: Float[Array, "num_rows dim"]
    row_ids: Int[Array, " num_rows"]


class RowRange(NamedTuple):
    """Half-open range of a shard's rows, `first_row` to `end_row`; int32 scalars."""

    first_row: Int[Array, ""]
    end_row: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupStats:
    """Counts of one lookup, for the metrics of the step. Global values.

    Attributes:
      rounds: exchange rounds per stack, int32 scalars by stack name. More than 1 means
        that some ids spilled to later rounds because of skew.
      out_of_range: ids outside their table, int32 scalars by feature name. The ids were
        dropped or clipped, as `FeatureConfig.out_of_range_ids` says.
    """

    rounds: dict[str, Int[Array, ""]]
    out_of_range: dict[str, Int[Array, ""]]

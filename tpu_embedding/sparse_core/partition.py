"""The ids of a stacked table as SparseCores take them, for lookup and update."""

import dataclasses

import jax
from jaxtyping import Array, Bool

from tpu_embedding.sparse_core.limits import Limits
from tpu_embedding.sparse_core.partitioned_ids import PartitionedIds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition:
    """The ids of a stack as SparseCores take them. Per shard.

    Attributes:
      ids: the ids, by SparseCore.
      fits: bool `[1]`, whether all SparseCores of all devices keep within the limits,
        and all gains are finite.
      limits: limits of the operations.
      num_samples: samples of this device, those that fill up SparseCores included.
    """

    ids: PartitionedIds
    fits: Bool[Array, "_"]
    limits: Limits = dataclasses.field(metadata={"static": True})
    num_samples: int = dataclasses.field(metadata={"static": True})

"""The gradient of a stacked table by sample, as SparseCores take it."""

import dataclasses

from jaxtyping import Array, Bool, Float

from tpu_embedding.sparse_core.limits import Limits
from tpu_embedding.sparse_core.partitioned_ids import PartitionedIds


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleGradients:
    """The gradient of a stack by sample. Per shard; it exists while a step is traced.

    Attributes:
      ids: ids of the samples, by SparseCore.
      values: float32 `[samples, width]`, cotangents of the samples.
      fits: bool scalar, whether the ids keep within the limits on all devices.
      limits: limits of the operation.
    """

    ids: PartitionedIds
    values: Float[Array, "samples width"]
    fits: Bool[Array, ""]
    limits: Limits

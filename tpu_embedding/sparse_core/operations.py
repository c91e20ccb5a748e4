"""XLA's SparseCore operations that look up and update embedding rows.

`lookup` and `update` run per shard, inside `shard_map`. On a TPU each is one custom
call, which exchanges ids and rows between all SparseCores of the slice. On other
devices each is plain JAX that computes the same.
"""

from jaxtyping import Array, Float

from tpu_embedding.sparse_core.limits import Limits
from tpu_embedding.sparse_core.partitioned_ids import PartitionedIds
from tpu_embedding.sparse_core.row_rule import RowRule


def unavailable_reason() -> str | None:
    """Returns why this installation cannot compile the operations; None if it can."""
    raise NotImplementedError


def lookup(
    ids: PartitionedIds,
    table: Float[Array, "rows width"],
    *,
    num_samples: int,
    limits: Limits,
    cores: int,
    axes: tuple[str, ...],
) -> Float[Array, "num_samples width"]:
    """Sums the rows of each sample, times their gains. Per shard; exchanges.

    Args:
      ids: from `partition_ids`; no count may exceed its limit on any device.
      table: rows of this device, those of each core one after the other.
      num_samples: samples of this device, a multiple of `8 * cores`.
      limits: those of `partition_ids`.
      cores: SparseCores per device.
      axes: mesh axes whose devices share the table: on a TPU, all of the program.
    """
    raise NotImplementedError


def update(
    ids: PartitionedIds,
    gradients: Float[Array, "num_samples width"],
    arrays: tuple[Float[Array, "rows width"], ...],
    hyperparameters: tuple[Float[Array, ""], ...],
    *,
    rule: RowRule,
    limits: Limits,
    cores: int,
    axes: tuple[str, ...],
) -> tuple[Float[Array, "rows width"], ...]:
    """Applies a rule to the rows that the samples looked up, once per row.

    The gradient of a row is the sum of its samples' gradients, times their gains, over
    all devices. Other rows keep their bits. Per shard; exchanges.

    Args:
      ids: see `lookup`.
      gradients: gradient of each sample's sum.
      arrays: table and slot variables, in the order of the optimizer's state.
      hyperparameters: `rule.values` gives them.
      rule: from `row_rule`.
      limits: see `lookup`.
      cores: see `lookup`.
      axes: see `lookup`.

    Returns:
      The new table and slot variables.
    """
    raise NotImplementedError

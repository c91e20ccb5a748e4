"""Chooses how many ids a SparseCore may send to a partition in one operation."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Bool

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.sparse_core.partitioned_ids import LargestCounts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Static sizes of the operations, per core and partition.

    Attributes:
      max_ids: ids that one core may send to one partition, a multiple of 8.
      max_unique: distinct rows among them, a multiple of 8.
      room: places of one core's region of the buffers of ids, a multiple of 8.
    """

    max_ids: int
    max_unique: int
    room: int


def choose_limits(
    num_ids: int,
    *,
    width: int,
    num_arrays: int,
    cores: int,
    devices: int,
    hardware: HardwareInfo,
) -> Limits:
    """Returns the limits for a batch.

    Args:
      num_ids: ids of one device in one step, padding included.
      width: columns of a stored row.
      num_arrays: the table and its slot variables.
      cores: SparseCores per device.
      devices: devices that share the table.
      hardware: gives the memory of a SparseCore.
    """
    raise NotImplementedError


def are_within(
    largest: LargestCounts, limits: Limits, axes: Sequence[str]
) -> Bool[Array, ""]:
    """Returns True on all devices if no count of any device exceeds its limit."""
    raise NotImplementedError

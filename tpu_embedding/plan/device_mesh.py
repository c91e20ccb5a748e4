"""Orders devices in a mesh: slice by slice, and process by process.

Neighbours on the last axis are then near each other, and the samples of a process are
consecutive, so that it can load them alone.
"""

from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh

SLICE_AXIS: Final = "slice"
"""Mesh axis along which devices lie in different slices."""

SHARD_AXIS: Final = "shard"


def device_mesh(
    devices: Sequence[Any] | None = None, *, num_slices: int | None = None
) -> Mesh:
    """Returns a mesh of devices: axis `shard`, or axes `slice` and `shard`.

    Args:
      devices: JAX devices; None takes all, those of other processes included.
      num_slices: number of equal slices to emulate on devices of one slice; None: the
        slices that the devices lie in.

    Raises:
      ValueError: if the devices cannot be split into so many equal slices.

    Example:
      >>> device_mesh(num_slices=2).axis_names
      ('slice', 'shard')
    """
    chosen = sorted(jax.devices() if devices is None else devices, key=_order_of)
    found = len({_slice_of(device) for device in chosen})
    if num_slices is not None and found not in (1, num_slices):
        raise ValueError(
            f"num_slices must be {found}, the slices that the devices lie in, got "
            f"{num_slices}."
        )
    num_slices = num_slices or found
    if num_slices == 1:
        return Mesh(np.asarray(chosen), (SHARD_AXIS,))
    if len(chosen) % num_slices:
        raise ValueError(
            f"num_slices must divide the number of devices, {len(chosen)}, got "
            f"{num_slices}."
        )
    return Mesh(np.asarray(chosen).reshape(num_slices, -1), (SLICE_AXIS, SHARD_AXIS))


def _slice_of(device: Any) -> int:
    # CPU and GPU devices have the number of their host in `slice_index`.
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def _order_of(device: Any) -> tuple[int, int, int]:
    return _slice_of(device), device.process_index, device.id

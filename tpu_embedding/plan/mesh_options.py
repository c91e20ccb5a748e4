"""Chooses mesh and hardware for a plan, and orders devices in a mesh.

Devices are ordered by slice, then by process. Neighbors on the last axis are then near
each other, and each process has consecutive samples, so that it can load only its own.
"""

import collections
from collections.abc import Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from tpu_embedding.argument_checks import about, invalid
from tpu_embedding.hardware import HardwareInfo, hardware_of_device

SLICE_AXIS: Final = "slice"
"""Mesh axis over slices."""

SHARD_AXIS: Final = "shard"


def device_mesh(
    devices: Sequence[Any] | None = None, *, num_slices: int | None = None
) -> Mesh:
    """Arranges devices in a mesh with axis `shard`, or axes `slice` and `shard`.

    Args:
      devices: JAX devices. Defaults to all devices in all processes.
      num_slices: how many equal slices to emulate if your devices are in one slice.
        Defaults to the number of real slices.

    Raises:
      ValueError: if the devices can't be split into this many equal slices.

    Example:
      >>> device_mesh(num_slices=2).axis_names
      ('slice', 'shard')
    """
    if isinstance(devices, int):
        line = f"Write te.device_mesh(jax.devices()[:{devices}])."
        rule = "be a list of JAX devices"
        raise invalid("te.device_mesh: devices", rule, devices, line, TypeError)
    chosen = sorted(jax.devices() if devices is None else devices, key=_order_of)
    sizes = collections.Counter(map(_slice_of, chosen))
    found = len(sizes)
    # One slice can be divided to emulate several, but real slices can't be regrouped.
    if num_slices is not None and found not in (1, num_slices):
        rule = f"be {found}, the number of slices of the devices"
        raise invalid("te.device_mesh: num_slices", rule, num_slices)
    # If a mesh row had devices from two slices, exchanges along the last axis would
    # cross slices.
    if len({*sizes.values()}) > 1:
        rule = "include equally many from each slice"
        raise invalid("te.device_mesh: devices", rule, dict(sizes))
    num_slices = num_slices or found
    if num_slices == 1:
        return Mesh(np.asarray(chosen), (SHARD_AXIS,))
    if len(chosen) % num_slices:
        rule = f"divide the number of devices, {len(chosen)}"
        raise invalid("te.device_mesh: num_slices", rule, num_slices)
    return Mesh(np.asarray(chosen).reshape(num_slices, -1), (SLICE_AXIS, SHARD_AXIS))


def _slice_of(device: Any) -> int:
    # On CPU and GPU devices, `slice_index` is the number of their host.
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else 0


def num_slices_of(mesh: Mesh) -> int:
    return len({_slice_of(device) for device in mesh.devices.flat})


def _order_of(device: Any) -> tuple[int, int, int]:
    return _slice_of(device), device.process_index, device.id


def choose_mesh(mesh: Any) -> Mesh:
    """Checks the mesh. Defaults to the one from `jax.set_mesh`, or else all devices."""
    if mesh is None:
        if jax.sharding.get_abstract_mesh() == AbstractMesh((), ()):
            return device_mesh()
        try:
            mesh = jax.sharding.get_mesh()
        except ValueError as error:
            raise ValueError(
                "mesh must be set when a plan is made inside jax.jit under "
                "jax.set_mesh, got None; pass mesh, or make the plan outside of jit. "
                f"({error})"
            ) from None
    if not isinstance(mesh, Mesh):
        line = "Write jax.make_mesh((jax.device_count(),), ('shard',))."
        rule = "be a jax.sharding.Mesh or None"
        raise invalid("mesh", rule, mesh, line, TypeError)
    if mesh.size == 0:
        raise invalid("mesh", "have devices", mesh, "Leave it out for all devices.")
    if set(mesh.axis_types) not in ({AxisType.Auto}, {AxisType.Explicit}):
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        text = "mesh axes must all be of type Auto or all of type Explicit, got "
        text += f"{kinds}; pass jax.make_mesh the same axis type for each axis."
        raise about(ValueError(text), "mesh", mesh)
    return mesh


def choose_hardware(hardware: Any, mesh: Mesh) -> HardwareInfo:
    """Checks the hardware, or detects it."""
    if hardware is None:
        return hardware_of_device(mesh.devices.flat[0])
    if not isinstance(hardware, HardwareInfo):
        line = "Write te.hardware.hardware_by_name(name)."
        rule = "be a HardwareInfo or None"
        raise invalid("hardware", rule, hardware, line, TypeError)
    return hardware

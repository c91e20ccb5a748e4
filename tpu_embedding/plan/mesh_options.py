"""Chooses the mesh and the hardware of a plan, and checks what the user gives."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from tpu_embedding.hardware import HardwareInfo, hardware_of_device
from tpu_embedding.plan.device_mesh import device_mesh


def choose_mesh(mesh: Any) -> Mesh:
    """Returns the user's mesh, or else that of `jax.set_mesh`, or else all devices.

    Raises:
      TypeError: if it is no mesh of devices.
      ValueError: if it has no device, or axes of several types.
    """
    if mesh is None:
        return _mesh_of_context()
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh or None, got {mesh!r}; "
            "jax.make_mesh((jax.device_count(),), ('shard',)) makes one."
        )
    if mesh.size == 0:
        raise ValueError(
            f"mesh must have devices, got {mesh!r}; leave it out for all devices."
        )
    if set(mesh.axis_types) not in ({AxisType.Auto}, {AxisType.Explicit}):
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        raise ValueError(
            f"mesh axes must be all of type Auto or all of type Explicit, got {kinds}; "
            "give jax.make_mesh equal axis_types for the layer's mesh."
        )
    return mesh


def choose_hardware(hardware: Any, mesh: Mesh) -> HardwareInfo:
    """Returns the user's hardware, or else that of the mesh's devices.

    Raises:
      TypeError: if it is no `HardwareInfo`.
    """
    if hardware is None:
        return hardware_of_device(mesh.devices.flat[0])
    if not isinstance(hardware, HardwareInfo):
        raise TypeError(
            f"hardware must be a HardwareInfo or None, got {hardware!r}; "
            "te.hardware.hardware_by_name(name) makes one."
        )
    return hardware


def _mesh_of_context() -> Mesh:
    if jax.sharding.get_abstract_mesh() == AbstractMesh((), ()):
        return device_mesh()
    try:
        return choose_mesh(jax.sharding.get_mesh())
    except ValueError as error:
        raise ValueError(
            "mesh must be given where a plan is made inside jax.jit under "
            f"jax.set_mesh, got None; make the plan outside, or pass mesh. ({error})"
        ) from None

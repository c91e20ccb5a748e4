"""The mesh and the hardware of a plan, and the order of devices in a mesh."""

import dataclasses
import random

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tpu_embedding.plan.shard_map import auto_mesh

FEATURE = te.FeatureConfig(table=te.TableConfig(vocabulary_size=10, dim=2))


def kinds_of(*kinds):
    devices = np.asarray(jax.devices()[:4]).reshape(2, 2)
    return Mesh(devices, ("x", "y"), axis_types=kinds)


WRONG = {
    "an abstract mesh": dict(mesh=AbstractMesh((2,), ("x",))),
    "axes of two types": dict(mesh=kinds_of(AxisType.Explicit, AxisType.Auto)),
    "hardware as a name": dict(hardware="v5p"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_rejected(case):
    ((field, value),) = WRONG[case].items()
    with rejects((TypeError, ValueError), field=field, value=value):
        te.make_plan(FEATURE, **dict(mesh=mesh_of(2)) | WRONG[case])


def test_unequal_slices_are_rejected():
    with rejects(field="num_slices", value=3):
        te.device_mesh(num_slices=3)


def test_no_mesh_means_all_devices():
    plan = te.make_plan(FEATURE)
    assert plan.mesh == te.device_mesh() == Mesh(np.asarray(jax.devices()), ("shard",))
    assert auto_mesh(plan) is plan.mesh


def test_no_mesh_means_that_of_the_context():
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    with jax.set_mesh(mesh):
        plan = te.make_plan(FEATURE)
        # JAX hides the devices of the context there.
        with rejects():
            jax.eval_shape(lambda: te.make_plan(FEATURE) and 0)
    assert plan.mesh == mesh
    assert set(auto_mesh(plan).axis_types) == {AxisType.Auto}
    np.testing.assert_array_equal(auto_mesh(plan).devices, mesh.devices)


@dataclasses.dataclass(frozen=True)
class Device:
    """A device as JAX describes it. No machine here has so many."""

    id: int
    process_index: int
    slice_index: int
    platform: str = "tpu"


def numbers(mesh):
    return [[device.id for device in row] for row in np.atleast_2d(mesh.devices)]


def shuffled(devices):
    return random.Random(0).sample(devices, len(devices))


def test_devices_of_a_process_are_consecutive():
    # As on slices whose ids run along rows of chips that several hosts share.
    devices = [Device(i, process_index=i // 2 % 2, slice_index=0) for i in range(8)]
    mesh = te.device_mesh(shuffled(devices))
    assert numbers(mesh) == [[0, 1, 4, 5, 2, 3, 6, 7]]
    assert mesh.axis_names == ("shard",)


def test_slices_are_the_first_axis():
    devices = [Device(i, i // 2, slice_index=i % 4 // 2) for i in range(8)]
    mesh = te.device_mesh(shuffled(devices))
    assert mesh.axis_names == ("slice", "shard")
    assert numbers(mesh) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert te.device_mesh(devices, num_slices=2) == mesh


def test_slices_of_different_sizes_are_rejected():
    devices = [Device(i, i // 4, slice_index=int(i >= 3)) for i in range(8)]
    with rejects(field="devices", value={0: 3, 1: 5}):
        te.device_mesh(devices)

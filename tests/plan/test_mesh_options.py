"""The mesh and the hardware of a plan."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.plan.shard_map import auto_mesh

FEATURE = te.FeatureConfig(table=te.TableConfig(vocabulary_size=10, dim=2))


def kinds_of(*kinds):
    devices = np.asarray(jax.devices()[:4]).reshape(2, 2)
    return Mesh(devices, ("x", "y"), axis_types=kinds)


WRONG = {
    "an abstract mesh": (
        dict(mesh=AbstractMesh((2,), ("x",))),
        TypeError,
        "mesh must be a jax.sharding.Mesh",
    ),
    "axes of two types": (
        dict(mesh=kinds_of(AxisType.Explicit, AxisType.Auto)),
        ValueError,
        "of type Auto or all of type Explicit, got .*'y'",
    ),
    "hardware as a name": (
        dict(hardware="v5p"),
        TypeError,
        "hardware must be a HardwareInfo or None, got 'v5p'; "
        "te.hardware.hardware_by_name",
    ),
}


@pytest.mark.parametrize(("options", "kind", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_refused(options, kind, message):
    with pytest.raises(kind, match=message):
        te.make_plan(FEATURE, **dict(mesh=mesh_of(2)) | options)


def test_no_mesh_means_all_devices():
    plan = te.make_plan(FEATURE)
    assert plan.mesh == Mesh(np.asarray(jax.devices()), ("shard",))
    assert auto_mesh(plan) is plan.mesh


def test_no_mesh_means_that_of_the_context():
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    with jax.set_mesh(mesh):
        plan = te.make_plan(FEATURE)
        # JAX hides the devices of the context there.
        with pytest.raises(ValueError, match="mesh must be .* inside jax.jit"):
            jax.eval_shape(lambda: te.make_plan(FEATURE) and 0)
    assert plan.mesh == mesh
    assert set(auto_mesh(plan).axis_types) == {AxisType.Auto}
    np.testing.assert_array_equal(auto_mesh(plan).devices, mesh.devices)

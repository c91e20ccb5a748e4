"""The mesh and the hardware of a plan."""

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


def test_no_mesh_means_all_devices():
    plan = te.make_plan(FEATURE)
    assert plan.mesh == Mesh(np.asarray(jax.devices()), ("shard",))
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

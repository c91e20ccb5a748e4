"""Meshes hold devices slice by slice, and process by process."""

import dataclasses
import random

import jax
import numpy as np

import tpu_embedding as te
from tests.rejections import rejects


@dataclasses.dataclass(frozen=True)
class Device:
    """A device as JAX describes it, of a number of which no machine here has any."""

    id: int
    process_index: int
    slice_index: int
    platform: str = "tpu"


def numbers(mesh):
    return [[device.id for device in row] for row in np.atleast_2d(mesh.devices)]


def shuffled(devices):
    return random.Random(0).sample(devices, len(devices))


def test_all_devices_lie_on_one_axis():
    mesh = te.device_mesh()
    assert mesh.axis_names == ("shard",)
    assert mesh.devices.tolist() == jax.devices()
    table = te.TableConfig(vocabulary_size=10, dim=4)
    assert te.make_plan({"a": te.FeatureConfig(table=table)}).mesh == mesh


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


def test_unequal_slices_are_rejected():
    with rejects(field="num_slices", value=3):
        te.device_mesh(num_slices=3)

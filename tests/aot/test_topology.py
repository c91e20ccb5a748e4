"""Meshes of absent TPUs: by name, of one slice and of several."""

import os
import sys

import pytest

from tests.conftest import mesh_of
from tpu_embedding import aot
from tpu_embedding.hardware import TPU_GENERATIONS, hardware_of_device, num_slices_of


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("topology", "num_chips"),
    [
        ("v4:2x2x1", 4),
        ("v5e:2x4", 8),
        ("v5p:2x2x1", 4),
        ("v6e:2x2", 4),
        ("tpu7x:2x2x1", 4),
        ("v5p:4x4x4", 64),
    ],
)
def test_devices(topology, num_chips):
    mesh = aot.topology_mesh(topology)
    hardware = hardware_of_device(mesh.devices.flat[0])
    assert hardware.name == topology.split(":")[0]
    assert mesh.size == num_chips * hardware.devices_per_chip
    assert mesh.axis_names == ("shard",)
    assert num_slices_of(mesh) == 1


@pytest.mark.tpu_compiler
def test_axes():
    mesh = aot.topology_mesh("v5e:2x4", ("a", "b"), (2, 4))
    assert dict(mesh.shape) == {"a": 2, "b": 4}


@pytest.mark.tpu_compiler
def test_slices_follow_each_other():
    mesh = aot.topology_mesh("v5e:2x2", num_slices=3)
    assert num_slices_of(mesh) == 3
    slices = [device.slice_index for device in mesh.devices.flat]
    assert slices == [0] * 4 + [1] * 4 + [2] * 4


def test_devices_of_one_process_are_one_slice():
    assert num_slices_of(mesh_of(3)) == 1


@pytest.mark.parametrize(
    "topology",
    ["", "v5e", "v5e:", "v5e:2", "v3:2x2", "V5E:2x4", "v5e:0x4", "v5e:-1x4", "v5e:2x"]
    + ["v5e:2x4 ", "v5litepod-8", "cpu:2x2", "v5p:2x2x2x2", "v5e:2x4\n"],
)
def test_names_are_refused_before_libtpu_sees_them(topology):
    with pytest.raises(ValueError, match="is not known; give a generation") as error:
        aot.topology_mesh(topology)
    for generation in TPU_GENERATIONS:
        assert generation in str(error.value)


@pytest.mark.tpu_compiler
def test_shapes_that_libtpu_refuses():
    with pytest.raises(ValueError, match="'v5e:3x3' is not known"):
        aot.topology_mesh("v5e:3x3")


def test_number_of_slices():
    with pytest.raises(ValueError, match="num_slices must be at least 1, got 0"):
        aot.topology_mesh("v5e:2x4", num_slices=0)


def test_without_libtpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ImportError, match=r"needs libtpu.*tpu-embedding\[tpu\]"):
        aot.topology_mesh("v5e:2x4")


@pytest.mark.tpu_compiler
def test_the_environment_is_left_as_it_was(monkeypatch):
    monkeypatch.delenv("TPU_WORKER_HOSTNAMES", raising=False)
    monkeypatch.setenv("TPU_HOST_BOUNDS", "1,1,1")
    aot.topology_mesh("v5e:2x2")
    assert "TPU_WORKER_HOSTNAMES" not in os.environ
    assert os.environ["TPU_HOST_BOUNDS"] == "1,1,1"

"""Meshes of absent TPUs: by name, of one slice and of several."""

import itertools
import os
import sys

import pytest

from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tiers import quick_cases
from tpu_embedding.hardware import hardware_of_device
from tpu_embedding.plan.mesh_options import num_slices_of
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.compile_report.topology import (
    SLICE_SHAPES,
    TPU_GENERATIONS,
)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("topology", "num_chips"),
    quick_cases(
        [("v4:2x2x1", 4), ("v5e:2x4", 8), ("v5p:4x4x4", 64), ("v6e:2x2", 4)]
        + [("tpu7x:2x2x1", 4)],
        "tpu7x:2x2x1-4",
    ),
)
def test_devices(topology, num_chips):
    mesh = compile_report.topology_mesh(topology)
    hardware = hardware_of_device(mesh.devices.flat[0])
    assert hardware.name == topology.split(":")[0]
    assert mesh.size == num_chips * hardware.devices_per_chip
    assert mesh.axis_names == ("shard",)
    assert num_slices_of(mesh) == num_slices_of(mesh_of(3)) == 1


@pytest.mark.tpu_compiler
def test_slices_follow_each_other():
    mesh = compile_report.topology_mesh("v5e:2x2", num_slices=3)
    assert num_slices_of(mesh) == 3
    assert dict(mesh.shape) == {"slice": 3, "shard": 4}
    slices = [device.slice_index for device in mesh.devices.flat]
    assert slices == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    "topology",
    ["", "v5e", "v5e:", "v3:2x2", "V5E:2x4", "v5e:2x", "v5e:2x4 ", "v5litepod-8"]
    + ["cpu:2x2", "v5e:2x4\n", "v5p:4x4x8_twisted", "v5e:²x2", "v5e:2.0x4"],
)
def test_names_are_rejected_before_libtpu_sees_them(topology):
    fix = ", ".join(TPU_GENERATIONS)
    with rejects(field="topology", value=topology, fix=fix):
        compile_report.topology_mesh(topology)


FLAT, DEEP = ("v5e", "v6e"), ("v4", "v5p", "tpu7x")
MANY = 10**30


@pytest.mark.parametrize(
    ("generations", "grids"),
    [
        (FLAT, "0x4 -1x4 2x-4 0x0 2 2x2x1 1x2x2x2 16x32 1000x1 3x3 4x2 1x4 12x12"),
        (DEEP, "0x2x2 2x2x-2 -4x-4x4 0x0x0 4 2x2 4x4x4x4 16x16x64 4x4x260 1000x1x1"),
        (DEEP, "2x2x3 4x4x6 2x4x8 5x5x5"),
        (FLAT + DEEP, f"{MANY}x{MANY}x{MANY}"),
    ],
)
def test_grids_that_no_slice_has(generations, grids):
    for generation, grid in itertools.product(generations, grids.split()):
        topology, fix = f"{generation}:{grid}", SLICE_SHAPES[generation].describe()
        with rejects(field="topology", value=topology, fix=fix):
            compile_report.topology_mesh(topology)


@pytest.mark.full
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("name", SLICE_SHAPES)
def test_libtpu_builds_the_grids_that_slices_have(name, monkeypatch):
    # libtpu would end the process for these values of another host.
    monkeypatch.setenv("TPU_CHIPS_PER_HOST_BOUNDS", "a")
    monkeypatch.setenv("TPU_HOST_BOUNDS", "b")
    shapes = SLICE_SHAPES[name]
    side = shapes.cube_side
    large = [] if side is None else [(side, side, side), (side, 2 * side, 3 * side)]
    for grid in {*shapes.fixed, *large}:
        assert shapes.has(grid)
        compile_report.topology_mesh(f"{name}:{'x'.join(map(str, grid))}")
    fixed = "x".join(map(str, shapes.fixed[1]))
    compile_report.topology_mesh(f"{name}:{fixed}", num_slices=256)


@pytest.mark.parametrize("num_slices", [-1, 0, 257, 10**11])
def test_number_of_slices(num_slices):
    with rejects(field="num_slices", value=num_slices):
        compile_report.topology_mesh("v5e:2x4", num_slices=num_slices)


def test_without_libtpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with rejects(ImportError, fix=".[tpu]"):
        compile_report.topology_mesh("v5e:2x4")


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("value", [None, "1,1,1"])
def test_the_environment_is_left_as_it_was(monkeypatch, value):
    # The first two would hide the chips of a real host from the next process.
    for name in (
        *("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"),
        *("TPU_WORKER_HOSTNAMES", "TPU_HOST_BOUNDS"),
    ):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    before = dict(os.environ)
    compile_report.topology_mesh("v5e:2x2")
    assert dict(os.environ) == before

"""Hardware by name and by device, and that nobody else knows a generation."""

import dataclasses
import re

import pytest

from tests.rejections import rejects
from tpu_embedding.hardware import hardware_by_name, hardware_of_device

SPARSE_CORES = {"v4": 0, "v5e": 0, "v5p": 4, "v6e": 2, "tpu7x": 4}


@dataclasses.dataclass(frozen=True)
class Device:
    """What is read of a JAX device."""

    platform: str
    device_kind: str


KINDS = {
    "v4": ["TPU v4"],
    "v5e": ["TPU v5 lite", "TPU v5e"],
    "v5p": ["TPU v5", "TPU v5p"],
    "v6e": ["TPU v6 lite", "TPU v6e"],
    "tpu7x": ["TPU7x"],
}


def test_by_name_and_by_device_kind():
    for name, kinds in KINDS.items():
        for kind in kinds:
            assert hardware_of_device(Device("tpu", kind)) is hardware_by_name(name)
    for name in ("v3", "V5P", None):
        with rejects(field="hardware", value=name, fix="'v5e'"):
            hardware_by_name(name)
    for kind in ("TPU v3", "H100"):
        with rejects(field="device kind", value=kind, fix="hardware="):
            hardware_of_device(Device("tpu", kind))


@pytest.mark.parametrize("name", SPARSE_CORES)
def test_tpus(name):
    info = hardware_by_name(name)
    assert info.is_tpu
    assert info.num_sparse_cores == SPARSE_CORES[name]
    # A name that XLA does not know fails at compile time on every machine.
    options = dict(info.compiler_options)
    assert bool(options) == bool(SPARSE_CORES[name])
    assert all(option.startswith("xla_tpu_") for option in options)
    assert all(re.fullmatch(r"true|false|\d+", value) for value in options.values())
    if options:
        assert options["xla_tpu_enable_offloading_scatter_to_sparsecore"] == "true"

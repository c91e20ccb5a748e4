"""Hardware by name and by device, and that nobody else knows a generation."""

import dataclasses
import re

import pytest

from tpu_embedding.hardware import hardware_by_name, hardware_of_device

TPUS = ["v4", "v5e", "v5p", "v6e", "tpu7x"]
WITH_SPARSE_CORES = {"v4": 0, "v5e": 0, "v5p": 4, "v6e": 2, "tpu7x": 4}


@dataclasses.dataclass(frozen=True)
class Device:
    """What is read of a JAX device."""

    platform: str
    device_kind: str


@pytest.mark.parametrize("name", ["v3", "V5P", None])
def test_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=re.escape(f"got {name!r}")) as error:
        hardware_by_name(name)
    for known in [*TPUS, "cpu", "gpu"]:
        assert repr(known) in str(error.value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v6e", "v6e"),
        ("TPU7x", "tpu7x"),
    ],
)
def test_by_device_kind(kind, name):
    assert hardware_of_device(Device("tpu", kind)) is hardware_by_name(name)


@pytest.mark.parametrize("kind", ["TPU v3", "H100"])
def test_unknown_kind_is_refused_with_the_known_ones(kind):
    with pytest.raises(ValueError, match=re.escape(repr(kind))) as error:
        hardware_of_device(Device("tpu", kind))
    assert "TPU v5 lite" in str(error.value)
    assert "hardware=" in str(error.value)


@pytest.mark.parametrize("name", TPUS)
def test_tpus(name):
    info = hardware_by_name(name)
    assert info.line_lanes == 128
    assert info.sublanes == 8
    assert info.hbm_capacity_bytes % 2**30 == 0
    assert 16 * 2**30 <= info.hbm_capacity_bytes <= 192 * 2**30
    assert info.devices_per_chip == (2 if name == "tpu7x" else 1)
    assert info.num_sparse_cores == WITH_SPARSE_CORES[name]
    assert info.is_tpu


@pytest.mark.parametrize("name", TPUS)
def test_scatters_are_offloaded_where_there_are_sparse_cores(name):
    options = dict(hardware_by_name(name).compiler_options)
    assert bool(options) == bool(WITH_SPARSE_CORES[name])
    # A name that XLA does not know fails at compile time on every machine.
    assert all(option.startswith("xla_tpu_") for option in options)
    assert all(re.fullmatch(r"true|false|\d+", value) for value in options.values())
    if options:
        assert options["xla_tpu_enable_offloading_scatter_to_sparsecore"] == "true"

"""Devices found against expected ones, memory, and processes that hold the TPU."""

import os
import pathlib
import sys

import pytest

from tpu_embedding.hardware import GIBIBYTE
from tpu_embedding.tools.doctor.devices import (
    FoundDevices,
    check_devices,
    check_holders,
    expectation_of_environment,
    find_devices,
    parse_expectation,
)

CHIPS = ["/dev/accel0", "/dev/accel1"]
MEMORY = {"bytes_limit": int(15.7 * GIBIBYTE), "bytes_in_use": 0}


def found_devices(count=8, kind="TPU v5 lite", platform="tpu", memory=MEMORY):
    return FoundDevices(platform=platform, kinds=(kind,) * count, memory=(memory,) * 4)


def check(found, expected=None, device_files=CHIPS):
    expected = None if expected is None else parse_expectation(expected)
    findings = check_devices(found, expected, device_files=device_files)
    return {finding.check: finding for finding in findings}


EXPECTED = {
    # --expect, the devices found, and the status.
    "8": (8, "TPU v5 lite", "ok"),
    "16": (8, "TPU v5 lite", "failed"),
    "v5e:8": (8, "TPU v5 lite", "ok"),
    "v5e:2x4": (8, "TPU v5 lite", "ok"),
    "v5e:4": (8, "TPU v5 lite", "failed"),
    "v6e:8": (8, "TPU v5 lite", "failed"),
    "tpu7x:4": (8, "TPU7x", "ok"),
    "tpu7x:2x2x2": (8, "TPU7x", "failed"),
    "v5p:1": (1, "TPU of the future", "failed"),
}


@pytest.mark.parametrize("expected", EXPECTED)
def test_expected_devices(expected):
    count, kind, status = EXPECTED[expected]
    finding = check(found_devices(count, kind), expected)["expected devices"]
    assert finding.status == status
    assert f"--expect {expected}" in finding.text
    if status == "failed":
        assert f"{count} x {kind}" in finding.text and finding.way_out


@pytest.mark.parametrize("text", ["", "v5e", "0", "-8", "v5e:", "v5e:8x", "v9:8", "²"])
def test_wrong_expectations(text):
    with pytest.raises(ValueError, match=r"--expect must be|hardware must be one of"):
        parse_expectation(text)


ACCELERATORS = {
    "v5litepod-8": ("v5e", 8),
    "v4-16": ("v4", 8),
    "v5p-64": ("v5p", 32),
    "v6e-256": ("v6e", 256),
    "tpu7x-16": ("tpu7x", 16),
}


@pytest.mark.parametrize("name", ACCELERATORS)
def test_expectations_of_a_tpu_vm(name):
    expected = expectation_of_environment({"TPU_ACCELERATOR_TYPE": name})
    assert expected is not None and expected.hardware is not None
    assert (expected.hardware.name, expected.num_devices) == ACCELERATORS[name]


@pytest.mark.parametrize("name", ["", "v5p", "v9-8", "v5p-x"])
def test_unknown_accelerators_expect_nothing(name):
    assert expectation_of_environment({"TPU_ACCELERATOR_TYPE": name}) is None


def test_jax_that_does_not_start():
    finding = check("hangs: no answer in 90 s")["devices"]
    assert finding.status == "failed"
    assert "no answer in 90 s" in finding.text
    assert finding.way_out and "several hosts" in finding.way_out


def test_a_silent_fall_back_to_the_cpu():
    cpu = found_devices(1, "cpu", "cpu", None)
    assert check(cpu)["fall-back"].status == "failed"
    assert "/dev/accel0" in check(cpu)["fall-back"].text
    assert "fall-back" not in check(cpu, device_files=[])
    assert "fall-back" not in check(found_devices())


@pytest.mark.parametrize(
    ("kind", "gibibytes", "status"),
    [
        ("TPU v5 lite", 15.7, "ok"),
        ("TPU v5 lite", 8, "failed"),
        ("TPU7x", 95, "ok"),  # Half of the chip's 192 GiB for each of two devices.
        ("TPU of the future", 1, None),
    ],
)
def test_device_memory(kind, gibibytes, status):
    memory = {"bytes_limit": int(gibibytes * GIBIBYTE), "bytes_in_use": GIBIBYTE}
    finding = check(found_devices(8, kind, memory=memory)).get("device memory")
    assert (finding and finding.status) == status


def test_unknown_device_memory_is_unmeasured():
    finding = check(found_devices(memory=None))["device memory"]
    assert finding.status == "unmeasured"


def test_a_process_that_holds_the_tpu(tmp_path):
    for number, file in (
        (7, "/dev/null"),
        (42, "/dev/accel1"),
        (os.getpid(), CHIPS[0]),
    ):
        (tmp_path / str(number) / "fd").mkdir(parents=True)
        (tmp_path / str(number) / "comm").write_text("python\n")
        (tmp_path / str(number) / "fd" / "3").symlink_to(file)
    (tmp_path / "99").mkdir()  # A process that has ended meanwhile.
    (finding,) = check_holders(CHIPS, processes=tmp_path)
    assert finding.status == "failed" and "42 (python)" in finding.text
    assert finding.way_out == "End it: kill 42."
    assert check_holders(["/dev/accel7"], processes=tmp_path) == []
    assert check_holders([], processes=tmp_path) == []


def environment(**variables):
    paths = [str(pathlib.Path(__file__).parents[3]), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}


@pytest.mark.full
def test_devices_of_this_machine():
    found = find_devices(environment(JAX_NUM_CPU_DEVICES="3"))
    assert isinstance(found, FoundDevices)
    assert (found.platform, found.kinds) == ("cpu", ("cpu",) * 3)
    assert found.hardware is not None and found.hardware.name == "cpu"


@pytest.mark.full
def test_an_unknown_platform():
    problem = find_devices(environment(JAX_PLATFORMS="abacus"))
    assert isinstance(problem, str)
    assert "exit status 1" in problem and "abacus" in problem


def test_a_child_that_gives_no_answer():
    problem = find_devices(environment(), seconds=0.01)
    assert problem == "hangs: no result in 0.01 s; killed"

"""From the results of a child to verdicts, and to the kernels of a plan."""

import dataclasses
import datetime
import os
import pathlib
import sys

import pytest

import tpu_embedding as te
from tests.conftest import mesh_of, needs_kernels
from tpu_embedding.kernel_verdicts import KernelVerdicts, capability_of
from tpu_embedding.tools.doctor import kernel_checks
from tpu_embedding.tools.doctor.devices import FoundDevices
from tpu_embedding.tools.doctor.kernel_checks import (
    findings_on_cases,
    format_times,
    kernels_on,
    make_verdicts,
    run_cases,
)
from tpu_embedding.tools.doctor.row_cases import DIMS

pytestmark = needs_kernels

FAKE = pathlib.Path(__file__).parent / "fake_child.py"
CPU = FoundDevices(platform="cpu", kinds=("cpu",) * 2, memory=(None,) * 2)
TPU = FoundDevices(platform="tpu", kinds=("TPU v5p",), memory=(None,))
DATE = datetime.date(2026, 1, 31)
DIRECTIONS = {"read", "pool", "spread", "update", "write"}


def check(*deeds, found=TPU, tier="full", seconds=60.0):
    child = (sys.executable, str(FAKE), *deeds)
    return run_cases(found, tier, os.environ, case_seconds=seconds, child=child)


def has_failures(findings):
    return any(finding.status == "failed" for finding in findings)


def verdicts_of(*deeds, **options):
    return {v.capability: v for v in make_verdicts(check(*deeds, **options), DATE)}


def backends_of(verdicts, dim=32):
    """Returns the directions that run in kernels, given the verdicts of a check."""
    plan = te.make_plan(
        te.FeatureConfig(table=te.TableConfig(vocabulary_size=99, dim=dim, name="t")),
        mesh_of(1),
        optimizer=te.optimizers.adagrad(0.1),
        kernels=KernelVerdicts(backend="interpreter", verdicts=tuple(verdicts)),
        hardware=te.hardware.hardware_by_name("v5p"),
    )
    backends = plan.stacks[0].backends
    return {d for d in DIRECTIONS if getattr(backends, d).backend == "interpreter"}


FAULTS = {
    # The deed of the child, and the problem that the verdict names.
    "wrong": "read, dim 32: row 7 is zero",
    "hang": "read, dim 32: hangs: no result in 5 s; killed",
    "abort": "read, dim 32: crashed by SIGABRT",
    "exit": "read, dim 32: ended with exit status 3",
}


@pytest.mark.parametrize("deed", FAULTS)
def test_auto_avoids_the_kernel_that_failed(deed):
    # A loaded machine starts Python in a few seconds.
    seconds = 5.0 if deed == "hang" else 60.0
    run = check(f"read, dim 32:{deed}", tier="quick", seconds=seconds)
    verdicts = make_verdicts(run, DATE)
    assert len(run.results) == len(run.cases)  # Those behind it ran in a new child.
    read = next(v for v in verdicts if v.direction == "read")
    assert (read.problem or "").startswith(FAULTS[deed])
    assert has_failures(findings_on_cases(run))
    assert backends_of(verdicts) == DIRECTIONS - {"read"}


def test_auto_runs_kernels_that_are_equal_and_faster():
    run = check()
    assert not has_failures(findings_on_cases(run))
    verdicts = make_verdicts(run, DATE)
    assert {backends_of(verdicts, dim) == DIRECTIONS for dim in (*DIMS, 256)} == {True}
    assert len(verdicts) == 6 * len(DIMS)
    slower = make_verdicts(check("read, dim 32:ratio=0.5"), DATE)
    assert backends_of(slower) == DIRECTIONS - {"read"}
    assert backends_of(slower, 64) == DIRECTIONS


WHOLE = {
    # A case of several kernels, and the rows whose kernels its failure refuses.
    "step, dim 64": {64},
    "ragged ids, dim 128": {128},
    "further rounds, dim 32": set(DIMS),
    "many rows, dim 8": set(DIMS),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_case_of_several_kernels_refuses_all_of_them(case):
    verdicts = verdicts_of(f"{case}:wrong")
    assert {v.dim for v in verdicts.values() if v.problem} == WHOLE[case]
    for capability, verdict in verdicts.items():
        expected = f"{case}: row 7 is zero" if capability.dim in WHOLE[case] else None
        assert verdict.problem == expected


def test_an_exchange_needs_several_devices():
    assert "ragged exchange, dim 32" not in {case.name for case in check().cases}
    several = dataclasses.replace(TPU, memory=(None,) * 2)
    verdicts = verdicts_of("ragged exchange, dim 32:wrong", found=several)
    assert all(verdict.problem for verdict in verdicts.values())


def test_another_rule_counts_for_updates_of_its_kind():
    verdicts = verdicts_of("update by adam, dim 32:wrong")
    refused = [name for name, verdict in verdicts.items() if verdict.problem]
    assert refused == [capability_of("update", 32)]


@pytest.mark.parametrize("tier", ["quick", "full"])
def test_a_kernel_without_a_complete_check_is_not_allowed(tier, monkeypatch):
    monkeypatch.setattr(kernel_checks, "_MAX_LOST_CHILDREN", 1)
    run = check("pool, dim 32:exit", tier=tier)
    verdicts = {v.capability: v for v in make_verdicts(run, DATE)}
    assert not any(verdict.allows_kernel for verdict in verdicts.values())
    write = verdicts[capability_of("write", 32)]
    assert (write.problem or "").startswith("the check is not complete: ")
    assert any("cases did not run" in f.text for f in findings_on_cases(run))


def test_a_child_that_does_not_start_refuses_all_kernels():
    run = check("start:exit", tier="quick")
    assert not any(v.allows_kernel for v in make_verdicts(run, DATE))
    assert has_failures(findings_on_cases(run))


def times_of(*deeds):
    """Returns the rows of the table of times: case to the words behind it."""
    run = check(*deeds, tier="quick")
    lines = format_times(run, make_verdicts(run, DATE)).splitlines()
    return {
        case.name: line.removeprefix(case.name).split()
        for case in run.cases
        for line in lines
        if line.startswith(f"{case.name} ")
    }


def test_a_case_that_failed_keeps_its_row_without_times():
    unmeasured = ["unmeasured"] * 3
    rows = times_of("read, dim 32:wrong", "pool, dim 32:exit")
    assert rows["read, dim 32"] == rows["pool, dim 32"] == [*unmeasured, "XLA"]
    measured = ["2.000", "ms", "3.000", "ms", "1.5x"]
    assert rows["update by adagrad, dim 32"] == [*measured, "kernel"]


def test_a_case_that_did_not_run_keeps_its_row(monkeypatch):
    monkeypatch.setattr(kernel_checks, "_MAX_LOST_CHILDREN", 1)
    rows = times_of("start:exit")
    assert rows["update by adagrad, dim 32"] == [*["unmeasured"] * 3, "XLA"]


def test_there_is_no_table_without_rows():
    run = dataclasses.replace(check(tier="quick"), kernels=None, results=[])
    assert format_times(run, []) == ""


def test_wrong_results_of_xla_fail_and_refuse_no_kernel():
    run = check("step, dim 32:wrong by xla", tier="quick")
    assert has_failures(findings_on_cases(run))
    assert backends_of(make_verdicts(run, DATE)) == DIRECTIONS
    gpu = dataclasses.replace(CPU, platform="gpu", kinds=("a GPU",))
    run = check("step, dim 32:exit", found=gpu, tier="quick")
    assert has_failures(findings_on_cases(run))
    assert make_verdicts(run, DATE) == []


@pytest.mark.parametrize(
    ("platform", "kind", "kernels"),
    [
        ("cpu", "cpu", "interpreter"),
        ("tpu", "TPU v5p", "sparse_core"),
        ("tpu", "TPU v5 lite", None),
        ("tpu", "TPU of the future", None),
        ("gpu", "a GPU", None),
    ],
)
def test_kernels_by_device(platform, kind, kernels):
    found = FoundDevices(platform=platform, kinds=(kind,), memory=(None,))
    assert kernels_on(found) == kernels

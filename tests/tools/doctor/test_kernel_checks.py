"""From the results of a child to verdicts, and to the kernels of a plan."""

import dataclasses
import datetime
import pathlib
import sys

import pytest

import tpu_embedding as te
from tests.conftest import mesh_of, needs_kernels
from tpu_embedding.kernel_verdicts import (
    KernelVerdicts,
    current_key,
    load_verdicts,
    save_verdicts,
)
from tpu_embedding.tools.doctor.devices import FoundDevices
from tpu_embedding.tools.doctor.findings import has_failures
from tpu_embedding.tools.doctor.kernel_checks import (
    CheckSettings,
    check_rows,
    findings_on_rows,
    kernels_on,
    make_verdicts,
)

pytestmark = needs_kernels

FAKE = pathlib.Path(__file__).parent / "fake_child.py"
CPU = FoundDevices(platform="cpu", kinds=("cpu",) * 2, memory=(None,) * 2)
DATE = datetime.date(2026, 1, 31)
DIRECTIONS = ("read", "pool", "spread", "update", "write")


def check(*cases, found=CPU, seconds=60.0):
    settings = CheckSettings(
        tier="quick",
        seconds=seconds,
        case_seconds=1.0,  # A case of the fake child ends at once, or never.
        child=(sys.executable, str(FAKE), *cases),
    )
    return check_rows(found, settings, {})


def verdicts_of(*cases, **options):
    return {v.capability: v for v in make_verdicts(check(*cases, **options), DATE)}


def backends_of(verdicts, dim=8):
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
    # The faulty case, and the problem that the verdict names.
    "equal and faster": ("speed/read, dim 8:ratio=1.5", None),
    "wrong": ("correctness/read, dim 8:wrong", "read, dim 8: row 7 is zero"),
    "hangs": ("correctness/read, dim 8:hang", "read, dim 8: hangs"),
    "crashes": ("correctness/read, dim 8:abort", "read, dim 8: crashed by SIGABRT"),
    "slower": ("speed/read, dim 8:ratio=0.5", None),
    "hangs when timed": ("speed/read, dim 8:hang", "read, dim 8: hangs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_auto_follows_what_the_child_finds(fault):
    faulty, problem = FAULTS[fault]
    cases = [
        f"{part}/{direction}, dim 8:{'ok' if part == 'correctness' else 'ratio=1.5'}"
        for part in ("correctness", "speed")
        for direction in DIRECTIONS
    ]
    name = faulty.partition(":")[0]
    cases = [faulty if case.startswith(f"{name}:") else case for case in cases]
    runs = check("xla:ok", *cases)
    verdicts = make_verdicts(runs, DATE)
    read = next(v for v in verdicts if v.capability == "read, dim 8")
    assert (read.problem or "").startswith(problem or "")
    assert read.is_equal == (problem is None)
    assert has_failures(findings_on_rows(runs)) == (problem is not None)
    expected = set(DIRECTIONS)
    if fault != "equal and faster":
        expected.remove("read")
    assert backends_of(verdicts) == expected


def test_a_failed_step_counts_for_its_rows_unless_one_direction_explains_it():
    correct = [f"correctness/{d}, dim {n}:ok" for d in DIRECTIONS for n in (8, 16)]
    unexplained = verdicts_of(*correct, "correctness/step, dim 8:wrong")
    for direction in DIRECTIONS:
        assert not unexplained[f"{direction}, dim 8"].is_equal
        assert unexplained[f"{direction}, dim 16"].is_equal
    correct[0] = "correctness/read, dim 8:wrong"
    explained = verdicts_of(*correct, "correctness/step, dim 8:wrong")
    assert [name for name, v in explained.items() if not v.is_equal] == ["read, dim 8"]


def test_a_failed_exchange_counts_for_all_rows():
    found = verdicts_of(
        "correctness/read, dim 8:ok", "correctness/ragged exchange:wrong"
    )
    assert found["read, dim 8"].problem == "ragged exchange: row 7 is zero"


INCOMPLETE = {
    # A case that hangs, at the end of the time for all: those behind it do not run.
    "total time": ["correctness/read, dim 8:ok", "correctness/pool, dim 8:hang"],
    "lost child": [
        *("correctness/read, dim 8:ok", "correctness/pool, dim 8:exit"),
        "correctness/start:the chip is lost",
    ],
}


@pytest.mark.parametrize("cause", INCOMPLETE)
def test_a_kernel_without_a_complete_check_is_not_allowed(cause):
    runs = check(
        *INCOMPLETE[cause],
        *("correctness/write, dim 8:ok", "correctness/step, dim 8:ok"),
        *("speed/read, dim 8:ratio=1.5", "speed/write, dim 8:ratio=1.5"),
        "speed/step, dim 8:ratio=1.5",
        seconds=60.0 if cause == "lost child" else 1.0,
    )
    found = {v.capability: v for v in make_verdicts(runs, DATE)}
    assert backends_of(found.values()) == set()
    assert not any(verdict.is_equal for verdict in found.values())


def test_a_case_that_was_not_timed_leaves_the_check_incomplete():
    cases = [f"correctness/{d}, dim 8:ok" for d in ("read", "step")]
    found = verdicts_of(
        *cases,
        "speed/read, dim 8:ratio=1.5",
        "speed/start:lost",
        "speed/step, dim 8:ok",
    )
    assert found["read, dim 8"].problem == (
        "the check is not complete, without step, dim 8 (1 did not run)"
    )


@pytest.mark.parametrize("whole", ["step, dim 8", "padded exchange"])
def test_a_quick_check_cannot_overrule_a_whole_step_that_failed(
    whole, tmp_path, monkeypatch
):
    monkeypatch.setenv("TPU_EMBEDDING_VERDICTS", str(tmp_path))
    key = current_key("cpu", "interpreter")
    quick = ["correctness/read, dim 8:ok", "speed/read, dim 8:ratio=1.5"]
    save_verdicts(key, make_verdicts(check(*quick), DATE))
    assert load_verdicts("cpu", "interpreter").allows("read, dim 8")
    save_verdicts(key, make_verdicts(check(*quick, f"correctness/{whole}:wrong"), DATE))
    save_verdicts(key, make_verdicts(check(*quick), DATE))
    assert not load_verdicts("cpu", "interpreter").allows("read, dim 8")
    save_verdicts(key, make_verdicts(check(*quick, f"correctness/{whole}:ok"), DATE))
    assert load_verdicts("cpu", "interpreter").allows("read, dim 8")


def test_a_complete_check_replaces_one_that_was_not():
    runs = check(*INCOMPLETE["lost child"], "correctness/step, dim 8:ok")
    assert {v.num_cases for v in make_verdicts(runs, DATE) if not v.problem} == set()
    assert {v.num_cases for v in make_verdicts(runs, DATE)} == {1, 2}


def test_the_slowest_case_of_a_capability_decides():
    found = verdicts_of("correctness/read, dim 8:ok", "speed/read, dim 8:ratio=1.2")
    assert found["read, dim 8"].speed_ratio == 1.2
    runs = check("correctness/read, dim 8:ok", "speed/read, dim 8:ratio=1.2")
    (result,) = runs[-1].run.results
    slower = dataclasses.replace(result, case="other", figures={"speed_ratio": 0.9})
    run = dataclasses.replace(runs[-1].run, results=(result, slower))
    (verdict,) = make_verdicts(
        [*runs[:-1], dataclasses.replace(runs[-1], run=run)], DATE
    )
    assert verdict.speed_ratio == 0.9


def test_wrong_results_of_xla_fail_and_make_no_verdict():
    runs = check("read, dim 8:wrong", found=dataclasses.replace(CPU, platform="gpu"))
    assert [(part.backend, part.part) for part in runs] == [
        ("xla", "correctness"),
        ("xla", "speed"),
    ]
    assert has_failures(findings_on_rows(runs))
    assert make_verdicts(runs, DATE) == []


def test_cases_without_time_are_unmeasured():
    runs = check(
        "correctness/read, dim 8:hang", "correctness/write, dim 8:ok", seconds=1.0
    )
    findings = findings_on_rows(runs)
    assert any(f.status == "unmeasured" and "did not run" in f.text for f in findings)


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


def test_verdicts_travel_by_the_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TPU_EMBEDDING_VERDICTS", str(tmp_path))
    runs = check("correctness/read, dim 8:ok", "speed/read, dim 8:ratio=1.5")
    save_verdicts(current_key("cpu", "interpreter"), make_verdicts(runs, DATE))
    plan = te.make_plan(
        te.FeatureConfig(table=te.TableConfig(vocabulary_size=99, dim=8, name="t")),
        mesh_of(1),
        kernels="auto",
        hardware=te.hardware.hardware_by_name("v5p"),
    )
    assert plan.stacks[0].backends.read.backend == "interpreter"
    assert "verdict of 2026-01-31: 1.50x the speed of XLA" in str(plan)

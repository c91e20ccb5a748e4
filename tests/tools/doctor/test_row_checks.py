"""Each planted fault is found, and blames the direction that has it."""

import jax
import numpy as np
import pytest

from tests.conftest import needs_kernels
from tests.tools.doctor.kernel_faults import planted
from tpu_embedding.tools.doctor import row_checks, row_programs
from tpu_embedding.tools.doctor.child import run_case
from tpu_embedding.tools.doctor.row_cases import row_cases

CASES = {case.name: case for case in row_cases("all", 2) + row_cases("each once", 2)}
QUICK = [case.name for case in row_cases("quick", 1)]
BY_DIRECTION = {
    "read": "read, dim 32",
    "pool": "pool, dim 32",
    "spread": "spread by sgd, dim 32",
    "update": "update by adagrad, dim 32",
    "write": "write by clippy_adagrad, dim 32",
}


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


def result_of(name, kernels: str | None = "interpreter"):
    result = run_case(CASES[name], kernels, jax.devices()[:2])
    assert result.case == name
    return result


@needs_kernels
@pytest.mark.parametrize("name", ["read, dim 32", *map(full, QUICK[1:])])
def test_cases_pass_and_are_timed(name):
    result = result_of(name)
    assert result.problem is result.xla_problem is None
    assert result.seconds_per_call is not None and result.speed_ratio is not None
    assert result.seconds_per_call > 0 and result.speed_ratio > 0


FAULTS = {
    "wrong_row:read": "4 of 576 rows differ",
    "zero_rows:read": "got 0 0 0 0; 576 of 576 rows differ",
    "bf16:pool": "128 of 128 rows differ",
    "wrong_row:pool": "activations of table 'sum', sample 0",
    "off_by_one_subcore:pool": "32 of 128 rows differ",
    "off_by_one_subcore:spread": "rows differ",
    "zero_rows:spread": "rows differ",
    "bf16:spread": "rows differ",
    "wrong_row:update": "no id names row 1,",
    "off_by_one_subcore:update": "updated row",
    "lost_update:update": "; 1 of",
    "bf16:update": "updated row",
    "untouched_row_changed:update": "no id names row 1,",
    "lost_update:write": "; 1 of",
    "zero_rows:write": "no id names row 1,",
    "untouched_row_changed:write": "no id names row 1,",
}


@needs_kernels
@pytest.mark.parametrize(
    "fault", ["wrong_row:read", *(full(name) for name in list(FAULTS)[1:])]
)
def test_faults_are_found(fault):
    name, _, direction = fault.partition(":")
    with planted(name, direction):
        result = result_of(BY_DIRECTION[direction])
    assert result.problem is not None and result.problem.startswith("seed 0: ")
    assert FAULTS[fault] in result.problem
    assert result.xla_problem is None and result.speed_ratio is None


@needs_kernels
@pytest.mark.exhaustive
@pytest.mark.parametrize("direction", BY_DIRECTION)
def test_a_fault_blames_its_direction_only(direction):
    with planted("wrong_row", direction):
        failed = {name for name in QUICK if result_of(name).problem is not None}
    expected = {BY_DIRECTION[direction], "step, dim 32"}
    if direction == "update":
        expected.add("update by rowwise_adagrad, dim 32")
    if direction == "write":
        # The rule of the step runs in a kernel, so nothing is left to add.
        expected.remove("step, dim 32")
    assert failed == expected


@needs_kernels
@pytest.mark.full
def test_a_slower_kernel_is_seen():
    """The fault computes for tens of milliseconds; the kernel takes a few."""
    ratio = result_of("read, dim 32").speed_ratio
    with planted("slower", "read"):
        slower = result_of("read, dim 32").speed_ratio
    assert ratio is not None and slower is not None and slower < ratio / 2


@pytest.mark.full
def test_errors_are_problems(monkeypatch):
    def fail(*_):
        raise RuntimeError("the compiler\nsays more")

    monkeypatch.setattr("tpu_embedding.tools.doctor.child.find_problem", fail)
    result = result_of("step, dim 1")
    assert result.xla_problem == "RuntimeError: the compiler"
    assert result.problem is None


@needs_kernels
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", row_cases("each once", 2), ids=lambda case: case.name)
def test_each_case_passes(case):
    result = result_of(case.name)
    assert result.problem is result.xla_problem is None


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["step, dim 1", "write by clippy_adagrad, dim 512", "further rounds, dim 32"],
)
def test_xla_alone(name):
    result = result_of(name, None)
    assert result.problem is result.xla_problem is result.speed_ratio is None


@pytest.mark.full
def test_a_case_of_further_rounds_needs_them(monkeypatch):
    monkeypatch.setattr(row_programs, "_ROUNDS", 0.1)
    assert result_of("further rounds, dim 32", None).xla_problem == (
        "seed 0: all ids fitted in one round, so no further round was checked"
    )


VALUES = np.float32([[1.5, 2.5], [3.25, 4.25], [5.0, 6.0]])
ONE = np.float64(1e-3)


def differences(found, expected=VALUES, tolerance=ONE, **arrays):
    return list(
        row_checks._differences("row", np.float32(found), expected, tolerance, **arrays)
    )


def changed(row, values):
    result = VALUES.copy()
    result[row] = values
    return result


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (changed(1, [3.25, 4.26]), "row 1, from element 1: expected 4.25, got 4.2"),
        (changed(0, [0, 0]), "got 0 0; 1 of 3 rows differ"),
        (changed(0, [np.nan, 2.5]), "got nan 2.5; 1 of 3 rows differ"),
        (changed(0, [1.5, np.inf]), "got inf;"),
    ],
)
def test_differences_are_described(found, text):
    (problem,) = differences(found)
    assert text in problem


def test_no_difference():
    assert differences(VALUES) == []
    assert differences(VALUES + np.float32(5e-4)) == []
    assert len(differences(VALUES + np.float32(2e-3))) == 1


def test_row_ids_are_named():
    (problem,) = differences(
        changed(1, [7, 8.001]),
        row_ids=np.array([10, 20, 30]),
    )
    assert problem.startswith("row 20, from element 0")


@pytest.mark.parametrize("value", [-0.0, np.float32(1e-45), 2.0**-30])
def test_bits_are_compared(value):
    zeros = np.zeros((3, 2), np.float32)
    found = zeros.copy()
    found[1, 1] = value
    assert len(differences(found, zeros, row_checks._SAME_BITS)) == 1
    assert differences(zeros, zeros, row_checks._SAME_BITS) == []


def test_nan_bits_may_agree():
    values = np.full((3, 2), np.nan, np.float32)
    assert differences(values, values, row_checks._SAME_BITS) == []


def test_shapes_are_compared():
    (problem,) = differences(VALUES[:2])
    assert "the shape must be (3, 2), got (2, 2)" in problem

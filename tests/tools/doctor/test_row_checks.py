"""Each planted fault is found, and blames the direction that has it."""

from typing import get_args

import jax
import numpy as np
import pytest

from tests.conftest import needs_kernels
from tpu_embedding.kernel_verdicts import Direction, capability_name
from tpu_embedding.tools.doctor import row_checks
from tpu_embedding.tools.doctor.child import ChildOptions, run_case
from tpu_embedding.tools.doctor.faults import Fault, parse_fault, planted

DIRECTIONS = get_args(Direction)


def options(backend="interpreter", tier="quick"):
    return ChildOptions(backend=backend, part="correctness", tier=tier, seeds=(0, 1))


QUICK_CASES = {case.name: case for case in options().cases(jax.devices())}


def problem_of(name, fault=None):
    with planted(fault):
        started, ended = run_case(QUICK_CASES[name], options(), jax.devices())
    assert started.case == ended.case == name
    assert ended.ok == (ended.problem is None)
    return ended.problem


@needs_kernels
@pytest.mark.quick_cases("read, dim 32", "pool, dim 32")
@pytest.mark.parametrize("name", QUICK_CASES)
def test_quick_cases_pass(name):
    assert problem_of(name) is None


FAULTS = {
    "wrong_row:read": "(the row behind); 6 of",
    "zero_rows:read": "(zeros); 576 of 576 rows differ",
    "bf16:pool": "(rounded to bfloat16); 128 of 128 rows differ",
    "wrong_row:pool": "activations of table 'sum', sample 0",
    "off_by_one_subcore:pool": "32 of 128 rows differ",
    "off_by_one_subcore:spread": "of 324 rows differ",
    "zero_rows:spread": "(the value before the update); 324 of 324 rows differ",
    "bf16:spread": "324 of 324 rows differ",
    "wrong_row:update": "no id names row 1,",
    "off_by_one_subcore:update": "(the value before the update); 256 of",
    "lost_update:update": "(the value before the update); 1 of",
    "bf16:update": "377 of 377 rows differ",
    "untouched_row_changed:update": "no id names row 1,",
    "lost_update:write": "(the value before the update); 1 of",
    "zero_rows:write": "no id names row 1,",
    "untouched_row_changed:write": "no id names row 1,",
}


@needs_kernels
@pytest.mark.every_case
@pytest.mark.quick_cases("wrong_row:read", "bf16:pool")
@pytest.mark.parametrize("text", FAULTS)
def test_faults_are_found(text):
    fault = parse_fault(text)
    problem = problem_of(capability_name(fault.direction, 32), fault)
    assert problem is not None and problem.startswith("seed 0: ")
    assert FAULTS[text] in problem


@needs_kernels
@pytest.mark.exhaustive
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_fault_blames_its_direction_only(direction):
    fault = Fault(name="wrong_row", direction=direction)
    failed = {name for name in QUICK_CASES if problem_of(name, fault) is not None}
    expected = {capability_name(direction, 32), "step, dim 32"}
    if direction == "update":
        expected.add(capability_name("update", 32, "row sums"))
    if direction == "write":
        # The rule of the step runs in a kernel, so nothing is left to add.
        expected.remove("step, dim 32")
    assert failed == expected


@needs_kernels
@pytest.mark.full
def test_errors_are_problems(monkeypatch):
    def fail(*_):
        raise RuntimeError("the compiler\nsays more")

    monkeypatch.setattr("tpu_embedding.tools.doctor.child.find_problem", fail)
    assert problem_of("read, dim 32") == "RuntimeError: the compiler"


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["xla", "interpreter"])
def test_full_cases_pass(backend):
    if backend == "interpreter" and jax.__version_info__ < (0, 12):
        pytest.skip("kernels need jax 0.12")
    devices = jax.devices()[:2]
    of_backend = options(backend, "full")
    cases = of_backend.cases(devices)
    ended = [list(run_case(case, of_backend, devices))[1] for case in cases]
    assert [event.problem for event in ended] == [None] * len(cases)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["step, dim 1", "rule clippy_adagrad, dim 32", "further rounds, dim 32"]
)
def test_xla_passes(name):
    of_xla = options("xla", "full")
    cases = {case.name: case for case in of_xla.cases(jax.devices()[:2])}
    _, ended = run_case(cases[name], of_xla, jax.devices()[:2])
    assert ended.problem is None


@pytest.mark.full
def test_a_case_of_further_rounds_needs_them(monkeypatch):
    monkeypatch.setattr("tpu_embedding.tools.doctor.row_programs._ROUNDS", 0.1)
    of_xla = options("xla", "full")
    cases = {case.name: case for case in of_xla.cases(jax.devices()[:2])}
    _, ended = run_case(cases["further rounds, dim 32"], of_xla, jax.devices()[:1])
    assert ended.problem == (
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
        (changed(0, [0, 0]), "got 0 0 (zeros); 1 of 3 rows differ"),
        (changed(2, VALUES[1]), "got 3.25 4.25 (the row before)"),
        (changed(1, VALUES[2]), "(the row behind)"),
        (changed(0, [np.nan, 2.5]), "got nan 2.5; 1 of 3 rows differ"),
        (changed(0, [1.5, 2.75]), "(rounded to bfloat16)"),
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


def test_old_values_and_row_ids_are_named():
    (problem,) = differences(
        changed(1, [7, 8.001]),
        row_ids=np.array([10, 20, 30]),
        old=np.float64(np.float32([[0, 0], [7, 8.001], [0, 0]])),
    )
    assert problem.startswith("row 20, from element 0")
    assert "(the value before the update)" in problem


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wrong_row", "must be NAME:DIRECTION"),
        ("no_fault:read", "must be NAME:DIRECTION"),
        ("hang:write_rows", "a direction of"),
        ("lost_update:read", "must be a fault of update or write"),
    ],
)
def test_unknown_faults_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_fault(text)

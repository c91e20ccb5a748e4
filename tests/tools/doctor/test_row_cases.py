"""The table of cases: what it covers, and what each case runs in a kernel."""

import itertools
from typing import get_args

import jax
import numpy as np
import pytest

from tests.conftest import needs_kernels
from tpu_embedding.functional import lookup
from tpu_embedding.kernel_verdicts import Direction, capability_name
from tpu_embedding.tools.doctor.child import _ELSEWHERE, _ON_TPU
from tpu_embedding.tools.doctor.row_batches import OwnedRows, random_ids, size_of
from tpu_embedding.tools.doctor.row_cases import (
    DIMS,
    IdForm,
    row_cases,
    timed_cases,
)
from tpu_embedding.tools.doctor.row_inputs import abstract_arguments
from tpu_embedding.tools.doctor.row_programs import RowProgram, row_program

DIRECTIONS = get_args(Direction)
EACH_ONCE = row_cases("interpreter", "full", "each once", 2)
ALL = row_cases("sparse_core", "full", "all", 2)
ALL_RUNS = [
    *itertools.product(("xla", "sparse_core", "interpreter"), ("quick", "full")),
]


@pytest.mark.parametrize(("backend", "tier"), ALL_RUNS)
@pytest.mark.parametrize("coverage", ["all", "each once"])
def test_names_are_unique(backend, tier, coverage):
    for cases in (
        row_cases(backend, tier, coverage, 2),
        timed_cases(backend, tier, coverage),
    ):
        names = [case.name for case in cases]
        assert names and len(set(names)) == len(names)


def test_all_capabilities_are_checked_and_timed():
    expected = {
        capability_name(direction, dim, rule)
        for direction, dim in itertools.product(DIRECTIONS, DIMS)
        for rule in ("elements", "row sums")
    }
    assert len(expected) == 6 * len(DIMS)
    assert expected <= {case.capability for case in ALL}
    timed = timed_cases("sparse_core", "full", "all")
    assert expected <= {case.capability for case in timed}


@pytest.mark.parametrize("cases", [ALL, EACH_ONCE], ids=["all", "each once"])
def test_each_kind_of_case_is_there(cases):
    assert {d for case in cases for d in case.directions} == set(DIRECTIONS)
    assert {case.dim for case in cases} == set(DIMS)
    assert {case.ids for case in cases} == set(get_args(IdForm))
    assert all(
        case.capability.endswith(f"dim {case.dim}")
        or case.exchange
        or case.rows == "many"
        for case in cases
    )
    assert {case.exchange for case in cases} == {None, "padded", "ragged"}
    assert {case.owner for case in cases} == {"any", "one"}
    assert {case.rule for case in cases} >= {None, "sgd", "adam", "rowwise_adagrad"}


@pytest.mark.parametrize(
    ("effort", "coverage", "minimum"),
    [(_ON_TPU, "all", 2**24), (_ELSEWHERE, "each once", 2**17)],
)
def test_one_case_has_many_rows(effort, coverage, minimum):
    cases = row_cases("sparse_core", "full", coverage, 1)
    (case,) = (case for case in cases if case.rows == "many")
    size = size_of(
        case, floats=effort.floats, many_rows=effort.many_rows, num_devices=1
    )
    rows = OwnedRows(
        num_rows=size.vocabulary_size, offset=0, num_owners=1, owner=case.owner
    )
    generator = np.random.default_rng(0)
    _, weighted = random_ids(generator, case.ids, size.num_samples, rows)
    # Many ids name rows that a narrower number could not tell apart.
    assert np.mean(weighted.ids > minimum) > 0.4
    assert set(case.directions) == set(DIRECTIONS)


def test_xla_checks_each_row_and_rule():
    cases = row_cases("xla", "full", "each once", 2)
    assert {case.dim for case in cases} == {*DIMS, 1, 100}
    assert {case.rule for case in cases} == {
        *("sgd", "adagrad", "adam", "clippy_adagrad"),
        *("rowwise_adagrad", "partial_rowwise_lamb"),
    }


def test_one_device_exchanges_nothing():
    cases = row_cases("xla", "full", "all", 1)
    assert {c.capability for c in cases if c.exchange} == {"further rounds"}


@needs_kernels
@pytest.mark.parametrize(
    "cases",
    [pytest.param(ALL, marks=pytest.mark.exhaustive), EACH_ONCE],
    ids=["all", "each once"],
)
def test_only_the_directions_of_a_case_run_in_kernels(cases):
    for case in cases:
        devices = jax.devices()[: 2 if case.exchange else 1]
        size = size_of(case, floats=2**13, many_rows=0, num_devices=len(devices))
        program = row_program(case, size, "interpreter", devices)
        (stack,) = program.plan.stacks
        by_kernel = {
            direction
            for direction, choice in stack.backends._asdict().items()
            if choice.backend == "interpreter"
        }
        expected = set(case.directions)
        if case.rule in (None, "clippy_adagrad"):
            expected.discard("update")
        assert by_kernel == expected, case.name
        if case.ids in ("one id", "pooled"):  # XLA has to help with others.
            assert kernels_of_batch(program) == expected & {"pool", "spread"}


def kernels_of_batch(program: RowProgram) -> set[str]:
    """Returns the directions in kernels of those that depend on the batch."""
    tables, _, features, _ = abstract_arguments(program)
    chosen = set()

    def look_up(tables, features):
        result = lookup(tables, features, program.plan)
        (routing,) = result.routing.stacks.values()
        backends = routing.backends
        for name, choice in (("pool", backends.pool), ("spread", backends.spread)):
            if choice.backend != "xla":
                chosen.add(name)
        return result.activations

    jax.eval_shape(look_up, tables, features)
    return chosen

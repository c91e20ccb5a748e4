"""The table of cases: what it covers, and what each case runs in a kernel."""

import itertools
from typing import get_args

import jax
import numpy as np
import pytest

from tests.conftest import needs_kernels
from tpu_embedding.functional import lookup
from tpu_embedding.inputs.prepare import shard_batch
from tpu_embedding.kernel_verdicts import Direction, capability_of
from tpu_embedding.tools.doctor.dense_reference import RULES
from tpu_embedding.tools.doctor.row_cases import DIMS, Coverage, IdForm, row_cases
from tpu_embedding.tools.doctor.row_inputs import make_inputs, random_ids
from tpu_embedding.tools.doctor.row_programs import RowProgram, row_program, size_of

DIRECTIONS = get_args(Direction)
EACH_ONCE = row_cases("each once", 2)
ALL = row_cases("all", 2)
CAPABILITIES = {
    capability_of(direction, dim, rule)
    for direction, dim in itertools.product(DIRECTIONS, DIMS)
    for rule in ("elements", "row sums")
}


@pytest.mark.parametrize("coverage", get_args(Coverage))
@pytest.mark.parametrize("num_devices", [1, 2])
def test_names_are_unique(coverage, num_devices):
    names = [case.name for case in row_cases(coverage, num_devices)]
    assert names and len(set(names)) == len(names)


def test_all_capabilities_are_checked_and_timed():
    assert len(CAPABILITIES) == 6 * len(DIMS)
    timed = {case.capability for case in ALL if case.is_timed}
    assert timed - {None} == CAPABILITIES


@pytest.mark.parametrize("cases", [ALL, EACH_ONCE], ids=["all", "each once"])
def test_each_kind_of_case_is_there(cases):
    assert {d for case in cases for d in case.directions} == set(DIRECTIONS)
    assert {case.dim for case in cases} >= set(DIMS)
    assert {case.ids for case in cases} == set(get_args(IdForm))
    assert {case.exchange for case in cases} == {None, "padded", "ragged"}
    assert {case.rule for case in cases} == {None, *RULES}
    assert any(case.needs_rounds for case in cases)
    for capability in CAPABILITIES:
        asked = [case for case in cases if case.may_refuse(capability)]
        assert {"padded", "ragged"} <= {case.exchange for case in asked}
        assert any(case.has_many_rows for case in asked)


def test_rows_that_only_xla_reaches_refuse_no_kernel():
    cases = [case for case in EACH_ONCE if not case.directions]
    assert {case.dim for case in cases} == {1, 100}
    assert not any(case.may_refuse(c) for case in cases for c in CAPABILITIES)


@pytest.mark.parametrize(("on_tpu", "minimum"), [(True, 2**24), (False, 2**17)])
def test_one_case_has_many_rows(on_tpu, minimum):
    (case,) = (case for case in row_cases("each once", 1) if case.has_many_rows)
    size = size_of(case, on_tpu=on_tpu, num_devices=1)
    _, weighted = random_ids(
        np.random.default_rng(0), case.ids, size.num_samples, size.table_sizes["sum"]
    )
    # Many ids name rows that a narrower number could not tell apart.
    assert np.mean(weighted.ids > minimum) > 0.4
    assert set(case.directions) == set(DIRECTIONS)


def in_tiers(cases):
    """Yields cases of the quick tier, of the full one, and of the exhaustive one."""
    for case in cases:
        is_quick = case.name in ("read, dim 32", "step, dim 512")
        mark = pytest.mark.full if case in EACH_ONCE else pytest.mark.exhaustive
        yield pytest.param(case, id=case.name, marks=[] if is_quick else mark)


@needs_kernels
@pytest.mark.parametrize("case", in_tiers(ALL))
def test_only_the_directions_of_a_case_run_in_kernels(case):
    program = row_program(case, "interpreter", jax.devices()[:2])
    (stack,) = program.plan.stacks
    by_kernel = {
        direction
        for direction, choice in stack.backends._asdict().items()
        if choice.backend == "interpreter"
    }
    expected = set(case.directions)
    if case.rule in (None, "clippy_adagrad"):
        expected.discard("update")
    assert by_kernel == expected
    if case.ids in ("one id", "pooled"):  # XLA has to help with others.
        assert kernels_of_batch(program) == expected & {"pool", "spread"}


def kernels_of_batch(program: RowProgram) -> set[str]:
    """Returns the directions in kernels of those that depend on the batch."""
    tables, _, features, _ = make_inputs(program, 0).arguments
    chosen = set()

    def look_up(tables, features):
        result = lookup(tables, features, program.plan)
        (routing,) = result.routing.stacks.values()
        backends = routing.backends
        for name, choice in (("pool", backends.pool), ("spread", backends.spread)):
            if choice.backend != "xla":
                chosen.add(name)
        return result.activations

    jax.eval_shape(look_up, tables, shard_batch(features, program.plan))
    return chosen

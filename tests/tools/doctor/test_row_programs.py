"""Compiles programs of the doctor for TPUs that are not there."""

import pytest

from tests.conftest import needs_kernels
from tpu_embedding.tools.compile_report.table_accesses import inspect_program
from tpu_embedding.tools.compile_report.topology import topology_mesh
from tpu_embedding.tools.doctor.child import effort_on
from tpu_embedding.tools.doctor.row_batches import size_of
from tpu_embedding.tools.doctor.row_cases import row_cases
from tpu_embedding.tools.doctor.row_inputs import abstract_arguments
from tpu_embedding.tools.doctor.row_programs import row_program


@needs_kernels
@pytest.mark.tpu_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
    ("name", "num_kernels"),
    [
        ("update with row sums, dim 512", 1),
        ("padded exchange, dim 32", 4),
        ("many rows, dim 8", 4),
    ],
)
def test_a_case_compiles_for_tpus(topology, name, num_kernels):
    pytest.importorskip("libtpu")
    devices = list(topology_mesh(topology).devices.flat)
    effort = effort_on(devices[0])
    cases = row_cases("sparse_core", "full", effort.coverage, len(devices))
    (case,) = (case for case in cases if case.name == name)
    devices = devices if case.exchange else devices[:1]
    size = size_of(
        case,
        floats=effort.floats,
        many_rows=effort.many_rows,
        num_devices=len(devices),
    )
    program = row_program(case, size, "sparse_core", devices)
    compiled = program.step.lower(*abstract_arguments(program)).compile()
    report = inspect_program(compiled, program.plan)
    assert report.kernels >= num_kernels
    assert report.table_sized_copies == ()

"""Compiles programs of the doctor for TPUs that are not there."""

import jax
import numpy as np
import pytest

from tests.conftest import needs_kernels
from tpu_embedding.tools.compile_report.table_accesses import inspect_program
from tpu_embedding.tools.compile_report.topology import abstract_batch, topology_mesh
from tpu_embedding.tools.doctor.row_cases import row_cases
from tpu_embedding.tools.doctor.row_inputs import abstract_state, draw_ids
from tpu_embedding.tools.doctor.row_programs import row_program


def abstract_arguments(program):
    """Returns the shapes and shardings of the arguments of a case's program."""
    features, _ = draw_ids(program, np.random.default_rng(0))
    shape = (program.size.num_samples, program.case.dim)
    cotangents = dict.fromkeys(
        program.size.table_sizes, jax.ShapeDtypeStruct(shape, np.float32)
    )
    batch = abstract_batch((features, cotangents), program.plan)
    return *abstract_state(program.plan), *batch


@needs_kernels
@pytest.mark.tpu_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
    ("name", "num_kernels"),
    [
        ("update by rowwise_adagrad, dim 512", 1),
        ("padded exchange, dim 32", 4),
        ("many rows, dim 8", 4),
    ],
)
def test_a_case_compiles_for_tpus(topology, name, num_kernels):
    pytest.importorskip("libtpu")
    devices = list(topology_mesh(topology).devices.flat)
    (case,) = (case for case in row_cases("all", 4) if case.name == name)
    program = row_program(case, "sparse_core", devices)
    compiled = program.step.lower(*abstract_arguments(program)).compile()
    report = inspect_program(compiled, program.plan)
    assert report.kernels >= num_kernels
    assert report.table_sized_copies == ()

"""Compiles programs of the doctor for TPUs that are not there."""

import jax
import numpy as np
import pytest

from tests.conftest import needs_kernels
from tpu_embedding.functional import init_slots, init_tables
from tpu_embedding.inputs.prepare import prepare_features
from tpu_embedding.tools.compile_report.table_accesses import inspect_program
from tpu_embedding.tools.compile_report.topology import (
    abstract_arrays,
    abstract_batch,
    topology_mesh,
)
from tpu_embedding.tools.doctor.row_cases import row_cases
from tpu_embedding.tools.doctor.row_inputs import random_ids
from tpu_embedding.tools.doctor.row_programs import row_program


def abstract_arguments(program):
    """Returns the shapes and shardings of the arguments of a case's program."""
    plan, case, size = program.plan, program.case, program.size
    generator = np.random.default_rng(0)
    features = {
        name: random_ids(generator, case.ids, size.num_samples, num_rows)[0]
        for name, num_rows in size.table_sizes.items()
    }
    cotangents = dict.fromkeys(
        features, jax.ShapeDtypeStruct((size.num_samples, case.dim), np.float32)
    )
    tables = jax.eval_shape(lambda: init_tables(plan, jax.random.key(0)))
    slots = jax.eval_shape(lambda: init_slots(tables, plan))
    batch = abstract_batch((prepare_features(features, plan), cotangents), plan)
    return abstract_arrays(tables, plan), abstract_arrays(slots, plan), *batch


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

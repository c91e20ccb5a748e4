"""Compiles an exported program for TPUs, which copy tables of narrow rows if they may.

Nothing here has run on a TPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.export.serving_program import make_program
from tpu_embedding.export.stablehlo import jit_program
from tpu_embedding.tools import compile_report

NUM_ROWS = 500_000


STATIC = te.TableConfig(vocabulary_size=NUM_ROWS, dim=32, combiner="mean", name="t")
DYNAMIC = te.TableConfig(
    vocabulary_size=te.Dynamic(capacity=NUM_ROWS), dim=32, name="t"
)


@pytest.mark.full
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("table", "dtype"),
    [
        pytest.param(STATIC, "float32", id="float32"),
        pytest.param(STATIC, "int8", id="int8"),
        pytest.param(DYNAMIC, "float32", id="dynamic"),
    ],
)
def test_no_copy_of_a_table(table, dtype):
    features = {"dense": te.FeatureConfig(table=table)}
    layer = te.TPUEmbedding(features, mesh=mesh_of(1), rngs=nnx.Rngs(0))
    program = make_program(
        layer,
        ({"dense": np.zeros((4, 10), int)},),
        method="__call__",
        row_format=dtype,
        batch_size=None,
    )
    device = compile_report.topology_mesh("v6e:2x2").devices.flat[0]
    sharding = SingleDeviceSharding(device)

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    specs = program.tables["t"].tensor_specs("t", dtype)
    tables = {name: struct(spec.shape, spec.dtype) for name, spec in specs.items()}
    ids = struct((512, 10), jnp.int32)
    if table is DYNAMIC:
        ids = struct((512, 10, 2), jnp.uint32)
    compiled = (
        jit_program(program.exported, list(tables), device)
        .lower(tables, {}, {"dense": ids})
        .compile()
    )
    memory = compiled.memory_analysis()
    # Rows fill 128 lanes of their type, and 64 ids lie in one line of as many.
    row_bytes = 128 * specs["t"].dtype.itemsize + 8 * (table is DYNAMIC)
    assert memory.argument_size_in_bytes <= NUM_ROWS * row_bytes * 1.01
    assert memory.temp_size_in_bytes < 8e6

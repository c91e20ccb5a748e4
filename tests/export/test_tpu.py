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


@pytest.mark.full
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_no_copy_of_a_table(topology, dtype):
    table = te.TableConfig(vocabulary_size=NUM_ROWS, dim=32, combiner="mean", name="t")
    features = {"dense": te.FeatureConfig(table=table)}
    features["ragged"] = te.FeatureConfig(table=table)
    layer = te.TPUEmbedding(features, mesh=mesh_of(1), rngs=nnx.Rngs(0))
    example = {"dense": np.zeros((4, 10), int)}
    example["ragged"] = te.RaggedIds.from_lists([[1]] * 4)
    program = make_program(
        layer, (example,), method="__call__", row_format=dtype, batch_size=None
    )
    device = compile_report.topology_mesh(topology).devices.flat[0]
    sharding = SingleDeviceSharding(device)

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    spec = program.tables["t"].stored_spec(dtype)
    arrays = {
        "dense": struct((512, 10), jnp.int32),
        "ragged/values": struct((4096,), jnp.int32),
        "ragged/row_splits": struct((513,), jnp.int32),
    }
    compiled = (
        jit_program(program.exported, ["t"], device)
        .lower({"t": struct(spec.shape, spec.dtype)}, {}, arrays)
        .compile()
    )
    memory = compiled.memory_analysis()
    # Rows fill 128 lanes of their type; the buffers of 9,216 ids take some MB.
    assert memory.argument_size_in_bytes <= NUM_ROWS * 128 * spec.dtype.itemsize * 1.01
    assert memory.temp_size_in_bytes < 8e6


@pytest.mark.full
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_no_copy_of_a_dynamic_table(topology):
    vocabulary = te.Dynamic(capacity=NUM_ROWS)
    table = te.TableConfig(vocabulary_size=vocabulary, dim=32, name="t")
    features = {"dense": te.FeatureConfig(table=table)}
    layer = te.TPUEmbedding(features, mesh=mesh_of(1), rngs=nnx.Rngs(0))
    program = make_program(
        layer,
        ({"dense": np.zeros((4, 10), int)},),
        method="__call__",
        row_format="float32",
        batch_size=None,
    )
    device = compile_report.topology_mesh(topology).devices.flat[0]
    sharding = SingleDeviceSharding(device)

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    specs = program.tables["t"].tensor_specs("t", "float32")
    tables = {name: struct(spec.shape, spec.dtype) for name, spec in specs.items()}
    arrays = {"dense": struct((512, 10, 2), jnp.uint32)}
    compiled = (
        jit_program(program.exported, list(tables), device)
        .lower(tables, {}, arrays)
        .compile()
    )
    memory = compiled.memory_analysis()
    # Rows fill 128 lanes, and 64 ids lie in one line of as many.
    assert memory.argument_size_in_bytes <= NUM_ROWS * (128 * 4 + 8) * 1.01
    assert memory.temp_size_in_bytes < 8e6

"""The whole step with tables of every placement and dtype, compiled for TPUs.

The contract is that of float32 tables over the whole mesh (`test_train_step.py`). Along
the axes of its copies, a table sends gradients only: the rows that a device looked up.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

import tpu_embedding as te
from tests.compiled.functional_step import compile_functional_step
from tests.compiled.test_train_step import ADAGRAD, BATCH, LINES_PER_DEVICE, check
from tpu_embedding.rows.packed_rows import RowLayout
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.compile_report.hlo import parse_module

TOPOLOGIES = {
    "v5p": ("v5p:2x2x1", (2, 2)),
    "v6e": ("v6e:2x4", (4, 2)),
    "tpu7x": ("tpu7x:2x2x1", (4, 2)),
}
PLACEMENTS = {
    "sharded": te.Sharded(),
    "grouped": te.Sharded(axes=("model",)),
    "replicated": te.Replicated(),
}
DIM = 64
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
)


def mesh_for(generation):
    topology, sizes = TOPOLOGIES[generation]
    devices = compile_report.topology_mesh(topology).devices
    return Mesh(devices.reshape(sizes), ("data", "model"))


def plan_of(tables, mesh, **options):
    features = {table.name: te.FeatureConfig(table=table) for table in tables}
    return te.make_plan(features, mesh, optimizer=ADAGRAD, **options)


def compile_step(plan, batch_size=BATCH):
    ids = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
    names = [feature.name for feature in plan.features]
    return compile_functional_step(plan, dict.fromkeys(names, ids))


def collectives_of(compiled):
    """Returns the kind and the elements of each collective's results."""
    return [
        (instruction.base_opcode, size)
        for instruction in parse_module(compiled.as_text()).unfused_instructions()
        if instruction.base_opcode in COLLECTIVES
        for size in instruction.sizes
    ]


def large_table(dtype, placement, mesh):
    """Returns a table with the same number of lines on each device, in any type."""
    layout = RowLayout(num_rows=1, row_shape=(DIM,), tile_lanes=128, narrow_dtype=dtype)
    shards = {"sharded": mesh.size, "grouped": mesh.shape["model"], "replicated": 1}
    return te.TableConfig(
        vocabulary_size=LINES_PER_DEVICE * layout.rows_per_line * shards[placement],
        dim=DIM,
        combiner="sum",
        name=f"{placement}_{dtype or 'float32'}",
        dtype=dtype or "float32",
        placement=PLACEMENTS[placement],
    )


@pytest.mark.tpu_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("generation", TOPOLOGIES)
def test_large_tables_of_all_dtypes_and_placements(generation):
    """Other tests have float32 and bfloat16 over the whole mesh."""
    mesh = mesh_for(generation)
    tables = [
        large_table(dtype, placement, mesh)
        for dtype in (None, "bfloat16")
        for placement in PLACEMENTS
        if placement != "sharded"
    ]
    plan = plan_of(tables, mesh, capacity=BATCH)  # one round
    compiled = compile_step(plan)
    report = check(plan, compiled)
    assert report.sparse_core_gathers >= len(tables)
    assert report.sparse_core_scatters >= 2 * len(tables)
    row_bytes = {"float32": 4 * DIM, "bfloat16": 2 * DIM}
    logical_bytes = sum(
        stack.rows_per_shard * (row_bytes[stack.tables[0].config.dtype_name] + 4 * DIM)
        for stack in plan.stacks
    )
    assert report.argument_bytes < 1.02 * logical_bytes
    # Rows and gradients of the whole batch, in lines of 128 lanes: no table.
    largest = max(size for _, size in collectives_of(compiled))
    assert largest <= 128 * BATCH


@pytest.mark.full
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("placement", ["replicated", "grouped"])
def test_copies_of_small_tables_gather_their_gradients(placement):
    mesh = mesh_for("v5p")
    table = te.TableConfig(
        vocabulary_size=8 * BATCH // mesh.size,
        dim=DIM,
        combiner="sum",
        name="small",
        placement=PLACEMENTS[placement],
    )
    plan = plan_of([table], mesh)
    (stack,) = plan.stacks
    found = collectives_of(compile_step(plan, batch_size=8 * BATCH))
    # Nothing else crosses the links but the exchange of rows between shards. XLA may
    # gather small arrays, such as row ids, by an all-reduce.
    exchanges = set() if placement == "replicated" else {"all-to-all"}
    assert {kind for kind, _ in found} - {"all-reduce"} == {"all-gather"} | exchanges
    largest = max(size for _, size in found)
    assert largest <= 2 * mesh.size * stack.rows_per_shard * DIM

"""The whole step with copies of tables, compiled for TPUs.

Along the axes of its copies, a table sends gradients only, of the rows that a device
looked up.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

import tpu_embedding as te
from tests.compiled.functional_step import compile_functional_step
from tests.compiled.test_train_step import ADAGRAD, BATCH
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.compile_report.hlo import parse_module

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


@pytest.mark.full
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("placement", ["replicated", "grouped"])
def test_copies_of_small_tables_gather_their_gradients(placement):
    devices = compile_report.topology_mesh("v5p:2x2x1").devices
    mesh = Mesh(devices.reshape(2, 2), ("data", "model"))
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

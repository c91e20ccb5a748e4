"""A step of a dynamic table, compiled for TPUs: in place, and few collectives more."""

import re

import jax
import jax.numpy as jnp
import pytest

import tpu_embedding as te
from tpu_embedding.tools import compile_report

BATCH_PER_DEVICE = 2048
functional = te.functional

# A directory that is too large for the memory of a core.
CASES = {
    "v5p": ("v5p:2x2x1", 40_000_000, 128),
    "v5p, rows that share lines": ("v5p:2x2x1", 40_000_000, 16),
    "v6e": ("v6e:2x2", 40_000_000, 64),
    "64 devices": ("v5p:4x4x4", 1_000_000_000, 32),
}


def plan_of(topology, vocabulary_size, dim):
    table = te.TableConfig(vocabulary_size=vocabulary_size, dim=dim, name="user")
    return te.make_plan(
        {"user": te.FeatureConfig(table=table)},
        compile_report.topology_mesh(topology),
        optimizer=te.optimizers.adagrad(0.1),
    )


def compile_step(plan, dim, is_dynamic):
    size = plan.num_shards * BATCH_PER_DEVICE
    tables = jax.eval_shape(lambda: functional.init_tables(plan, jax.random.key(0)))
    slots = jax.eval_shape(lambda x: functional.init_slots(x, plan), tables)

    def step(tables, slots, ids, cotangents):
        if is_dynamic:
            inserted = functional.insert_ids(tables, slots, ids, plan)
            tables, slots, ids = inserted.tables, inserted.slots, inserted.features
        result = functional.lookup(tables, ids, plan)
        gradients = functional.compute_gradients(result.routing, cotangents, plan)
        return functional.apply_gradients(tables, slots, gradients, plan)

    words = jax.ShapeDtypeStruct((size,), jnp.uint32)
    ids = functional.Ids64(high=words, low=words)
    if not is_dynamic:
        ids = jax.ShapeDtypeStruct((size,), jnp.int32)
    cotangents = jax.ShapeDtypeStruct((size, dim), jnp.float32)
    batch = ({"user": ids}, {"user": cotangents})
    arrays = compile_report.abstract_arrays((tables, slots), plan)
    inputs = compile_report.abstract_batch(batch, plan)
    options = plan.compiler_options
    jitted = jax.jit(step, donate_argnums=(0, 1), compiler_options=options)
    return jitted.lower(*arrays, *inputs).compile(), tables


@pytest.mark.full
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("case", CASES)
def test_a_step_inserts_in_place(case):
    topology, capacity, dim = CASES[case]
    plan = plan_of(topology, te.Dynamic(capacity=capacity), dim)
    compiled, tables = compile_step(plan, dim, is_dynamic=True)
    report = compile_report.inspect_program(compiled, plan)
    assert report.table_sized_copies == report.table_sized_passes == ()
    assert report.table_sized_all_gathers == ()
    buckets = tables["stack_0:ids"].keys.shape[0] // plan.num_shards
    copies = re.findall(rf"= u32\[{buckets},128\]\S* copy\S*\(", compiled.as_text())
    assert copies == []
    # 16 bytes for each row: the words of its id, its last use and its count.
    directory_bytes = 2 * 128 * 4 * buckets
    state_bytes = plan.table_bytes_per_device + plan.slot_bytes_per_device
    row_bytes = state_bytes - directory_bytes
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= state_bytes
    assert memory.temp_size_in_bytes < 0.05 * row_bytes + 64 * 2**20

"""A step of a dynamic table, compiled for TPUs: in place."""

import re

import jax
import jax.numpy as jnp
import pytest

import tpu_embedding as te
from tests.compiled.functional_step import abstract_state, compile_functional_step
from tpu_embedding.tools import compile_report

BATCH_PER_DEVICE = 2048

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


@pytest.mark.full
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("case", CASES)
def test_a_step_inserts_in_place(case):
    topology, capacity, dim = CASES[case]
    plan = plan_of(topology, te.Dynamic(capacity=capacity), dim)
    words = jax.ShapeDtypeStruct((plan.num_shards * BATCH_PER_DEVICE,), jnp.uint32)
    ids = {"user": te.functional.Ids64(high=words, low=words)}
    compiled = compile_functional_step(plan, ids, jnp.tanh, insert=True)
    tables, _ = abstract_state(plan)
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

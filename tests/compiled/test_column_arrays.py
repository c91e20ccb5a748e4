"""A table above 16 GiB per device, compiled for TPUs with SparseCores: shapes only."""

import jax
import jax.numpy as jnp
import pytest

import tpu_embedding as te
from tests.tiers import quick_cases
from tpu_embedding.tables.row_stream import lower_programs
from tpu_embedding.tools import compile_report

DIM, ARRAYS, BATCH = 512, 4, 2048

# Rows of 23.8 and 16.7 GiB per device.
CASES = {"v5p": ("v5p:2x2x2", 100_000_000), "v6e": ("v6e:2x4", 70_000_000)}


def plan_of(generation):
    topology, num_rows = CASES[generation]
    table = te.TableConfig(
        vocabulary_size=num_rows, dim=DIM, name="item", combiner="sum"
    )
    return te.make_plan(
        {"items": te.FeatureConfig(table=table)},
        compile_report.topology_mesh(topology),
        optimizer=te.optimizers.rowwise_adagrad(0.1),
    )


def shapes_of(plan):
    tables = jax.eval_shape(lambda: te.functional.init_tables(plan, jax.random.key(0)))
    slots = jax.eval_shape(lambda x: te.functional.init_slots(x, plan), tables)
    return compile_report.abstract_arrays((tables, slots), plan)


def compile_step(plan):
    def step(tables, slots, ids, cotangents):
        result = te.functional.lookup(tables, ids, plan)
        gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
        new = te.functional.apply_gradients(tables, slots, gradients, plan)
        return new, result.activations

    batch = {"items": jax.ShapeDtypeStruct((BATCH, 4), jnp.int32)}
    cotangents = {"items": jax.ShapeDtypeStruct((BATCH, DIM), jnp.float32)}
    inputs = compile_report.abstract_batch((batch, cotangents), plan)
    options = plan.compiler_options
    jitted = jax.jit(step, donate_argnums=(0, 1), compiler_options=options)
    return jitted.lower(*shapes_of(plan), *inputs).compile()


@pytest.mark.full(every_case=True)
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("generation", quick_cases(CASES, "v5p"))
def test_a_step_reads_and_adds_by_sparse_cores(generation):
    plan = plan_of(generation)
    (stack,) = plan.stacks
    assert stack.layout.column_arrays == ARRAYS
    compiled = compile_step(plan)
    report = compile_report.inspect_program(compiled, plan)
    assert report.table_sized_copies == report.table_sized_passes == ()
    assert report.table_sized_all_gathers == ()
    assert report.sparse_core_relayouts == 0
    state_bytes = plan.table_bytes_per_device + plan.slot_bytes_per_device
    assert -(2**12) <= report.alias_bytes - state_bytes < 64 * 1024
    assert report.temporary_bytes < 2**25
    # The first round, and the loop of later rounds; slots and samples come on top.
    assert report.sparse_core_gathers >= 2 * ARRAYS
    assert report.sparse_core_scatters >= 2 * ARRAYS


@pytest.mark.tpu_compiler
@pytest.mark.full
def test_other_programs_hold_no_second_table():
    plan = plan_of("v5p")
    tables, slots = shapes_of(plan)
    (stack,) = plan.stacks
    programs = lower_programs(tables[stack.name], stack, plan)
    key = jax.eval_shape(lambda: jax.random.key(0))
    programs["init_tables"] = jax.jit(
        lambda key: te.functional.init_tables(plan, key),
        out_shardings=jax.tree.map(lambda x: x.sharding, tables),
    ).lower(key)
    for name, lowered in programs.items():
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 2**28, name

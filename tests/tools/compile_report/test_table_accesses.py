"""Facts about tables in compiled programs."""

import dataclasses

import jax

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.rows.packed_rows import join_columns
from tpu_embedding.tools import compile_report


def test_a_joined_copy_of_a_cut_table_is_seen():
    v5p = te.hardware.hardware_by_name("v5p")
    # A larger table beside it: the joined one is not the largest array.
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=size, dim=dim, name=name)
        )
        for name, size, dim in (("cut", 64, 512), ("large", 1024, 128))
    }
    plan = te.make_plan(
        features,
        mesh_of(1),
        hardware=dataclasses.replace(v5p, max_array_bytes=2**16),
    )
    (cut,) = (stack for stack in plan.stacks if stack.layout.column_arrays > 1)
    tables = jax.eval_shape(lambda: te.functional.init_tables(plan, jax.random.key(0)))
    table = compile_report.abstract_arrays(tables, plan)[cut.name]
    joined = jax.jit(lambda table: join_columns(table.arrays)).lower(table).compile()
    accesses = compile_report.inspect_program(joined, plan)
    assert any("[64,512]" in text for text in accesses.table_sized_passes)

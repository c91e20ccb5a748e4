"""The whole step with narrow tables, compiled for TPUs: in place, on SparseCore.

As float32 tables in `test_train_step.py`. int8 rows are only read.
"""

import re

import pytest

import tpu_embedding as te
from tests.compiled.test_train_step import (
    ADAGRAD,
    LINES_PER_DEVICE,
    TOPOLOGIES,
    check,
    compile_step,
)
from tests.tiers import quick_cases
from tpu_embedding.rows.packed_rows import RowLayout
from tpu_embedding.tools import compile_report


def make_plan(mesh, dim, dtype, optimizer, **options):
    layout = RowLayout(num_rows=1, row_shape=(dim,), tile_lanes=128, narrow_dtype=dtype)
    rows_per_line = 128 * layout.rows_per_lane if layout.is_flat else None
    rows = LINES_PER_DEVICE * (rows_per_line or layout.rows_per_line) * mesh.size
    big, small = (
        te.TableConfig(
            vocabulary_size=size, dim=dim, combiner="sum", name=name, dtype=dtype
        )
        for name, size in (("big", rows), ("small", 1000))
    )
    config = {"one": te.FeatureConfig(table=big), "many": te.FeatureConfig(table=small)}
    return te.make_plan(config, mesh, optimizer=optimizer, **options)


STEPS = [
    *[("bfloat16", dim, "v5p") for dim in (1, 16, 128, 200)],
    *[("bfloat16", dim, "v6e") for dim in (8, 64)],
    ("bfloat16", 32, "tpu7x"),
    *[("int8", 32, "v5p"), ("int8", 64, "v6e"), ("int8", 128, "tpu7x")],
]
"""Dtype, dim and generation. A dim of 1 is a flat array."""


@pytest.mark.full
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("dtype", "dim", "generation"), quick_cases(STEPS, "int8-64-v6e")
)
def test_tpu_step_is_in_place(dtype, dim, generation):
    mesh = compile_report.topology_mesh(TOPOLOGIES[generation])
    optimizer = None if dtype == "int8" else ADAGRAD
    plan = make_plan(mesh, dim, dtype, optimizer)
    compiled = compile_step(plan, dim)
    report = check(plan, compiled)
    assert report.sparse_core_gathers > 0
    if dtype == "bfloat16":
        # Rows cross the network in two bytes per element.
        assert re.search(r"= bf16\[[\d,]+\]\S* all-to-all\(", compiled.as_text())
    if optimizer is None:
        assert report.all_to_alls == 2 + 2
        return
    assert report.all_to_alls == 3 + 2 + 2
    # As many as of a float32 table and its slot.
    assert report.sparse_core_scatters >= 4
    if 128 % dim == 0:
        rows = plan.stacks[0].num_rows / plan.num_shards
        assert report.argument_bytes < 1.02 * (2 + 4) * dim * rows

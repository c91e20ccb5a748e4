"""Block programs compiled for TPUs: bounded temporaries, writes in place, no copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables.line_exchange import line_exchange, read_lines, write_lines
from tpu_embedding.tables.row_stream import MAX_DEVICE_BYTES
from tpu_embedding.tools.compile_report.hlo import inspect_program
from tpu_embedding.tools.compile_report.topology import topology_mesh

pytestmark = pytest.mark.tpu_compiler

ONE_VALUE = jax.ShapeDtypeStruct((), jnp.float32)
SHARD_BYTES = 2 * 10**9


def lower_programs(packed, stack, plan):
    """Returns the programs of a turn: one that reads, and one that writes."""
    lines = packed.lines
    lowered = {}
    exchange = line_exchange(packed, stack, plan)
    starts = np.zeros(plan.mesh.size, np.int32)
    lowered["read"] = read_lines.lower(lines, starts, exchange=exchange)
    parts = jax.ShapeDtypeStruct(
        exchange.parts_shape, lines.dtype, sharding=plan.rows_sharding(stack)
    )
    bounds = np.zeros((2, exchange.num_shards), np.int32)
    lowered["write"] = write_lines.lower(lines, parts, *bounds, exchange=exchange)
    return lowered


def assert_bounded(topology, dim, dtype="float32", row=None, placement=None):
    """Compiles the programs of a table of 2 GB per device, or of a slot variable."""
    mesh = topology_mesh(topology)
    num_copies = mesh.size if placement is None else 1
    num_rows = min(2 * 10**9, num_copies * SHARD_BYTES // (4 * dim))
    table = te.TableConfig(
        vocabulary_size=num_rows, dim=dim, dtype=dtype, name="t", placement=placement
    )
    plan = te.make_plan(te.FeatureConfig(table=table), mesh)
    (stack,) = plan.stacks
    layout, stored = stack.layout, stack.layout.stored_dtype
    if row is not None:
        layout, stored = layout.slot_layout(row), row.dtype
    shape = (stack.num_shards * layout.num_lines, *layout.lines_shape[1:])
    sharding = plan.rows_sharding(stack)
    lines = jax.ShapeDtypeStruct(shape, stored, sharding=sharding)
    packed = PackedRows(lines=lines, layout=layout)
    for name, lowered in lower_programs(packed, stack, plan).items():
        compiled = lowered.compile()
        sizes = compiled.memory_analysis()
        is_write = name == "write"
        received = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
        shard_bytes = layout.num_lines * layout.lanes_per_line * lines.dtype.itemsize
        sent = sizes.argument_size_in_bytes - shard_bytes
        # The write gets its lines as an argument, the read returns them.
        assert sizes.temp_size_in_bytes + received + sent <= MAX_DEVICE_BYTES
        assert (sizes.alias_size_in_bytes >= shard_bytes) == is_write
        report = inspect_program(compiled, plan)
        assert not report.table_sized_copies
        assert not report.table_sized_all_gathers


CASES = {
    "narrow, v5p": ("v5p:4x4x4", 8),
    "narrow, v6e": ("v6e:2x2", 32),
    "wide": ("tpu7x:2x2x1", 512),
    "one value per row": ("v6e:4x4", 32, "float32", ONE_VALUE),
    "one column": ("tpu7x:2x2x1", 1),
    "bfloat16": ("v5e:2x4", 64, "bfloat16"),
    "int8": ("v5p:2x2x1", 64, "int8"),
    "200 columns": ("v6e:2x2", 200),
    "replicated": ("tpu7x:2x2x1", 32, "float32", None, te.Replicated()),
    "512 chips": ("v5p:8x8x8", 8),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_tables_of_2_gigabytes_per_device(case):
    assert_bounded(*CASES[case])

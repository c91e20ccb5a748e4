"""The configs that no machine of the tests can hold, compiled at their number of rows.

The batch is cut, because compile time grows with it; it does not grow with the rows.
"""

import math

import pytest

from tpu_embedding.tools import compile_report
from tpu_embedding.tools.train import apply_overrides, load_config, make_run_plan
from tpu_embedding.tools.train.ahead_of_time import other_programs
from tpu_embedding.tools.train.steps import abstract_step

# Slice, rows, and bytes of a row with its slots: Adagrad's are one per element, those
# of row-wise Adagrad one per row.
CASES = {
    "dlrm_dcnv2": ("v5p:2x2x2", 204_184_588, 4 * 128 * 2),
    "dlrm_v4": ("v5p:2x2x4", 293_051_712, 4 * (512 + 1)),
    "two_tower": ("v5p:2x2x2", 1_100_000_000, 4 * (64 + 1)),
}

# Tables of fewer elements, which XLA may copy as it likes: those of the context.
SMALL = 2**16


@pytest.mark.tpu_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_full_tables(name):
    """They are updated in place, and every other program of a run fits, too."""
    topology, num_rows, row_bytes = CASES[name]
    config = apply_overrides(load_config(name), ["batch_size=256"])
    data = config.data.outline(batch_size=config.batch_size, seed=config.seed)
    plan = make_run_plan(config, data, compile_report.topology_mesh(topology))
    step, state, batch = abstract_step(config, data, plan)
    report = compile_report.compile_report(
        *(step, state, batch, plan),
        features=batch.features,
        topology=topology,
        others=other_programs(config, data, plan),
    )
    check_step(report, num_rows * row_bytes / plan.num_shards)
    check_others(report)


def check_step(report, least):
    memory, traffic = report.memory, report.traffic
    assert memory.fits and traffic is not None
    assert memory.temporaries is not None and memory.capacity is not None
    assert memory.temporaries < 0.15 * memory.capacity
    assert least <= memory.tables + memory.slots < 1.02 * least
    moved = (*traffic.table_copies, *traffic.table_moves)
    assert not [copy for copy in moved if math.prod(copy.dims) > SMALL]
    assert any(operation.dims[0] > 10**6 for operation in traffic.sparse_core)


def check_others(report):
    """Each program fits; initial tables take 2 % of the tables, at most 256 MB."""
    assert report.fits, compile_report.format_report(report)
    memories = {other.name: other.memory for other in report.others}
    assert len(memories) == 7
    tables = report.memory.tables
    assert memories["initial tables"].temporaries <= min(256e6, 0.02 * tables)
    assert memories["initial slot variables"].temporaries <= 0.02 * tables
    for name in ("evaluation step", "serving lookup"):
        # The plan counts whole tiles, the report lines.
        assert tables - 2**16 < memories[name].tables <= tables
        assert memories[name].temporaries < 0.15 * report.memory.capacity

"""The configs that no machine of the tests can hold, compiled at their number of rows.

The batch is cut, because compile time grows with it; it does not grow with the rows.
"""

import pytest

from tests.benchmarks.dlrm_v4 import FULL
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.train import apply_overrides, load_config
from tpu_embedding.tools.train.run_steps import abstract_step, make_run_plan

# Slice, rows, and bytes of a row with its slots: Adagrad's are one per element, those
# of row-wise Adagrad one per row.
CASES = {
    "dlrm_dcnv2": ("v5p:2x2x2", 204_184_588, 4 * 128 * 2),
    FULL: ("v5p:2x2x4", 293_051_712, 4 * (512 + 1)),
    "two_tower": ("v5p:2x2x2", 1_100_000_000, 4 * (64 + 1)),
}


@pytest.mark.tpu_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES, ids=lambda name: name.rpartition("/")[2])
def test_full_tables(name):
    """They fit, and are updated in place."""
    topology, num_rows, row_bytes = CASES[name]
    config = apply_overrides(load_config(name), ["batch_size=256"])
    data = config.data.outline(batch_size=config.batch_size, seed=config.seed)
    plan = make_run_plan(config, data, compile_report.topology_mesh(topology))
    step, *arguments = abstract_step(config, data, plan)
    report = compile_report.compile_report(
        step, tuple(arguments), plan, topology=topology
    )
    memory, accesses = report.memory, report.accesses
    assert memory.fits and accesses is not None
    assert memory.capacity is not None
    assert memory.temporaries < 0.15 * memory.capacity
    least = num_rows * row_bytes / plan.num_shards
    held = plan.table_bytes_per_device + plan.slot_bytes_per_device
    assert least <= held < 1.02 * least
    assert accesses.table_sized_copies == ()
    assert accesses.sparse_core_gathers >= 1

"""The step of DLRM v4, compiled for TPUs with the benchmark's widths and few rows.

No table is copied. No float32 array in memory has a row per token, not even per token
of a micro-batch.
"""

import dataclasses

import pytest

from tests.benchmarks.dlrm_v4 import FULL
from tests.compiled.test_train_step import TOPOLOGIES, WITH_SPARSE_CORE
from tests.compiled.test_unique_ids import check, shapes_in_memory
from tpu_embedding.tools import compile_report
from tpu_embedding.tools.train import apply_overrides, load_config
from tpu_embedding.tools.train.run_steps import abstract_step, make_run_plan

SAMPLES, MICRO_BATCH = 64, 32  # of a device
# Of the longest history. A gradient of an expansion adds up 32,768 places at a time,
# which a micro-batch exceeds.
EVENTS = 1200
TOKENS = EVENTS + 9


def compile_step(topology):
    mesh = compile_report.topology_mesh(topology)
    config = load_config(FULL)
    config = apply_overrides(
        config,
        [
            f"batch_size={SAMPLES * mesh.size}",
            f"data.history.history_length={EVENTS}",
            f"model.hstu.micro_batch_size={MICRO_BATCH}",
            "model.hstu.num_layers=2",
        ],
    )
    sizes = {name: size // 20 for name, size in config.data.table_sizes.items()}
    data = dataclasses.replace(config.data, table_sizes=sizes)
    config = dataclasses.replace(config, data=data)
    data = data.outline(batch_size=config.batch_size, seed=config.seed)
    plan = make_run_plan(config, data, mesh)
    step, *arguments = abstract_step(config, data, plan)
    return plan, step.lower(*arguments).compile()


@pytest.mark.tpu_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("generation", WITH_SPARSE_CORE)
def test_a_step_has_no_row_per_token_in_float32(generation):
    plan, compiled = compile_step(TOPOLOGIES[generation])
    report = check(plan, compiled)
    assert report.sparse_core_gathers > 0
    shapes = shapes_in_memory(compiled, 512)
    assert ("bf16", MICRO_BATCH * TOKENS) in shapes
    counts = {
        samples * tokens
        for samples in (MICRO_BATCH, SAMPLES)
        for tokens in range(EVENTS, TOKENS + 9)
    }
    assert not [shape for shape in shapes if shape[0] == "f32" and shape[1] in counts]

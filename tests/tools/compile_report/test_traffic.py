"""The modelled traffic of lookups and updates."""

import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.tools.compile_report.traffic import (
    model_traffic,
    traffic_of_batch,
)

NUM_SAMPLES = 4096


@pytest.mark.parametrize("dim", [8, 32, 128])
@pytest.mark.parametrize("valence", [1, 20])
def test_sparse_cores_move_at_most_twice_the_minimum(dim, valence):
    table = te.TableConfig(vocabulary_size=10**6, dim=dim, name="t")
    plan = te.make_plan(te.FeatureConfig(table=table), optimizer="adagrad")
    num_ids = NUM_SAMPLES * valence
    sizes = {"num_ids": num_ids, "num_samples": NUM_SAMPLES, "distinct_rows": num_ids}
    traffic = model_traffic(plan.stacks[0], **sizes, cores=4)
    assert traffic.minimum < traffic.sparse_core <= 2 * traffic.minimum
    assert traffic.xla > 4 * traffic.sparse_core
    if valence == 1:
        # Read for the lookup; read and written in the table and a slot; two samples.
        assert traffic.minimum == NUM_SAMPLES * (4 * dim * (1 + 4 + 2) + 4)


def test_a_batch_counts_by_stack():
    table = te.TableConfig(vocabulary_size=50, dim=8, name="t")
    features = {
        "one": te.FeatureConfig(table=table),
        "bag": te.FeatureConfig(table=table),
        "sequence": te.FeatureConfig(table=table, max_sequence_length=3),
    }
    plan = te.make_plan(features, mesh_of(2), optimizer="adagrad")
    batch = te.inputs.prepare_features(
        {
            "one": np.zeros(8, np.int32),
            "bag": te.RaggedIds.from_lists([[1, 2]] * 8),
            "sequence": np.zeros((8, 3), np.int32),
        },
        plan,
    )
    num_ids = 4 + batch["bag"].values.size // 2 + 12
    expected = model_traffic(
        plan.stacks[0],
        num_ids=num_ids,
        num_samples=4 + 4 + 12,
        distinct_rows=min(num_ids, 50),
        cores=2,
    )
    assert traffic_of_batch(plan, batch) == {"stack_0": expected}

"""The samples of each process, on meshes whose devices are dealt to processes."""

import pytest

import tpu_embedding as te
from tpu_embedding.plan.features import process_shards

CASES = {
    "one_process": ((0, 0), {0: range(2)}),
    "two_processes": ((0, 0, 1, 1), {0: range(2), 1: range(2, 4)}),
    "not_consecutive": ((0, 1, 0, 1), None),
    "processes_in_another_order": ((1, 1, 0, 0), {1: range(2), 0: range(2, 4)}),
    "uneven_processes": ((0, 1, 1, 1), None),
    "three_devices": ((0, 0, 1), None),
}


@pytest.mark.parametrize(("processes", "expected"), CASES.values(), ids=CASES.keys())
def test_shards_of_each_process(processes, expected):
    assert process_shards(processes) == expected


def test_one_process_loads_every_batch_whole(mesh):
    table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
    plan = te.make_plan({"watched": te.FeatureConfig(table=table)}, mesh)
    assert plan.num_process_parts == 1
    for batch_size in (mesh.size, 3 * mesh.size, 7):
        assert plan.process_samples(batch_size) == range(batch_size)

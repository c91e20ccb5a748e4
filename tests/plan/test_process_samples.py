"""The samples of each process, on meshes whose devices are dealt to processes."""

import dataclasses

import pytest

import tpu_embedding as te
from tpu_embedding.plan.process_samples import process_shards


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Stands for a sharding along the first axis; `parts[d]` is the part of device d.

    Emulated devices all belong to one process, so no real sharding will do.
    """

    processes: tuple[int, ...]
    parts: tuple[int, ...]

    def devices_indices_map(self, shape):
        size = shape[0] // (max(self.parts) + 1)
        return {
            Device(i, process): (slice(part * size, (part + 1) * size),)
            for i, (process, part) in enumerate(
                zip(self.processes, self.parts, strict=True)
            )
        }


CASES = {
    "one_process": (Sharding((0, 0), (0, 1)), {0: range(2)}),
    "two_processes": (
        Sharding((0, 0, 1, 1), (0, 1, 2, 3)),
        {0: range(2), 1: range(2, 4)},
    ),
    "batch_over_first_axis_only": (
        Sharding((0, 0, 1, 1), (0, 0, 1, 1)),
        {0: range(2), 1: range(2, 4)},
    ),
    "second_axis_crosses_processes": (
        Sharding((0, 1, 0, 1), (0, 0, 1, 1)),
        {0: range(4), 1: range(4)},
    ),
    "not_consecutive": (Sharding((0, 1, 0, 1), (0, 1, 2, 3)), None),
    "processes_in_another_order": (
        Sharding((1, 1, 0, 0), (0, 1, 2, 3)),
        {1: range(2), 0: range(2, 4)},
    ),
    "uneven_processes": (Sharding((0, 1, 1, 1), (0, 1, 2, 3)), None),
}


@pytest.mark.parametrize(("sharding", "expected"), CASES.values(), ids=CASES.keys())
def test_shards_of_each_process(sharding, expected):
    assert process_shards(sharding, len(sharding.processes)) == expected


def test_one_process_loads_every_batch_whole(mesh):
    table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
    plan = te.make_plan({"watched": te.FeatureConfig(table=table)}, mesh)
    assert plan.num_process_parts == 1
    for batch_size in (mesh.size, 3 * mesh.size, 7):
        assert plan.process_samples(batch_size) == range(batch_size)

"""The samples of each process, on meshes whose devices are dealt to processes."""

import dataclasses

import numpy as np
import pytest

from tpu_embedding.plan.process_samples import samples_by_process


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
    "one_process": (Sharding((0, 0), (0, 1)), 8, {0: range(8)}),
    "two_processes": (
        Sharding((0, 0, 1, 1), (0, 1, 2, 3)),
        8,
        {0: range(4), 1: range(4, 8)},
    ),
    "batch_over_first_axis_only": (
        Sharding((0, 0, 1, 1), (0, 0, 1, 1)),
        8,
        {0: range(4), 1: range(4, 8)},
    ),
    "second_axis_crosses_processes": (
        Sharding((0, 1, 0, 1), (0, 0, 1, 1)),
        8,
        {0: range(8), 1: range(8)},
    ),
    "not_consecutive": (
        Sharding((0, 1, 0, 1), (0, 1, 2, 3)),
        8,
        {0: range(8), 1: range(8)},
    ),
    "processes_in_another_order": (
        Sharding((1, 1, 0, 0), (0, 1, 2, 3)),
        4,
        {1: range(2), 0: range(2, 4)},
    ),
    "uneven_processes": (
        Sharding((0, 1, 1, 1), (0, 1, 2, 3)),
        8,
        {0: range(8), 1: range(8)},
    ),
    "batch_does_not_divide": (
        Sharding((0, 0, 1, 1), (0, 1, 2, 3)),
        6,
        {0: range(6), 1: range(6)},
    ),
}


@pytest.mark.parametrize(
    ("sharding", "batch_size", "expected"), CASES.values(), ids=CASES.keys()
)
def test_samples_by_process(sharding, batch_size, expected):
    found = samples_by_process(sharding, len(sharding.processes), batch_size)
    assert found == expected
    if len(set(found.values())) > 1:  # Together, they are the batch.
        joined = np.concatenate([list(samples) for samples in found.values()])
        assert sorted(joined.tolist()) == list(range(batch_size))

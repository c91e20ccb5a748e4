import itertools
import math

import pytest

from tpu_embedding.hardware import TPU_GENERATIONS, hardware_by_name
from tpu_embedding.tools.launch.slices import BACKEND_NAMES, slice_facts

# Topology, backend, product, hosts. Products and hosts of the Cloud TPU API:
# cloud.google.com/tpu/docs/v5e and so on; of GKE: xpk's system_characteristics.
SLICES = [
    ("v5e:1x1", "gke", "ct5lp-hightpu-1t", 1),
    ("v5e:2x4", "gke", "ct5lp-hightpu-4t", 2),
    ("v5e:2x4", "queued_resource", "v5litepod-8", 1),
    ("v5e:4x4", "queued_resource", "v5litepod-16", 4),
    ("v4:2x2x1", "queued_resource", "v4-8", 1),
    ("v4:2x4x4", "queued_resource", "v4-64", 8),
    ("v5p:2x2x1", "gke", "ct5p-hightpu-4t", 1),
    ("v5p:2x4x4", "queued_resource", "v5p-64", 8),
    ("v5p:8x8x8", "gke", "ct5p-hightpu-4t", 128),
    ("v6e:1x1", "gke", "ct6e-standard-1t", 1),
    ("v6e:1x1", "queued_resource", "v6e-1", 1),
    ("v6e:16x16", "queued_resource", "v6e-256", 64),
    ("tpu7x:2x4x4", "gke", "tpu7x-standard-4t", 8),
    ("tpu7x:4x4x4", "gke", "tpu7x-standard-4t", 16),
]


@pytest.mark.parametrize(("topology", "backend", "product", "num_hosts"), SLICES)
def test_machines_of_a_slice(topology, backend, product, num_hosts):
    facts = slice_facts(topology, backend)
    assert facts.product == product
    assert facts.num_hosts == num_hosts
    assert facts.grid == topology.partition(":")[2]


@pytest.mark.parametrize(
    ("topology", "backend", "message"),
    [
        ("v5e:2x3", "gke", "does not exist; slices of v5e have 1x1, 2x2"),
        ("v5e:2x4x1", "gke", "does not exist"),
        ("v5e:2x-4", "gke", "does not exist"),
        ("v5e:", "gke", "is not known; give a generation and its chips"),
        ("v5e", "gke", "is not known"),
        ("v9:2x4", "gke", r"chips, as in \['v\w+.*'\]; known generations: v4, .*\w\.$"),
        ("v5litepod-8", "gke", "is not known"),
        ("v5p:1x1x1", "gke", "smaller than a machine; the smallest has 4 chips"),
        ("v4:1x1x1", "queued_resource", "smaller than a machine"),
        ("v4:2x2x1", "gke", "use backend queued_resource, or a generation of v5e, v5p"),
        ("tpu7x:2x2x1", "queued_resource", "use backend gke, or a generation of v4,"),
    ],
)
def test_what_is_not_offered_is_refused(topology, backend, message):
    with pytest.raises(ValueError, match=message):
        slice_facts(topology, backend)


def offered():
    for generation, backend in itertools.product(TPU_GENERATIONS, BACKEND_NAMES):
        for grid in hardware_by_name(generation).slice_shapes.fixed:
            try:
                yield slice_facts(f"{generation}:{'x'.join(map(str, grid))}", backend)
            except ValueError:
                continue


def test_hosts_and_chips_agree_for_every_slice():
    slices = list(offered())
    assert len(slices) > 40
    for facts in slices:
        chips = math.prod(map(int, facts.grid.split("x")))
        assert facts.num_hosts * facts.chips_per_host == chips
        if facts.gke_accelerator:
            assert facts.product.endswith(f"-{facts.chips_per_host}t")
        else:
            assert facts.runtime_version


def test_every_generation_is_offered():
    assert {topology.partition(":")[0] for topology, *_ in SLICES} == {*TPU_GENERATIONS}

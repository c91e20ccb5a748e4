"""What the host-side preparation accepts, and how a batch is placed."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import tpu_embedding as te
from tests.inputs.prepare_cases import (
    RAGGED,
    dense,
    plan_of,
    prepare,
    ragged,
)
from tests.rejections import rejects


def test_weights_of_the_nest_win():
    prepared = prepare(dense([1], np.array([2.0])), np.array([3.0]))
    assert prepared.weights.tolist() == [3]


def test_arguments_are_not_changed():
    ids = ragged([1, 2**40], [0, 1, 2], np.ones(2))
    before = jax.tree.map(np.copy, ids)
    prepare(ids, out_of_range_ids="clip")
    jax.tree.map(np.testing.assert_array_equal, ids, before)


def test_shard_batch():
    plan, divides = plan_of(8), np.arange(16) % 10
    split, whole = PartitionSpec(("shard",)), PartitionSpec()
    batch = {
        "divides": (divides, split),
        "does_not": (np.arange(9), whole),
        "matrix": (np.zeros((8, 3)), split),
        "by_second_axis": (np.zeros((3, 8)), whole),
        "scalar": (np.float32(3), whole),
        "none": (None, None),
        "weighted": (dense(divides, np.ones(16, np.float32)), split),
        "ragged": (prepare(RAGGED, num_devices=8), split),
    }
    given = {name: value for name, (value, _) in batch.items()}
    placed = te.inputs.shard_batch(given, plan)
    assert jax.tree.structure(placed) == jax.tree.structure(given)
    jax.tree.map(np.testing.assert_array_equal, placed, given)
    for name, (_, spec) in batch.items():
        for leaf in jax.tree.leaves(placed[name]):
            assert leaf.sharding == NamedSharding(plan.mesh, spec)
    with rejects(field="shard_batch: batch", value=[0, 2**40]):
        te.inputs.shard_batch(np.array([0, 2**40]), plan)

"""The picklable part of a plan, in this process and in spawned ones."""

import multiprocessing
import pickle
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of


class Columns(typing.NamedTuple):
    """A nest of one's own."""

    past: typing.Any
    rest: typing.Any


def make_plan():
    table = te.TableConfig(
        vocabulary_size=50,
        dim=4,
        name="items",
        # Neither can be pickled.
        initializer=lambda key, shape, dtype: jnp.zeros(shape, dtype),
        optimizer=te.optimizers.adagrad(0.1),
    )
    past, other = (te.FeatureConfig(table=table, name=name) for name in "ab")
    return te.make_plan(Columns(past=past, rest=[{"other": other}]), mesh_of(3))


def make_batch():
    other = np.array([[1, 2], [3, 3], [0, 8]])
    return Columns(past=[[1, 2], [], [3, 49, 5]], rest=[{"other": other}])


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for array, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(array, other)


def test_the_part_prepares_as_the_plan_does():
    plan = make_plan()
    received = pickle.loads(pickle.dumps(plan.for_loaders()))
    assert received == plan.for_loaders()
    assert received.num_shards == 3
    batch = make_batch()
    assert_equal(
        te.inputs.prepare_features(batch, received),
        te.inputs.prepare_features(batch, plan),
    )


def prepare_elsewhere(plan, batch, results):
    from jax._src import xla_bridge

    prepared = te.inputs.prepare_features(batch, plan)
    results.put((jax.tree.leaves(prepared), xla_bridge.backends_are_initialized()))


@pytest.mark.full
def test_a_spawned_loader_prepares_and_starts_no_device():
    plan, batch = make_plan(), make_batch()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    loader = context.Process(
        target=prepare_elsewhere, args=(plan.for_loaders(), batch, results)
    )
    loader.start()
    leaves, starts_devices = results.get(timeout=120)
    loader.join()
    assert loader.exitcode == 0
    assert not starts_devices
    expected = jax.tree.leaves(te.inputs.prepare_features(batch, plan))
    for array, other in zip(leaves, expected, strict=True):
        np.testing.assert_array_equal(array, other)

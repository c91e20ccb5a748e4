"""Tests the steps of the run configs: equal on any devices, compiled once."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest

from tests.conftest import mesh_of
from tpu_embedding.tools.data.batch import Batch
from tpu_embedding.tools.train import (
    abstract_batch,
    abstract_train_state,
    apply_overrides,
    init_train_state,
    jit_train_step,
    load_config,
    make_run_plan,
    make_train_step,
)
from tpu_embedding.tools.train.loop.read_ahead import put_batch

SMALL = {
    # Batches divide neither by 3 nor by 8.
    "synthetic": [
        "batch_size=100",
        "model.dim=8",
        "model.hidden_sizes=16",
        "data.num_evaluation_samples=10",
    ],
    "synthetic_stream": [
        "batch_size=100",
        "model.dim=8",
        "model.hidden_sizes=16",
        "data.num_users=40",
        "data.num_items=20",
        "data.life_steps=5",
        "data.evaluation_step=50",
        "data.num_evaluation_samples=10",
    ],
    "movielens": ["batch_size=50", "model.dim=8", "data.max_history=20"],
    "dlrm": [
        "batch_size=40",
        "model.dim=4",
        "model.bottom_sizes=8",
        "model.top_sizes=8",
        "data.vocabulary_size=100",
        "data.num_evaluation_samples=10",
    ],
    "dlrm_dcnv2": [
        "batch_size=40",
        "model.dim=4",
        "model.bottom_sizes=8",
        "model.top_sizes=8",
        "model.cross_rank=3",
        "data.max_vocabulary_size=100",
        "data.max_valence=3",
        "data.num_evaluation_samples=10",
    ],
    "two_tower": [
        "batch_size=40",
        "model.dim=8",
        "model.context_dim=4",
        "model.hidden_sizes=8",
        "data.num_users=300",
        "data.num_items=200",
        "data.history_length=6",
        "data.num_evaluation_samples=10",
    ],
}

# Relative tolerance between numbers of devices. They sum over samples and over shards
# in another order in each step, and 50 training steps accumulate the difference.
OTHER_DEVICES = 1e-5
# Relative tolerance between capacities. More rounds change the number of ids per
# exchange, but not the ids that are summed.
OTHER_CAPACITY = 1e-6


@dataclasses.dataclass
class Curve:
    losses: np.ndarray
    rounds: np.ndarray
    num_compilations: int


def small_config(name, *overrides):
    return apply_overrides(load_config(name), [*SMALL[name], *overrides])


def open_data(config):
    return config.data.open(None, batch_size=config.batch_size, seed=config.seed)


@functools.cache  # Tests share curves, because compilation takes most of the time.
def train_curve(name, data_dir, num_devices, num_steps, capacity="none"):
    config = small_config(name, f"capacity={capacity}")
    data = config.data.open(data_dir, batch_size=config.batch_size, seed=config.seed)
    plan = make_run_plan(config, data, mesh_of(num_devices))
    graphdef, state = init_train_state(config, data, plan)
    chex.clear_trace_counter()  # which counts by source, over all tests
    traced_once = chex.assert_max_traces(make_train_step(graphdef, config.loss), n=1)
    step = jit_train_step(traced_once, state, plan)
    metrics = []
    for i in range(num_steps):
        state, of_step = step(state, put_batch(data.train_batch(i), plan, "batch"))
        metrics.append(jax.device_get(of_step))
    return Curve(
        losses=np.array([m.loss for m in metrics]),
        rounds=np.array([m.rounds for m in metrics]),
        num_compilations=step._cache_size(),
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "num_steps", "others"),
    [
        ("synthetic", 50, (2, 3, 8)),
        ("synthetic_stream", 20, (3,)),
        ("movielens", 30, (3,)),
        ("dlrm", 5, (3,)),
        ("dlrm_dcnv2", 10, (3,)),
        ("two_tower", 10, (3,)),
    ],
)
def test_loss_curve_is_the_same_on_any_number_of_devices(
    name, num_steps, others, request
):
    data_dir = request.getfixturevalue("movielens_dir") if name == "movielens" else None
    one = train_curve(name, data_dir, 1, num_steps)
    assert one.num_compilations == 1
    assert one.losses[-1] < one.losses[0]
    for num_devices in others:
        curve = train_curve(name, data_dir, num_devices, num_steps)
        assert curve.num_compilations == 1
        np.testing.assert_allclose(curve.losses, one.losses, rtol=OTHER_DEVICES)


@pytest.mark.full
def test_loss_curve_is_the_same_at_the_smallest_capacity():
    usual = train_curve("synthetic", None, 8, 50)
    smallest = train_curve("synthetic", None, 8, 50, capacity="1")
    assert usual.rounds.max() == 1
    assert smallest.rounds.min() > 5
    np.testing.assert_allclose(smallest.losses, usual.losses, rtol=OTHER_CAPACITY)


def test_abstract_state_is_that_of_the_real_one():
    config = small_config("synthetic")
    data = open_data(config)
    plan = make_run_plan(config, data, mesh_of(8))
    _, state = init_train_state(config, data, plan)
    _, abstract = abstract_train_state(config, data, plan)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for wanted, real in zip(
        jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True
    ):
        assert (wanted.shape, wanted.dtype) == (real.shape, real.dtype)
        assert wanted.sharding.is_equivalent_to(real.sharding, real.ndim)
    batch = data.train_batch(0)
    real_batch = put_batch(batch, plan, "batch")
    for wanted, real in zip(
        jax.tree.leaves(abstract_batch(batch, plan)),
        jax.tree.leaves(real_batch),
        strict=True,
    ):
        assert (wanted.shape, wanted.dtype) == (real.shape, real.dtype)
        assert wanted.sharding.is_equivalent_to(real.sharding, real.ndim)


def test_step_donates_and_keeps_shardings():
    config = small_config("synthetic")
    data = open_data(config)
    plan = make_run_plan(config, data, mesh_of(8))
    graphdef, abstract = abstract_train_state(config, data, plan)
    step = jit_train_step(make_train_step(graphdef, config.loss), abstract, plan)
    batch = abstract_batch(data.train_batch(0), plan)
    compiled = step.lower(abstract, batch).compile()
    new_state, _ = compiled.output_shardings
    for wanted, got in zip(
        jax.tree.leaves(abstract), jax.tree.leaves(new_state), strict=True
    ):
        assert got.is_equivalent_to(wanted.sharding, wanted.ndim)
    sizes = [
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(abstract)
    ]
    # The lookup's statistics are the exception: the step writes but never reads them.
    # They are therefore no arguments of the compiled program.
    assert compiled.memory_analysis().alias_size_in_bytes >= 0.99 * sum(sizes)


@pytest.mark.full
def test_samples_of_weight_zero_change_nothing():
    config = small_config("synthetic")
    data = open_data(config)
    plan = make_run_plan(config, data, mesh_of(2))
    graphdef, _ = abstract_train_state(config, data, plan)
    step = jax.jit(make_train_step(graphdef, config.loss))
    batch = data.train_batch(0)
    weights = np.ones(config.batch_size, np.float32)
    weights[60:] = 0
    losses = []
    for labels in (batch.labels, np.where(weights, batch.labels, 1 - batch.labels)):
        changed = Batch(features=batch.features, labels=labels, weights=weights)
        _, state = init_train_state(config, data, plan)
        state, first = step(state, put_batch(changed, plan, "batch"))
        _, second = step(state, put_batch(changed, plan, "batch"))
        losses.append((float(first.loss), float(second.loss)))
    assert losses[0] == losses[1]

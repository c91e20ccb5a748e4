"""Steps whose loss or gradients are not finite: an error, or skipped bit by bit."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tools.train.loop.test_step import open_data, small_config
from tests.tools.train.loop.test_training_loop import losses, tiny_config
from tpu_embedding.tools.data.synthetic_clicks import SyntheticClicks
from tpu_embedding.tools.train import (
    TrainingDivergedError,
    init_train_state,
    jit_train_step,
    make_run_plan,
    make_train_step,
    train,
)
from tpu_embedding.tools.train.loop.read_ahead import put_batch
from tpu_embedding.tools.train.metrics import LOSSES


def infinite_labels(batch):
    """The loss is infinite."""
    return dataclasses.replace(batch, labels=np.full_like(batch.labels, np.inf))


def no_labels(batch):
    """With the loss of `steep_loss`, only the gradients are not finite."""
    return dataclasses.replace(batch, labels=np.zeros_like(batch.labels))


def all_labels(batch):
    return dataclasses.replace(batch, labels=np.ones_like(batch.labels))


def steep_loss(outputs, labels):
    """Is 0 at the label 0, where its derivative is not a number."""
    return jnp.sqrt(labels * jnp.square(outputs.scores + 1))


def step_and_state(num_devices, non_finite, *overrides):
    config = small_config("synthetic", f"non_finite={non_finite}", *overrides)
    data = open_data(config)
    plan = make_run_plan(config, data, mesh_of(num_devices))
    graphdef, state = init_train_state(config, data, plan)
    step = make_train_step(graphdef, config.loss, non_finite=config.non_finite)
    chex.clear_trace_counter()
    step = jit_train_step(chex.assert_max_traces(step, n=1), state, plan)
    return step, state, lambda change: put_batch(change(data.train_batch(0)), plan, "")


def bits(state):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize(
    ("num_devices", "overrides"),
    [
        (3, ()),
        # Rounds, and a table whose state counts its steps.
        pytest.param(8, ("capacity=2", "table_dtype=bfloat16"), marks=pytest.mark.full),
    ],
    ids=["3devices", "8devices_in_rounds"],
)
def test_a_skipped_step_leaves_every_bit(num_devices, overrides, monkeypatch):
    loss = dataclasses.replace(LOSSES["log_loss"], per_sample=steep_loss)
    monkeypatch.setitem(LOSSES, "log_loss", loss)
    step, state, batch = step_and_state(num_devices, "skip_step", *overrides)
    for bad, loss_is_finite in ((infinite_labels, False), (no_labels, True)):
        before = bits(state)
        state, metrics = step(state, batch(bad))
        assert np.isfinite(metrics.loss) == loss_is_finite
        assert not metrics.is_finite
        assert bits(state) == before
        state, metrics = step(state, batch(all_labels))
        assert metrics.is_finite
        changed = sum(a != b for a, b in zip(bits(state), before, strict=True))
        assert changed > len(before) / 2  # tables, accumulators, dense parameters
    assert step._cache_size() == 1


@pytest.mark.full
def test_a_step_that_may_be_skipped_equals_one_that_may_not():
    results = []
    for non_finite in ("raise", "skip_step"):
        step, state, batch = step_and_state(3, non_finite)
        for _ in range(2):
            state, _ = step(state, batch(lambda batch: batch))
        results.append(jax.tree.leaves(state))
    for one, other in zip(*results, strict=True):
        # XLA fuses the two programs differently, and rounds in other places.
        np.testing.assert_allclose(*map(np.asarray, (one, other)), rtol=1e-5, atol=1e-7)


def spoil_step(monkeypatch, spoiled):
    train_batch = SyntheticClicks.train_batch

    def spoil(self, step):
        batch = train_batch(self, step)
        weights = batch.weights * np.float32(1e38 if step in spoiled else 1)
        return dataclasses.replace(batch, weights=weights)

    monkeypatch.setattr(SyntheticClicks, "train_batch", spoil)


def test_a_run_skips_a_step(tmp_path, monkeypatch):
    """The sum of such weights is infinite; each of them is a valid one."""
    spoil_step(monkeypatch, {3})
    arguments = ("num_steps=6", "evaluate_every=0")
    with pytest.raises(TrainingDivergedError, match="loss of step 4 is nan.*skip_step"):
        train(tiny_config(*arguments), tmp_path / "raise", mesh=mesh_of(1))
    skipping = tiny_config(*arguments, "non_finite=skip_step")
    # The run that failed can continue under the other policy.
    train(skipping, tmp_path / "raise", mesh=mesh_of(1), existing_run="resume")
    found = losses(tmp_path / "raise")
    assert found[4] is None
    assert all(np.isfinite(found[step]) for step in (1, 2, 3, 5, 6))


def test_update_if_of_a_library_user():
    """The way that the guide shows for explicit arrays."""
    table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
    plan = te.make_plan(
        te.FeatureConfig(table=table), mesh_of(2), optimizer=te.optimizers.adam(0.1)
    )
    tables = te.functional.init_tables(plan, jax.random.key(0))
    state = tables, te.functional.init_slots(tables, plan)
    before = bits(state)

    @jax.jit
    def step(state, ids, factor):
        result = te.functional.lookup(state[0], ids, plan)
        cotangents = jax.tree.map(lambda x: x * factor, result.activations)
        gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
        return te.gradients.update_if(
            te.gradients.all_finite(gradients),
            lambda state: te.functional.apply_gradients(*state, gradients, plan),
            state,
        )

    ids = jnp.array([1, 2, 2, 3])
    assert bits(step(state, ids, jnp.nan)) == before
    assert bits(step(state, ids, 1.0)) != before

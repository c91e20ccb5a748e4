"""Steps of the training loop with dynamic tables: new ids, counts, skipped steps."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from tests.conftest import mesh_of
from tests.tools.train.loop.test_step import open_data, small_config
from tpu_embedding import functional
from tpu_embedding.nn.training import embedding_layers
from tpu_embedding.tools.train import (
    init_train_state,
    jit_train_step,
    make_evaluation_step,
    make_run_plan,
    make_train_step,
)
from tpu_embedding.tools.train.loop.read_ahead import put_batch
from tpu_embedding.tools.train.metrics import values_of


class Trainer:
    """A train step, its state, and the batches of the small config."""

    def __init__(self, num_devices, *overrides):
        config = small_config("synthetic_stream", *overrides)
        self.data, self.loss = open_data(config), config.loss
        self.plan = make_run_plan(config, self.data, mesh_of(num_devices))
        self.graphdef, self.state = init_train_state(config, self.data, self.plan)
        step = make_train_step(self.graphdef, config.loss, non_finite=config.non_finite)
        self.compiled = jit_train_step(step, self.state, self.plan)

    def step(self, batch):
        batch = put_batch(batch, self.plan, "batch")
        self.state, metrics = self.compiled(self.state, batch)
        return metrics

    def dense(self):
        model, _ = nnx.merge(self.graphdef, self.state, copy=True)
        return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))]

    def rows(self):
        """Returns the row of each id that has one, by table and id."""
        model, _ = nnx.merge(self.graphdef, self.state, copy=True)
        (layer,) = embedding_layers(model).values()
        tables = layer.tables.get_value()
        values = functional.unstack_tables(tables, self.plan)
        return {
            (name, number): values[name][row].tolist()
            for name, found in functional.dynamic_rows(tables, self.plan).items()
            for number, row in zip(found.ids.tolist(), found.rows, strict=True)
        }


def ids_of(batch):
    return {(name, x) for name, ids in batch.features.items() for x in ids.tolist()}


@pytest.mark.parametrize("num_devices", [1, pytest.param(3, marks=pytest.mark.full)])
def test_counts_are_those_of_the_ids(num_devices):
    """Without evictions, the ids of earlier steps give all counts."""
    trainer, known = Trainer(num_devices, "data.capacity_ratio=20"), set()
    for i in range(4):
        batch = trainer.data.train_batch(i)
        metrics = trainer.step(batch)
        for name, ids in batch.features.items():
            stats = metrics.dynamic_tables[name]
            assert stats.ids == len(ids)
            assert stats.hits == sum((name, x) in known for x in ids.tolist())
            new = {(name, x) for x in ids.tolist()} - known
            assert stats.inserts == len(new)
            assert stats.evictions == stats.not_admitted == stats.no_place == 0
            known |= new
            assert stats.used_rows == sum(table == name for table, _ in known)
    assert trainer.rows().keys() == known
    assert trainer.compiled._cache_size() == 1


def test_an_evaluation_inserts_nothing():
    trainer = Trainer(1)
    trainer.step(trainer.data.train_batch(0))
    before = trainer.rows()
    evaluate = jax.jit(make_evaluation_step(trainer.graphdef, trainer.loss))
    for step in (1, 1001):
        batch = trainer.data.train_batch(step)
        found = evaluate(trainer.state, put_batch(batch, trainer.plan, "batch"))
        values = values_of(found)
        assert list(values)[0] == "log_loss"
        assert np.isfinite(values["log_loss"])
        for name, ids in batch.features.items():
            known = [(name, x) in before for x in ids.tolist()]
            assert values[f"hits/{name}"] == pytest.approx(np.mean(known))
    assert trainer.rows() == before
    assert values["hits/user"] == 0


def test_a_skipped_step_trains_nothing_but_keeps_its_new_ids():
    trainer = Trainer(1, "non_finite=skip_step", "data.capacity_ratio=20")
    trainer.step(trainer.data.train_batch(0))
    rows, dense = trainer.rows(), trainer.dense()
    batch = trainer.data.train_batch(4)
    infinite = np.full_like(batch.labels, np.inf)
    metrics = trainer.step(dataclasses.replace(batch, labels=infinite))
    assert not metrics.is_finite
    assert metrics.dynamic_tables["user"].inserts > 0
    after = trainer.rows()
    assert after.keys() == rows.keys() | ids_of(batch)
    assert {key: after[key] for key in rows} == rows
    for one, other in zip(trainer.dense(), dense, strict=True):
        np.testing.assert_array_equal(one, other)
    assert trainer.step(batch).is_finite
    changed = [key for key in ids_of(batch) if trainer.rows()[key] != after[key]]
    assert len(changed) == len(ids_of(batch))

"""Batches on their way to the devices: order, parts, checks."""

import dataclasses
import threading

import numpy as np
import pytest

from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tools.train.runs import small_config
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.train.run_steps import (
    READ_AHEAD,
    check_values,
    make_run_plan,
    prepare_batch,
    train_batches,
)

CONFIG = small_config()
DATA = CONFIG.data.open(None, batch_size=CONFIG.batch_size, seed=0)
PLAN = make_run_plan(CONFIG, DATA, mesh_of(2))


class Recorded:
    """The data of the config; records the steps that were read, and in which thread."""

    def __init__(self, wrong_step=None):
        self.steps, self.threads, self.wrong_step = [], set(), wrong_step

    def train_batch(self, step):
        self.steps.append(step)
        self.threads.add(threading.get_ident())
        batch = DATA.train_batch(step)
        if step == self.wrong_step:
            batch.labels[5] = 4
        return batch


def test_batches_come_in_order_and_are_read_ahead():
    data = Recorded()
    batches = train_batches(CONFIG, data, PLAN, range(3, 9))
    for wanted, (step, batch, *_) in zip(range(3, 7), batches, strict=False):
        assert step == wanted
        np.testing.assert_array_equal(batch.labels, DATA.train_batch(step).labels)
    batches.close()
    assert data.steps[-1] <= 6 + READ_AHEAD
    assert threading.get_ident() not in data.threads


def test_an_error_reaches_the_loop_at_its_step():
    batches = train_batches(CONFIG, Recorded(wrong_step=1), PLAN, range(3))
    assert next(batches)[0] == 0
    with rejects(DataError, field="batch 1: labels", value=4, fix="sample 5"):
        next(batches)


@pytest.mark.parametrize(
    ("values", "wrong"),
    [("labels", -1.0), ("labels", np.inf), ("weights", -1.0), ("weights", np.inf)],
)
def test_values_without_a_meaning_are_rejected(values, wrong):
    batch = DATA.train_batch(0)
    array = np.array(getattr(batch, values), np.float64)
    array[7:9] = wrong, np.nan
    batch = dataclasses.replace(batch, **{values: array})
    with rejects(DataError, field=values, value=wrong, fix="sample 7"):
        check_values(batch, CONFIG, "Batch")


def test_ids_outside_of_their_table_are_rejected():
    batch = DATA.train_batch(0)
    features = batch.features | {"user": batch.features["user"] + 10**6}
    with rejects(DataError, fix="user"):
        prepare_batch(dataclasses.replace(batch, features=features), PLAN)


def test_arrays_become_float32_and_int32():
    batch = dataclasses.replace(
        DATA.train_batch(0), dense={"age": np.arange(48), "price": np.zeros((48, 2))}
    )
    prepared = prepare_batch(batch, PLAN)
    assert prepared.dense["age"].dtype == np.int32
    assert prepared.dense["price"].dtype == np.float32
    dense = np.arange(96).reshape(48, 2)
    prepared = prepare_batch(dataclasses.replace(batch, dense=dense), PLAN)
    assert prepared.dense.dtype == np.float32


def test_a_process_reads_its_samples_only(monkeypatch):
    class WithParts(Recorded):
        batch_size = CONFIG.batch_size
        evaluation_batches = DATA.evaluation_batches

        def train_part(self, step, samples):
            self.steps.append((step, samples))
            raise DataError("read")

    monkeypatch.setattr(type(PLAN), "process_samples", lambda *_: range(12, 24))
    data = WithParts()
    with pytest.raises(DataError, match="read"):
        next(train_batches(CONFIG, data, PLAN, range(2, 3)))
    assert data.steps == [(2, range(12, 24))]
    # A data set without the method reads whole batches.
    ((_, batch, *_),) = train_batches(CONFIG, Recorded(), PLAN, range(2, 3))
    np.testing.assert_array_equal(batch.labels, DATA.train_batch(2).labels)

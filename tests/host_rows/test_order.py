"""Rows keep their order: reads wait for writes, and waiting loops pin rows."""

import threading

import numpy as np
import pytest

import tpu_embedding as te
from tests.host_rows import models
from tests.host_rows.models import feed, make, train
from tests.host_rows.twins import check_equal
from tpu_embedding.host_rows.store import RowStore

CACHE = te.HostRows(cache_rows=80, window=1)


def disjoint_batches(number, start=0):
    """Batches of 24 rows; a row comes again after 5 batches, when it has left."""
    return [
        {"user": (np.arange(24, dtype=np.int32) + 24 * (i % 5)).reshape(8, 3) + start}
        for i in range(number)
    ]


def trained(data, placement=CACHE):
    """Trains on batches, one batch after the draws, and returns the state."""
    model, optimizer = make(placement)
    drawn = []
    for number, batch in enumerate(feed(data, model, optimizer)):
        drawn.append(batch)
        if number:
            train(model, optimizer, drawn[-2])
    train(model, optimizer, drawn[-1])
    return models.state_of(model, optimizer)


@pytest.mark.full
def test_the_reader_waits_for_the_write(monkeypatch):
    """A write begins only when nothing else can go on."""
    waits = threading.Event()
    write, wait_for = RowStore.write, threading.Condition.wait_for
    num_waits = 0

    def slow_write(self, rows, records):
        assert waits.wait(timeout=60)
        write(self, rows, records)

    def counted(self, predicate, timeout=None):
        nonlocal num_waits
        if not predicate():
            num_waits += 1
            waits.set()
        return wait_for(self, predicate, timeout)

    monkeypatch.setattr(RowStore, "write", slow_write)
    monkeypatch.setattr(threading.Condition, "wait_for", counted)
    data = disjoint_batches(12)
    found = trained(data)
    assert num_waits
    check_equal(found, trained(data, te.Sharded()))


@pytest.mark.full
def test_rows_of_a_waiting_loop_are_pinned():
    """A batch that was drawn trains after an evaluation of many batches."""
    model, optimizer = make(te.HostRows(cache_rows=120))

    for batch in feed(disjoint_batches(2), model, optimizer):
        for other in feed(disjoint_batches(6, start=120), model, optimizer):
            models.evaluate(model, other)
        train(model, optimizer, batch)
    twin = make(te.Sharded())
    models.fit(*twin, disjoint_batches(2))
    check_equal(models.state_of(model, optimizer), models.state_of(*twin))


@pytest.mark.full
def test_an_old_loop_closed_in_another_thread():
    """As the garbage collector may do, while the next loop trains."""
    model, optimizer = make(te.HostRows(cache_rows=120, window=1))
    old = feed(disjoint_batches(3), model, optimizer)
    train(model, optimizer, next(old))
    for number, batch in enumerate(feed(disjoint_batches(12), model, optimizer)):
        train(model, optimizer, batch)
        if number == 4:
            thread = threading.Thread(target=old.close)
            thread.start()
            thread.join()
    twin = make(te.Sharded())
    models.fit(*twin, [*disjoint_batches(1), *disjoint_batches(12)])
    check_equal(models.state_of(model, optimizer), models.state_of(*twin))

"""Loops leave no threads and no files."""

import gc
import itertools
import os
import pathlib
import threading

import pytest

import tpu_embedding as te
from tests.host_rows.models import batches, feed, make, train


def open_files():
    """Returns the open files of this process."""
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/fd").exists(), reason="/proc shows open files"
)
@pytest.mark.full
def test_short_loops_leave_nothing(tmp_path):
    """Neither those that end, nor those that are left or closed."""
    model, optimizer = make(te.HostRows(cache_rows=100, directory=tmp_path))
    data = batches(6)

    def loop(number):
        drawn = feed(data, model, optimizer)
        for batch in itertools.islice(drawn, 1 + number % 7):
            if number % 20 == 0:
                train(model, optimizer, batch)
        if number % 3 == 0:
            drawn.close()

    for number in range(20):
        loop(number)
    gc.collect()
    before = threading.active_count(), open_files()
    for number in range(300):
        loop(number)
    gc.collect()
    after = threading.active_count(), open_files()
    assert after[0] <= before[0] and after[1] <= before[1]

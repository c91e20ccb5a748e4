"""A store returns the records that were written, from memory and from a mapped file."""

import errno
import os

import numpy as np
import pytest

from tests.rejections import rejects
from tpu_embedding.host_rows import store as store_module
from tpu_embedding.host_rows.store import RowStore

NUM_ROWS, WORDS = 1000, 5


@pytest.fixture(params=[1, 8], ids="{}threads".format)
def threads(request, monkeypatch):
    monkeypatch.setattr(store_module, "_num_cores", lambda: request.param)
    monkeypatch.setattr(store_module, "_FILE_THREADS", request.param)
    monkeypatch.setattr(store_module, "_SLICE_BYTES", 16 * 4 * WORDS)
    monkeypatch.setattr(store_module, "_FILE_SLICE_ROWS", 16)
    return request.param


@pytest.fixture(params=[False, True], ids=["memory", "mapped"])
def store(request, tmp_path):
    return RowStore(NUM_ROWS, WORDS, str(tmp_path) if request.param else None)


def random_records(seed, count):
    bits = np.random.default_rng(seed).integers(2**32, size=(count, WORDS))
    return bits.astype(np.uint32)


def test_random_reads_and_writes_equal_an_array(store, threads):
    random = np.random.default_rng(threads)
    expected = random_records(0, NUM_ROWS)
    store.write(np.arange(NUM_ROWS, dtype=np.int32), expected)
    for turn in range(30):
        count = int(random.choice([0, 1, 31, 32, 33, 500, NUM_ROWS]))
        rows = random.permutation(NUM_ROWS)[:count].astype(np.int32)
        records = random_records(turn, count)
        if turn % 3 == 0:
            records = np.repeat(records, 2, axis=1)[:, ::2]
        used = rows.copy()
        if turn % 2:
            used[random.random(count) < 0.5] = -1
        store.write(used, records)
        expected[used[used >= 0]] = records[used >= 0]
        np.testing.assert_array_equal(store.read(rows), expected[rows])
        out = np.zeros((count, WORDS), np.uint32)
        assert store.read(used, out=out) is out
        np.testing.assert_array_equal(out[used >= 0], expected[used[used >= 0]])
    everything = store.read_range(0, NUM_ROWS, slice(None))
    np.testing.assert_array_equal(everything, expected)


def test_ranges_of_rows_and_words(store):
    expected = random_records(0, NUM_ROWS)
    store.write_range(0, expected, slice(0, WORDS))
    store.write_range(10, expected[:7, 1:3], slice(2, 4))
    expected[10:17, 2:4] = expected[:7, 1:3]
    values = store.read_range(5, 30, slice(1, 4))
    np.testing.assert_array_equal(values, expected[5:30, 1:4])
    values[:] = 0
    for begin in (0, NUM_ROWS, NUM_ROWS + 5000):
        assert store.read_range(begin, begin, slice(1, 4)).shape == (0, 3)
    np.testing.assert_array_equal(
        store.read(np.arange(NUM_ROWS, dtype=np.int32)), expected
    )


def test_some_words_of_random_rows(store, threads):
    expected = random_records(0, NUM_ROWS)
    store.write_range(0, expected, slice(None))
    for count in (0, 1, 100):
        rows = np.random.default_rng(count).permutation(NUM_ROWS)[:count]
        store.write_words(rows, expected[:count, 1:3] + 1, slice(2, 4))
        expected[rows, 2:4] = expected[:count, 1:3] + 1
        np.testing.assert_array_equal(store.read(rows), expected[rows])
    values = store.read_range(0, NUM_ROWS, slice(None))
    np.testing.assert_array_equal(values, expected)


def test_rows_that_do_not_exist_fail(store):
    rows = np.array([0, NUM_ROWS], np.int32)
    with pytest.raises(AssertionError):
        store.read(rows)
    with pytest.raises(AssertionError):
        store.write(rows, random_records(0, 2))
    with pytest.raises(AssertionError):
        store.write_range(NUM_ROWS - 1, random_records(0, 2), slice(None))


def test_a_failing_slice_raises(store, threads):
    def fail(part):
        if part.stop == 100:
            raise OSError("disk")

    with pytest.raises(OSError):
        store._in_slices(fail, 100)


def test_files_have_no_name(tmp_path):
    stores = [RowStore(NUM_ROWS, WORDS, str(tmp_path)) for _ in range(2)]
    for number, store in enumerate(stores):
        store.write(np.arange(NUM_ROWS), np.full((NUM_ROWS, WORDS), number, np.uint32))
    for number, store in enumerate(stores):
        assert (store.read_range(0, NUM_ROWS, slice(0, WORDS)) == number).all()
    assert not any(tmp_path.iterdir())


def test_a_missing_directory_is_an_error(tmp_path):
    with rejects(FileNotFoundError, fix="absent"):
        RowStore(NUM_ROWS, WORDS, str(tmp_path / "absent"))


def test_a_full_disk_is_an_error_before_training(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with rejects(OSError, fix="HostRows.directory"):
        RowStore(NUM_ROWS, WORDS, str(tmp_path))
    assert not any(tmp_path.iterdir())

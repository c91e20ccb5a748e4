"""The store of verdicts: what it writes is read back, and what it replaces."""

import pytest

from tests.verdict_files import record_of, verdict, write_records
from tpu_embedding.kernel_verdicts import load_verdicts, verdict_file
from tpu_embedding.tools.doctor.verdict_store import store_verdicts

READ, WRITE = verdict("read"), verdict("write")
WRONG = verdict("read", problem="read, dim 8: hangs")


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TPU_EMBEDDING_VERDICTS", str(tmp_path / "verdicts"))


def store(*verdicts, kind="cpu", **options):
    return store_verdicts(kind, "interpreter", verdicts, **options)


def stored(kind="cpu"):
    return load_verdicts(kind, "interpreter").verdicts


def test_verdicts_are_read_back():
    path = store(READ, WRITE)
    assert stored() == (READ, WRITE)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_complete_check_replaces_all_verdicts_on_its_device():
    store(READ, WRITE)
    store(READ, kind="TPU of a test")
    store(WRONG)
    assert stored() == (WRONG,)
    store(READ)
    assert stored() == (READ,)
    assert stored("TPU of a test") == (READ,)


def test_a_quick_check_refuses_kernels_but_allows_none():
    store(READ, is_complete=False)
    assert stored() == ()
    store(READ, WRITE)
    store(WRONG, verdict("write", speed_ratio=9.0), is_complete=False)
    assert stored() == (WRONG, WRITE)
    store(READ, is_complete=False)
    assert stored() == (WRONG, WRITE)


def test_a_quick_check_keeps_no_stale_verdicts():
    write_records(record_of("cpu", "interpreter", WRITE, jax="0.0.1"))
    store(WRONG, is_complete=False)
    assert stored() == (WRONG,)


@pytest.mark.parametrize("text", ["", "{", '{"records": [3]}'])
def test_a_damaged_file_is_replaced(text):
    store(READ).write_text(text)
    assert stored() == ()
    store(WRITE)
    assert stored() == (WRITE,)


def test_a_write_that_fails_leaves_the_file():
    store(READ)
    with pytest.raises(TypeError):
        store_verdicts(object(), "interpreter", [WRITE])  # JSON cannot hold the kind
    assert stored() == (READ,)
    assert list(verdict_file().parent.iterdir()) == [verdict_file()]

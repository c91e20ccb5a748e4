"""Tests locks on files."""

import errno
import fcntl

import pytest

from tpu_embedding.file_locks import locked_file


def test_a_second_holder_is_refused_and_the_file_goes(tmp_path):
    path = tmp_path / "lock"
    for _ in range(2):
        with locked_file(path):
            with pytest.raises(BlockingIOError), locked_file(path):
                pass
            assert path.exists()
        assert not path.exists()


def test_a_file_system_without_locks_refuses_nobody(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked_file(tmp_path / "lock"), locked_file(tmp_path / "lock"):
        pass
    assert not (tmp_path / "lock").exists()

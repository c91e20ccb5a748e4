"""Unpacks the fixtures, and leaves out the scripts that wrote them.

The scripts need the libraries whose checkpoints they write.
"""

import pathlib
import shutil

import pytest

collect_ignore_glob = ["fixtures/make_*.py"]


@pytest.fixture
def unpacked(tmp_path):
    """Returns a function that unpacks a checkpoint to a directory of the test."""

    def unpack(name):
        archive = pathlib.Path(__file__).parent / "fixtures" / f"{name}.zip"
        shutil.unpack_archive(archive, tmp_path / name)
        return tmp_path / name

    return unpack

"""Paths that are no source of tables."""

import importlib.util
import pathlib

import numpy as np
import pytest

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports import opening
from tpu_embedding.checkpoint.imports.opening import open_tables


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "no file or directory"),
        ("empty_directory", "The format of .* is unknown"),
        ("text.txt", "The format of .* is unknown"),
        ("model.pt", "torch.load.'model.pt', map_location='cpu'"),
        ("model.weights.h5", "np.savez.'tables.npz', movie=model.get_layer"),
    ],
)
def test_refusals(tmp_path, name, message):
    (tmp_path / "empty_directory").mkdir()
    for file in ("text.txt", "model.pt", "model.weights.h5"):
        (tmp_path / file).write_text("text")
    with pytest.raises(ValueError, match=message):
        open_tables(tmp_path / name)


def test_refuses_files_with_arrays_of_one_name(tmp_path):
    (tmp_path / "a").mkdir()
    header = b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    for name in ("x", "y"):
        file = tmp_path / f"{name}.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header)
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(CheckpointError, match=r"several arrays of the names \['a'\]"):
        open_tables(tmp_path)


def test_refuses_remote_paths():
    with pytest.raises(CheckpointError, match="local files, got gs://bucket/tables"):
        open_tables("gs://bucket/tables")


@pytest.mark.parametrize(
    "path", ["serving_sgd", "serving_sgd/ckpt-1", "serving_sgd/ckpt-1.index"]
)
def test_a_tensorflow_checkpoint_without_tensorflow(monkeypatch, path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    files = pathlib.Path(__file__).parent / "fixtures" / "tensorflow"
    message = r"ckpt-1 is a TensorFlow checkpoint.*\[tf\].*te.save there"
    with pytest.raises(CheckpointError, match=message):
        open_tables(files / path)


def test_errors_of_the_system_name_the_source(tmp_path, monkeypatch):
    path = tmp_path / "tables.npz"
    path.write_bytes(b"")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(opening, "arrays_of_npz", refuse)
    with pytest.raises(CheckpointError, match="tables.npz cannot be read: .* denied"):
        open_tables(path)

"""Paths that are no source of tables."""

import numpy as np
import pytest

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.open_tables import open_tables


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("missing", "auto", "no file or directory"),
        ("empty_directory", "auto", "The format of .* is unknown"),
        ("text.txt", "auto", "The format of .* is unknown"),
        ("model.pt", "auto", "torch.load.'model.pt', map_location='cpu'"),
        ("missing", "tensorflow", "is no TensorFlow checkpoint"),
        ("text.txt", "tf", "format must be one of"),
    ],
)
def test_refusals(tmp_path, name, format, message):
    (tmp_path / "empty_directory").mkdir()
    for file in ("text.txt", "model.pt"):
        (tmp_path / file).write_text("text")
    with pytest.raises(ValueError, match=message):
        open_tables(tmp_path / name, format)


def test_refuses_files_with_arrays_of_one_name(tmp_path):
    (tmp_path / "a").mkdir()
    header = b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    for name in ("x", "y"):
        file = tmp_path / f"{name}.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header)
    np.save(tmp_path / "b.npy", np.zeros(3))
    with pytest.raises(CheckpointError, match=r"several arrays of the names \['a'\]"):
        open_tables(tmp_path)

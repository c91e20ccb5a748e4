"""Missing libraries of extras are named before any work is done."""

import sys

import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.extras import MissingExtraError, require_extra
from tpu_embedding.tools import cli
from tpu_embedding.tools.train import apply_overrides, load_config, train


def test_what_is_there_passes():
    require_extra("train", "numpy", "tyro", purpose="This test")


def test_the_error_names_library_extra_and_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "tyro", None)
    text = r"This test needs the library tyro.*extra `train`: pip install '.\[train\]'"
    with pytest.raises(MissingExtraError, match=text):
        require_extra("train", "numpy", "tyro", purpose="This test")


def test_the_command_without_its_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main(["train", "synthetic"]) == 2
    assert "error: The command tpu-embedding needs" in capsys.readouterr().err
    with pytest.raises(MissingExtraError, match="apply_overrides needs"):
        apply_overrides(load_config("synthetic"), [])


@pytest.mark.parametrize("library", ["matplotlib", "tensorboardX"])
def test_a_run_without_a_library_of_its_reports(library, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=library):
        train(load_config("synthetic"), tmp_path, mesh=mesh_of(1))
    assert not list(tmp_path.iterdir())


def test_an_export_without_flatbuffers_traces_nothing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(te.export.ExportError, match="extra `serving`"):
        te.export.save(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), tmp_path / "served", [0])

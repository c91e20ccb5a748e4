"""Missing libraries of extras are named before any work is done."""

import sys

import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tools.cli.test_command import status_of
from tpu_embedding.extras import MissingExtraError, require_extra
from tpu_embedding.tools.train import load_config, train


def test_what_is_there_passes():
    require_extra("train", "numpy", "matplotlib", purpose="This test")


def test_the_error_names_library_extra_and_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = r"This test needs the library mat.*extra `train`: pip install '.\[train\]'"
    with pytest.raises(MissingExtraError, match=text):
        require_extra("train", "numpy", "matplotlib", purpose="This test")


NEED_NO_EXTRA = [
    ["--help"],
    ["--version"],
    ["train", "synthetic", "--set", "help"],
    ["compile", "--help"],
    ["export", "--help"],
    ["inspect", "--help"],
    ["doctor", "--help"],
]


@pytest.mark.parametrize("arguments", NEED_NO_EXTRA, ids=" ".join)
def test_commands_without_the_extra(arguments, monkeypatch, capsys):
    for library in ("matplotlib", "tensorboardX"):
        monkeypatch.setitem(sys.modules, library, None)
    assert status_of(*arguments) == 0
    assert status_of("train", "synthetic") == 2
    assert "pip install '.[train]'" in capsys.readouterr().err


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

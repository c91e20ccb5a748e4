"""Missing libraries of extras are named before any work is done."""

import sys

import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tools.cli.test_command import status_of
from tpu_embedding.extras import MissingExtraError, require_extra
from tpu_embedding.tools.train import load_config, train


def test_the_error_names_library_extra_and_command(monkeypatch):
    require_extra("train", "numpy", "matplotlib", purpose="This test")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with rejects(MissingExtraError, fix="pip install '.[train]'") as error:
        require_extra("train", "numpy", "matplotlib", purpose="This test")
    assert "matplotlib" in str(error.value)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "synthetic", "--help"]])
def test_commands_without_the_extra(arguments, monkeypatch, capsys):
    for library in ("matplotlib", "tensorboardX"):
        monkeypatch.setitem(sys.modules, library, None)
    assert status_of(*arguments) == 0
    assert status_of("train", "synthetic") == 2
    assert "pip install '.[train]'" in capsys.readouterr().err


@pytest.mark.parametrize("library", ["matplotlib", "tensorboardX"])
def test_a_run_without_a_library_of_its_reports(library, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, library, None)
    with rejects(MissingExtraError, fix=library):
        train(load_config("synthetic"), tmp_path, mesh=mesh_of(1))
    assert not list(tmp_path.iterdir())


def test_an_export_without_flatbuffers_traces_nothing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with rejects(te.export.ExportError, fix="[serving]"):
        te.export.save(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), tmp_path / "served", [0])

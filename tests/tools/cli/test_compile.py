"""The files that the command `compile` writes."""

import json
import pathlib

import pytest

from tests.conftest import mesh_of
from tests.tools.compile_report.test_memory_plot import RUN
from tpu_embedding.tools import cli, compile_report


@pytest.fixture
def compile_command(monkeypatch):
    """The command, with a compiler that always gives the same report."""
    monkeypatch.setattr(compile_report, "topology_mesh", lambda *_, **__: mesh_of(1))
    monkeypatch.setattr("tpu_embedding.tools.cli.compile.compile_for", lambda *_: RUN)
    return ["compile", "synthetic", "--topology", "big:2x2", "--json"]


def test_a_file_of_reports_is_replaced_as_a_whole(
    tmp_path, compile_command, monkeypatch, capsys
):
    path = tmp_path / "report.json"
    path.write_text("earlier")

    def write_half(path, text, **options):
        with path.open("w", **options) as file:
            file.write(text[: len(text) // 2])
        raise OSError("the disk is full")

    with monkeypatch.context() as full_disk:
        full_disk.setattr(pathlib.Path, "write_text", write_half)
        assert cli.main([*compile_command, str(path)]) == 1
    assert "the disk is full" in capsys.readouterr().err
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]
    cli.main([*compile_command, str(path)])
    assert len(json.loads(path.read_text())["reports"]) == 1
    assert list(tmp_path.iterdir()) == [path]

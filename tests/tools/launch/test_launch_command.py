"""The command `tpu-embedding launch`: output, exit status, errors."""

import types

import pytest

from tests.tools.launch.launches import FIELDS, as_toml, make_launch
from tpu_embedding.tools import cli
from tpu_embedding.tools.cli import main
from tpu_embedding.tools.jobs.exit_status import FAILED, WRONG_USAGE
from tpu_embedding.tools.launch import make_script, what_deletes

FILE = FIELDS | dict(
    backend="gke", zone="us-east5-a", topology="v5p:2x4x4", settings=["batch_size=64"]
)
LAUNCH = make_launch(settings=("batch_size=64",))


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dlrm.toml").write_text(as_toml(FILE))
    return "dlrm.toml"


@pytest.fixture
def compiled(monkeypatch):
    """Configs that are compiled, with topology, devices and programs."""
    found = []

    def compile_for(*arguments):
        found.append(arguments)
        return types.SimpleNamespace(fits=arguments[0].batch_size < 4096)

    monkeypatch.setattr(cli.launch, "compile_for", compile_for)
    monkeypatch.setattr(cli.launch.compile_report, "format_report", lambda _: "REPORT")
    return found


@pytest.mark.tpu_compiler
def test_the_output_is_the_script(file, compiled, capsys):
    assert main(["launch", file]) == 0
    captured = capsys.readouterr()
    assert captured.out == make_script(LAUNCH) + "\n"
    assert what_deletes(LAUNCH) in captured.err
    ((config, topology, mesh, options, programs),) = compiled
    assert (config.name, config.batch_size) == ("dlrm", 64)
    assert (topology, mesh.size, options) == ("v5p:2x4x4", 32, {})
    assert "evaluation" in programs


def test_a_script_for_the_doctor(file, capsys):
    assert main(["launch", file, "--program", "doctor", "--skip-compile-check"]) == 0
    assert capsys.readouterr().out == make_script(LAUNCH, "doctor") + "\n"


@pytest.mark.tpu_compiler
def test_no_script_is_printed_for_a_config_that_does_not_fit(file, compiled, capsys):
    with open(file, "w") as stream:
        stream.write(as_toml(FILE | dict(settings=["batch_size=8192"], slices=2)))
    assert main(["launch", file]) == FAILED
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("REPORT\nerror: dlrm does not fit v5p:2x4x4, so no")
    assert compiled[0][2].shape == {"slice": 2, "shard": 32}


def test_the_compile_check_can_be_skipped(file, compiled):
    assert main(["launch", file, "--skip-compile-check"]) == 0
    assert compiled == []


def test_without_the_compiler_the_check_can_be_skipped(file, monkeypatch, capsys):
    def slices_mesh(*_):
        raise ImportError("It needs libtpu.")

    monkeypatch.setattr(cli.launch, "slices_mesh", slices_mesh)
    assert main(["launch", file]) == WRONG_USAGE
    error = "error: It needs libtpu. --skip-compile-check leaves this out.\n"
    assert capsys.readouterr() == ("", error)


WRONG = {
    "no file": (None, FAILED, "dlrm.toml"),
    "field": (FILE | {"zone": "x"}, WRONG_USAGE, "zone must be a zone, such as us-"),
    "type": (FILE | {"slices": "2"}, WRONG_USAGE, "slices must be an int, got '2'"),
    "config": (FILE | {"config": "dlmr"}, WRONG_USAGE, "dlmr"),
    "setting": (FILE | {"settings": ["batch=1"]}, WRONG_USAGE, "batch"),
}


@pytest.mark.parametrize(("document", "status", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_one_line(document, status, message, file, tmp_path, capsys):
    path = tmp_path / file
    path.unlink()
    if document is not None:
        path.write_text(as_toml(document))
    assert main(["launch", file]) == status
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""

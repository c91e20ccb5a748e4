"""The command `tpu-embedding launch`: output, exit status, errors."""

import types

import pytest

from tests.tools.launch.launches import FIELDS, as_toml, make_launch
from tpu_embedding.tools.cli import main
from tpu_embedding.tools.jobs.exit_status import FAILED, WRONG_USAGE
from tpu_embedding.tools.launch import PROGRAMS, make_script, what_deletes

FILE = FIELDS | dict(
    backend="gke",
    zone="us-east5-a",
    topology="v5p:2x4x4",
    settings=["batch_size=64"],
    package="a.whl",
)
LAUNCH = make_launch(settings=("batch_size=64",), package="a.whl")

CONFIG = """from tpu_embedding.tools.train import load_config
config = load_config("dlrm")
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.whl").touch()
    (tmp_path / "dlrm.toml").write_text(as_toml(FILE))
    return "dlrm.toml"


@pytest.fixture
def compiled(monkeypatch):
    """Configs that are compiled, with topology, devices and programs."""
    found = []

    def compile_for(*arguments):
        found.append(arguments)
        return types.SimpleNamespace(fits=arguments[0].batch_size < 4096)

    monkeypatch.setattr("tpu_embedding.tools.cli.launch.compile_for", compile_for)
    monkeypatch.setattr(
        "tpu_embedding.tools.cli.launch.compile_report.format_report",
        lambda _: "REPORT",
    )
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


@pytest.mark.parametrize("program", PROGRAMS)
def test_own_files_are_copied_from_any_folder(program, file, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(CONFIG)
    (tmp_path / file).write_text(as_toml(FILE | dict(config="mine.py")))
    words = ["launch", file, "--skip-compile-check", "--program", program]
    assert main(words) == 0
    script = capsys.readouterr().out
    for name in ("a.whl", "mine.py"):
        assert f"gcloud storage cp {tmp_path / name} " in script


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("field", ["package", "config"])
def test_a_missing_file_is_found_without_the_compile_check(
    field, program, file, tmp_path, capsys
):
    name = {"package": "b.whl", "config": "b.py"}[field]
    (tmp_path / file).write_text(as_toml(FILE | {field: name}))
    words = ["launch", file, "--skip-compile-check", "--program", program]
    assert main(words) == WRONG_USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"must name files that exist, got {name}; build" in captured.err
    assert str(tmp_path) in captured.err


def test_without_the_compiler_the_check_can_be_skipped(file, monkeypatch, capsys):
    def slices_mesh(*_):
        raise ImportError("It needs libtpu.")

    monkeypatch.setattr("tpu_embedding.tools.cli.launch.slices_mesh", slices_mesh)
    assert main(["launch", file]) == WRONG_USAGE
    error = "error: It needs libtpu. --skip-compile-check leaves this out.\n"
    assert capsys.readouterr() == ("", error)


WRONG = {
    "no file": (None, "got dlrm.toml: No such file or directory; give"),
    "field": (FILE | {"zone": "x"}, "zone must be a zone, such as us-"),
    "type": (FILE | {"slices": "2"}, "slices must be an int, got '2'"),
    "config": (FILE | {"config": "dlmr"}, "dlmr"),
    "setting": (FILE | {"settings": ["batch=1"]}, "batch"),
}


@pytest.mark.parametrize("options", [[], ["--skip-compile-check"]])
@pytest.mark.parametrize(("document", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_one_line(document, message, options, file, tmp_path, capsys):
    path = tmp_path / file
    path.unlink()
    if document is not None:
        path.write_text(as_toml(document))
    assert main(["launch", file, *options]) == WRONG_USAGE
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""

"""Tests `tpu-embedding export`: a run of a few steps, exported in each format."""

import json
import math
import shutil

import jax
import pytest
import safetensors.numpy

import tpu_embedding as te
from tests.tools.cli.test_command import train_arguments
from tpu_embedding.tools import cli
from tpu_embedding.tools.train.loop import export_run


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Trains a run; returns the arguments that say which."""
    assert len(jax.devices()) == 8
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    trained = train_arguments("synthetic", run_dir)
    assert cli.main(trained) == 0
    settings = [x for x in trained if "=" in x]
    return str(run_dir), *(part for x in settings for part in ("--set", x))


@pytest.mark.full
def test_export_and_check(arguments, tmp_path, capsys):
    config, *settings = arguments
    output = tmp_path / "served"
    status = cli.main(
        ["export", config, str(output), *settings, "--check", "2", "--devices", "3"]
    )
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert lines[0] == f"exported step 3 to {output}, stablehlo"
    assert any("  scores: largest difference" in line for line in lines)
    served = te.export.load(output)
    names = [each.name for each in served.signature.inputs]
    assert "features/user" in names
    assert set(served.signature.outputs) == {"scores", "predictions", "penalty"}


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_difference_is_a_failure(arguments, tmp_path, monkeypatch, capsys, dtype):
    def load_another(directory):
        served = te.export.load(directory)
        return lambda *call: {k: x + 2e-6 for k, x in served(*call).items()}

    monkeypatch.setattr(export_run, "load", load_another)
    config, *settings = arguments
    command = ["export", config, str(tmp_path / "a"), *settings, "--check", "1"]
    command += ["--dtype", dtype]
    # Narrow tables differ by their rounding, so no limit is set for them.
    assert cli.main(command) == (0 if dtype == "int8" else 1)
    command[2] = str(tmp_path / "b")
    assert cli.main([*command, "--tolerance", "1e-9"]) == 1
    assert "differ by more than 1e-09" in capsys.readouterr().out
    command[2] = str(tmp_path / "c")
    assert cli.main([*command, "--tolerance", "0.1"]) == 0


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_nan_in_the_first_batch_is_a_failure(arguments, tmp_path, monkeypatch, dtype):
    def load_another(directory):
        served, offsets = te.export.load(directory), iter([math.nan, 0.0])

        def call(*batch):
            offset = next(offsets)
            return {k: x + offset for k, x in served(*batch).items()}

        return call

    monkeypatch.setattr(export_run, "load", load_another)
    config, *settings = arguments
    command = ["export", config, str(tmp_path / "a"), *settings, "--check", "2"]
    assert cli.main([*command, "--dtype", dtype]) == 1


@pytest.mark.full
def test_tables_alone(arguments, tmp_path):
    config, *settings = arguments
    output = tmp_path / "tables"
    command = ["export", config, str(output), *settings, "--format", "safetensors"]
    assert cli.main([*command, "--dtype", "bfloat16"]) == 0
    document = json.loads((output / "export.json").read_text())
    for name, entry in document["tables"].items():
        with safetensors.safe_open(output / entry["file"], framework="numpy") as file:
            tensor = file.get_slice(name)
            assert tensor.get_shape() == entry["shape"]
            assert tensor.get_dtype() == "BF16"


@pytest.mark.full
def test_newest_checkpoint_of_a_named_run(arguments, tmp_path, capsys):
    config, *settings = arguments
    run_dir = tmp_path / "copy"
    shutil.copytree(config, run_dir)
    command = ["export", "synthetic", str(tmp_path / "a"), *settings]
    command += ["--run-dir", str(run_dir), "--batch-size", "50"]
    assert cli.main(command) == 0
    served = te.export.load(tmp_path / "a")
    assert served.signature.batch_size == 50
    (run_dir / "checkpoints" / "3").rename(run_dir / "checkpoints" / "gone")
    command[2] = str(tmp_path / "b")
    assert cli.main(command) == 2
    assert "no complete checkpoint" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "model.hidden_sizes=16"], "model.hidden_sizes"),
        (["--run-dir", "other"], "--run-dir must be left out"),
        (["--format", "safetensors", "--check", "1"], "no outputs to check"),
    ],
)
def test_refusals(arguments, tmp_path, capsys, more, message):
    config, *settings = arguments
    if "--set" in more:
        kept = [x for x in settings if "=" in x and "hidden_sizes" not in x]
        settings = [part for x in kept for part in ("--set", x)]
    command = ["export", config, str(tmp_path / "served"), *settings, *more]
    assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) <= 4
    assert not list(tmp_path.iterdir())


def test_outputs_and_directories_are_checked_first(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert cli.main(["export", "synthetic", str(tmp_path / "full")]) == 2
    assert "must be a new directory" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path), str(tmp_path / "new")]) == 2
    assert "names no config" in capsys.readouterr().err
    assert cli.main(["export", "nothing", str(tmp_path / "new")]) == 2
    assert "There is no config 'nothing'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


RECORDS = {
    "a file": '{"run": {"name": "RUN/evil.py"}}',
    "a file of the run": '{"run": {"name": "evil.py"}}',
    "a module": '{"run": {"name": "evil"}}',
    "a path to a config": '{"run": {"name": "../configs/synthetic"}}',
    "no text": '{"run": {"name": ["synthetic"]}}',
    "no name": '{"run": {}}',
    "no dict": "[1]",
    "a deep nest": "[" * 100_000,
    "no JSON": "evil.py",
    "bytes": "\udcff",
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_nothing_that_a_run_names_is_executed(tmp_path, monkeypatch, capsys, record):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    record = record.replace("RUN", str(run_dir))
    (run_dir / "metrics.jsonl").write_text(record, errors="surrogateescape")
    monkeypatch.chdir(run_dir)
    assert cli.main(["export", str(run_dir), str(tmp_path / "served")]) == 2
    error = capsys.readouterr().err
    assert f"give the config, and --run-dir {run_dir}" in error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

"""Tests `tpu-embedding export`: a run of a few steps, exported in two formats."""

import jax
import pytest
import safetensors.numpy
import tyro

import tpu_embedding as te
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.tools.cli.arguments import emulated_mesh
from tpu_embedding.tools.cli.export import Export
from tpu_embedding.tools.train import apply_overrides, load_config, train

SETTINGS = (
    *("batch_size=50", "model.dim=4", "model.hidden_sizes=8", "num_steps=2"),
    "data.num_evaluation_samples=50",
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    assert len(jax.devices()) == 8
    path = tmp_path_factory.mktemp("runs") / "run"
    train(
        apply_overrides(load_config("synthetic"), SETTINGS), path, mesh=emulated_mesh(1)
    )
    return path


def export(*arguments):
    return tyro.cli(Export, args=[str(x) for x in arguments]).run()


@pytest.mark.full
def test_formats(run_dir, tmp_path, capsys):
    options = ["--run-dir", run_dir, "--devices", 2]
    options += [word for setting in SETTINGS for word in ("--set", setting)]
    assert export("synthetic", tmp_path / "served", *options) == 0
    assert f"exported step 2 to {tmp_path / 'served'}" in capsys.readouterr().out
    served = te.export.load(tmp_path / "served")
    options += ["--format", "safetensors", "--dtype", "bfloat16"]
    assert export("synthetic", tmp_path / "tables", *options) == 0
    for name, rows in served.tables.items():
        file = tmp_path / "tables" / "tables" / f"{name}.safetensors"
        with safetensors.safe_open(file, framework="numpy") as tensors:
            assert tensors.get_slice(name).get_shape() == list(rows.shape)
            assert tensors.get_slice(name).get_dtype() == "BF16"


def test_outputs_and_directories_are_checked_first(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(te.export.ExportError, match="must be a new directory"):
        export("synthetic", tmp_path / "full")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        export("synthetic", tmp_path / "new", "--run-dir", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]

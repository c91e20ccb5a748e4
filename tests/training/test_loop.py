"""Tests whole runs: their files, and the equality of an interrupted, resumed run."""

import dataclasses

import pytest

from tests.conftest import mesh_of
from tpu_embedding.checkpoint import CheckpointError
from tpu_embedding.training import (
    ConfigError,
    Target,
    apply_overrides,
    load_config,
    train,
)
from tpu_embedding.training.reporting import PLOT_FILE, RECORDS_FILE, read_records


def tiny_config(*overrides):
    return apply_overrides(
        load_config("synthetic"),
        [
            "batch_size=50",
            "model.dim=4",
            "model.hidden_sizes=8",
            "data.num_evaluation_samples=120",
            "num_steps=8",
            "log_every=1",
            "evaluate_every=6",
            "checkpoint_every=2",
            *overrides,
        ],
    )


def losses(directory):
    return {
        record["step"]: record["loss"]
        for record in read_records(directory / RECORDS_FILE)
        if "loss" in record
    }


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return train(tiny_config(), directory, mesh=mesh_of(3)), directory


def test_records_of_a_run(whole_run):
    result, directory = whole_run
    records = list(read_records(directory / RECORDS_FILE))
    assert records[0]["run"]["batch_size"] == 50
    assert records[0]["devices"]["count"] == 3
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 9))
    evaluations = {r["step"]: r["evaluation"] for r in records if "evaluation" in r}
    assert list(evaluations) == [6, 8]
    assert records[-1] == {"result": dataclasses.asdict(result)}
    assert result.metrics == evaluations[8]
    assert result.step == 8
    assert result.teacher < result.metrics["log_loss"]
    assert result.target_met is False
    assert (directory / PLOT_FILE).exists()


def test_interrupted_run_goes_on_with_the_same_numbers(whole_run, tmp_path, capsys):
    result, directory = whole_run
    config = tiny_config()
    assert train(config, tmp_path, mesh=mesh_of(3), stop_at=4) is None
    assert "stopped after step 4" in capsys.readouterr().out
    resumed = train(config, tmp_path, mesh=mesh_of(3), resume=True)
    assert "resumed after step 4" in capsys.readouterr().out
    assert losses(tmp_path) == losses(directory)
    assert resumed.metrics == result.metrics
    # No step is left: resuming a completed run only evaluates it again.
    again = train(config, tmp_path, mesh=mesh_of(3), resume=True)
    assert again.metrics == result.metrics
    assert capsys.readouterr().out.splitlines()[-1].count(", 0 steps in ") == 1


@pytest.mark.parametrize(
    ("overrides", "num_devices", "message"),
    [
        (["seed=1"], 3, "run.seed: 0 in the checkpoint, 1 now"),
        (["batch_size=51"], 3, "run.batch_size"),
        (["model.dim=5"], 3, "(?s)plan.stacks.stack_0.dim.*run.model.dim"),
        (["table_learning_rate=1"], 3, "run.table_learning_rate"),
        ([], 2, "plan.num_shards: 3 in the checkpoint, 2 now"),
    ],
)
def test_another_run_is_not_resumed(whole_run, overrides, num_devices, message):
    _, directory = whole_run
    before = (directory / RECORDS_FILE).read_bytes()
    with pytest.raises(CheckpointError, match=message):
        train(
            tiny_config(*overrides), directory, mesh=mesh_of(num_devices), resume=True
        )
    assert (directory / RECORDS_FILE).read_bytes() == before


def test_resume_of_nothing_leaves_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        train(tiny_config(), tmp_path / "run", mesh=mesh_of(1), resume=True)
    assert not (tmp_path / "run").exists()


def test_settings_that_a_layer_refuses(tmp_path):
    with pytest.raises(ConfigError, match="valence"):
        train(tiny_config("data.valence=0"), tmp_path, mesh=mesh_of(1))


def test_absolute_target(tmp_path, capsys):
    config = dataclasses.replace(
        tiny_config("num_steps=1"), target=Target(metric="log_loss", at_most=10.0)
    )
    result = train(config, tmp_path, mesh=mesh_of(1))
    assert result.target_met is True
    assert "target: log_loss at most 10: met\n" in capsys.readouterr().out

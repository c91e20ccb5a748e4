"""Tests whole runs: their files, and the equality of an interrupted, resumed run."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.conftest import mesh_of
from tests.tools.train.run_files import read_curves, recorded_steps
from tpu_embedding import optimizers
from tpu_embedding.checkpoint import CheckpointError
from tpu_embedding.checkpoint.run_checkpoints import saved_steps
from tpu_embedding.tools.train import (
    ConfigError,
    ProfileWindow,
    RunDirectoryError,
    Target,
    TrainingDivergedError,
    apply_overrides,
    load_config,
    metrics,
    train,
)
from tpu_embedding.tools.train.loop.profiling import PROFILE_DIR
from tpu_embedding.tools.train.loop.reporting import (
    PLOT_FILE,
    RECORDS_FILE,
    read_records,
)
from tpu_embedding.tools.train.loop.tensorboard import TENSORBOARD_DIR
from tpu_embedding.types import PADDING_ROW_ID

# Stages of a lookup and an update, as they are named in profiles.
STAGES = (
    "flatten",
    "dedup",
    "route",
    "exchange",
    "gather",
    "combine",
    "spread",
    "merge",
    "update",
)


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
    result = train(
        tiny_config(),
        directory,
        mesh=mesh_of(3),
        tensorboard=True,
        profile=ProfileWindow(2, 4),
    )
    return result, directory


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
    assert list(result.metrics)[0] == "log_loss"
    assert {"auc", "normalized_entropy", "calibration"} < set(result.metrics)
    assert result.step == 8
    assert result.teacher < result.metrics["log_loss"]
    assert result.target_met is False
    assert (directory / PLOT_FILE).exists()


def test_tensorboard_has_the_records(whole_run):
    result, directory = whole_run
    curves = read_curves(directory / TENSORBOARD_DIR)
    assert curves["train/loss"] == pytest.approx(losses(directory), rel=1e-6)
    # The first step after the start and after each checkpoint is not timed.
    assert list(curves["train/samples_per_second"]) == [2, 4, 6, 8]
    for name, value in result.metrics.items():
        # The error of AUC is recorded where it is large.
        steps = [8] if name == "auc_max_error" else [6, 8]
        assert list(curves[f"evaluation/{name}"]) == steps
        # Events hold float32.
        assert curves[f"evaluation/{name}"][8] == pytest.approx(value, rel=1e-6)


def test_profile_has_the_steps_and_the_stages(whole_run):
    folder = whole_run[1] / PROFILE_DIR
    assert recorded_steps(folder) == [2, 3]
    (path,) = folder.rglob("*.xplane.pb")
    text = path.read_bytes()
    for stage in STAGES:
        assert f"embedding_layer/{stage}/".encode() in text, stage


def test_a_profile_beyond_the_run_leaves_nothing(tmp_path):
    for options in (dict(profile=ProfileWindow(3, 9)), dict(stop_at=4)):
        with pytest.raises(ConfigError, match="must end with the run"):
            options = dict(profile=ProfileWindow(3, 5)) | options
            train(tiny_config(), tmp_path / "run", mesh=mesh_of(1), **options)
    assert not (tmp_path / "run").exists()


def test_records_have_the_counts_of_their_lookups(whole_run):
    """Of the first step, whose batch is dealt to three devices."""
    config = tiny_config()
    data = config.data.open(None, batch_size=config.batch_size, seed=config.seed)
    parts = [slice(0, 17), slice(17, 34), slice(34, 50)]
    columns = [np.asarray(ids) for ids in data.train_batch(0).features.values()]
    num_ids, num_rows = 0, 0
    for part in parts:
        for column in columns:
            ids = column[part][column[part] != PADDING_ROW_ID]
            num_ids += len(ids)
            num_rows += len(np.unique(ids))
    records = read_records(whole_run[1] / RECORDS_FILE)
    first = next(record for record in records if "loss" in record)
    assert first["unique_ratio"] == pytest.approx(num_rows / num_ids, rel=1e-6)
    assert 1 <= first["hottest_shard_over_mean"] < 3


def test_interrupted_run_goes_on_with_the_same_numbers(whole_run, tmp_path, capsys):
    result, directory = whole_run
    config = tiny_config()
    assert train(config, tmp_path, mesh=mesh_of(3), stop_at=4) is None
    assert "stopped after step 4" in capsys.readouterr().out
    resumed = train(config, tmp_path, mesh=mesh_of(3), existing_run="resume")
    assert "resumed after step 4" in capsys.readouterr().out
    assert losses(tmp_path) == losses(directory)
    assert resumed.metrics == result.metrics
    # No step is left: resuming a completed run only evaluates it again.
    again = train(config, tmp_path, mesh=mesh_of(3), existing_run="resume")
    assert again.metrics == result.metrics
    assert capsys.readouterr().out.splitlines()[-1].count(", 0 steps in ") == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=1", "run.seed: 0 in the checkpoint, 1 now"),
        ("batch_size=51", "run.batch_size"),
        ("model.dim=5", "run.model.dim: 4 in the checkpoint, 5 now"),
        ("table_learning_rate=1", "run.table_learning_rate"),
    ],
)
def test_another_run_is_not_resumed(whole_run, override, message):
    _, directory = whole_run
    before = (directory / RECORDS_FILE).read_bytes()
    with pytest.raises(CheckpointError, match=message):
        train(
            tiny_config(override),
            directory,
            mesh=mesh_of(3),
            existing_run="resume",
        )
    assert (directory / RECORDS_FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("field", "optimizer", "differences"),
    [
        (
            "make_dense_optimizer",
            optax.sgd(0.1, momentum=0.9),
            [
                "dense_optimizer.scale_by_adam: only in the checkpoint",
                "dense_optimizer.trace: not in the checkpoint",
            ],
        ),
        (
            # It has slot variables of the same number, shape and dtype.
            "make_table_optimizer",
            optimizers.momentum(0.1, 0.9),
            ["slot 'accumulators' only in", "slot 'trace' not in"],
        ),
    ],
)
def test_a_run_is_not_resumed_by_other_optimizers(
    whole_run, field, optimizer, differences
):
    _, directory = whole_run
    config = dataclasses.replace(tiny_config(), **{field: lambda run: optimizer})
    with pytest.raises(CheckpointError, match="(Resume|Restore) with the") as error:
        train(config, directory, mesh=mesh_of(3), existing_run="resume")
    for difference in differences:
        assert difference in str(error.value)


@pytest.mark.full
def test_resume_on_other_devices(whole_run, tmp_path):
    result, directory = whole_run
    config = tiny_config()
    train(config, tmp_path, mesh=mesh_of(8), stop_at=4)
    resumed = train(config, tmp_path, mesh=mesh_of(2), existing_run="resume")
    # Devices add samples in another order.
    assert losses(tmp_path) == pytest.approx(losses(directory), abs=1e-6)
    assert resumed.metrics == pytest.approx(result.metrics, abs=1e-6)


def test_resume_of_nothing_leaves_nothing(tmp_path):
    with pytest.raises(RunDirectoryError, match="no run in .* to resume"):
        train(tiny_config(), tmp_path / "run", mesh=mesh_of(1), existing_run="resume")
    assert not (tmp_path / "run").exists()


def test_resume_before_the_first_checkpoint_starts_again(whole_run, tmp_path, capsys):
    result, directory = whole_run
    # A killed run has written its start and some steps, the last one half.
    (tmp_path / RECORDS_FILE).write_text('{"run": {}}\n{"step": 1, "loss": 0.7')
    with pytest.raises(RunDirectoryError, match="saved no checkpoint; start it again"):
        train(tiny_config(), tmp_path, mesh=mesh_of(3))
    again = train(tiny_config(), tmp_path, mesh=mesh_of(3), existing_run="resume")
    assert "from the beginning" in capsys.readouterr().out
    assert again.metrics == result.metrics
    assert losses(tmp_path) == losses(directory)


def contents(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.full
def test_an_earlier_run_is_moved_aside_whole(tmp_path, capsys):
    directory = tmp_path / "run"
    config = tiny_config("num_steps=1", "evaluate_every=0")
    first = train(config, directory, mesh=mesh_of(1))
    before = contents(directory)
    train(config, directory, mesh=mesh_of(1), existing_run="move_aside")
    moved = tmp_path / "run.old-1"
    assert f"moved the earlier run to {moved}\n" in capsys.readouterr().out
    assert contents(moved) == before
    # The moved run is whole: it can be continued.
    again = train(config, moved, mesh=mesh_of(1), existing_run="resume")
    assert again.metrics == first.metrics


BAD_CHANGES = {
    "table optimizer": {"make_table_optimizer": lambda run: None},
    "dense optimizer": {"make_dense_optimizer": lambda run: {}["rate"]},
    "plan": {"kernels": "sparse_core"},
}


@pytest.mark.parametrize("changes", BAD_CHANGES.values(), ids=BAD_CHANGES)
def test_a_wrong_setting_leaves_the_earlier_run(whole_run, changes):
    _, directory = whole_run
    before = contents(directory)
    config = dataclasses.replace(tiny_config(), **changes)
    with pytest.raises(ConfigError):
        train(config, directory, mesh=mesh_of(1), existing_run="move_aside")
    assert contents(directory) == before
    assert not directory.with_name(f"{directory.name}.old-1").exists()


def test_metrics_that_are_not_finite(tmp_path, monkeypatch):
    usual = metrics.LOSSES["log_loss"]
    bad = dataclasses.replace(
        usual,
        evaluate=lambda outputs, labels, weights: usual.evaluate(
            dataclasses.replace(outputs, scores=jnp.nan * outputs.scores),
            labels,
            weights,
        ),
    )
    monkeypatch.setitem(metrics.LOSSES, "log_loss", bad)
    with pytest.raises(
        TrainingDivergedError, match="after step 1 has the log_loss nan"
    ):
        train(tiny_config("num_steps=1"), tmp_path, mesh=mesh_of(1))


@pytest.mark.parametrize(
    ("field", "make", "message"),
    [
        pytest.param(
            *(
                "make_dense_optimizer",
                optax.sgd,
                "step 2 left.*mlp.layers.layers.0.bias",
            ),
            marks=pytest.mark.full,
        ),
        (
            "make_table_optimizer",
            optimizers.sgd,
            "step 2, or a learning rate of a table",
        ),
    ],
)
def test_a_model_that_is_not_finite_is_not_saved(tmp_path, field, make, message):
    """The last update diverges, so no loss shows it."""
    optimizer = make(lambda step: jnp.where(step == 1, jnp.nan, 0.1))
    config = dataclasses.replace(
        tiny_config("num_steps=2", "checkpoint_every=1"),
        **{field: lambda run: optimizer},
    )
    with pytest.raises(TrainingDivergedError, match=f"(?s){message}"):
        train(config, tmp_path, mesh=mesh_of(2))
    assert saved_steps(tmp_path / "checkpoints") == [1]


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


def test_target_of_a_metric_that_rises(tmp_path, capsys):
    for limit, words in ((0.0, "met"), (1.0, "not met")):
        config = dataclasses.replace(
            tiny_config("num_steps=1"), target=Target(metric="auc", at_least=limit)
        )
        result = train(config, tmp_path / words, mesh=mesh_of(1))
        assert (result.metric, result.teacher) == ("auc", None)
        assert result.target_met == (words == "met")
        output = capsys.readouterr().out
        assert f"target: auc at least {limit:g}: {words}\n" in output
        assert f"result: auc {result.metrics['auc']:.4f}, 1 steps" in output


def test_target_relative_to_an_unknown_teacher_is_refused_at_the_start(tmp_path):
    target = Target(metric="auc", at_least=0.5, relative_to="teacher")
    config = dataclasses.replace(tiny_config(), target=target)
    with pytest.raises(ConfigError, match="has no method teacher_auc, got 'teacher'"):
        train(config, tmp_path, mesh=mesh_of(1))
    assert not list(tmp_path.iterdir())


def test_an_exact_auc_counts_pairs_of_samples(tmp_path):
    config = tiny_config("num_steps=1", "exact_auc=true")
    result = train(config, tmp_path, mesh=mesh_of(3))
    assert "auc_max_error" not in result.metrics
    data = config.data.open(None, batch_size=config.batch_size, seed=config.seed)
    labels = np.concatenate(
        [batch.labels[batch.weights > 0] for batch in data.evaluation_batches()]
    )
    num_halves = 2 * result.metrics["auc"] * labels.sum() * (1 - labels).sum()
    assert len(labels) == 120
    assert abs(num_halves - round(num_halves)) < 1e-6


@pytest.mark.parametrize("value", ["overwrite", True, None])
def test_unknown_treatment_of_an_earlier_run_touches_nothing(value, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=f"existing_run must be one of .* {value!r}"):
        train(object(), tmp_path, existing_run=value)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    with pytest.raises(ConfigError, match="stop_at must be at least 1, .* got 0"):
        train(object(), tmp_path, stop_at=0)

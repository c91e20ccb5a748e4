"""Runs: results on any devices, stops and resumes, and what ends them with an error."""

import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import threading
from unittest import mock

import jax
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tools.train.runs import (
    SMALL,
    losses_of,
    run,
    set_options,
    small_config,
    start_command,
    wait_for_line,
)
from tpu_embedding.checkpoint.records import CheckpointError
from tpu_embedding.tools import cli
from tpu_embedding.tools.data.synthetic_clicks import SyntheticClicks
from tpu_embedding.tools.train import (
    RunDirectoryError,
    Target,
    TrainingDivergedError,
    evaluate,
    train,
)
from tpu_embedding.tools.train.run import RunResult, _Run
from tpu_embedding.tools.train.run_directory import (
    PLOT_FILE,
    RECORDS_FILE,
    read_records,
    result_checkpoint,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of the command that nothing stopped."""
    directory = tmp_path_factory.mktemp("whole")
    options = ["--devices", "2", "--output-dir", str(directory), *set_options(SMALL)]
    assert cli.main(["train", "synthetic", *options]) == 0
    *_, last = read_records(directory / RECORDS_FILE)
    return directory, RunResult(**last["result"])


def test_a_metric_that_the_held_out_samples_do_not_determine():
    target = Target(metric="auc", at_least=0.5)
    config = dataclasses.replace(small_config(), target=target)
    run = mock.Mock(config=config, step=6, data=object(), best_step=6)
    run.evaluations = {6: {"log_loss": 0.5}}
    assert _Run.finish(run).target_met is None


@pytest.mark.full
def test_a_run_tells_its_events(tmp_path):
    settings = ["evaluate_every=4", "log_every=4", "checkpoint_every=4"]
    events = []

    def listen(_, event):
        assert event.directory == tmp_path and event.data.batch_size == 48
        events.append(event)

    # A lock cannot be copied.
    config = dataclasses.replace(
        small_config(*settings), on_event=functools.partial(listen, threading.Lock())
    )
    train(config, tmp_path, mesh=mesh_of(1), stop_at=4)
    result = train(config, tmp_path, mesh=mesh_of(1), existing_run="resume")
    evaluate(config, tmp_path, mesh=mesh_of(1))
    assert [(x.kind, x.step) for x in events] == [
        *(("init", 0), ("start", 0), ("train", 4), ("init", 4), ("start", 4)),
        *(("evaluation_start", 4), ("evaluation", 4), ("train", 6)),
        *(("evaluation_start", 6), ("evaluation", 6), ("result", 6)),
    ]
    assert events[2].values["loss"] == losses_of(tmp_path)[4]
    assert events[-2].values == result.metrics
    assert events[-1].values == dataclasses.asdict(result)


@pytest.fixture
def copied(whole, tmp_path):
    """The directory of a finished run, to change it."""
    return shutil.copytree(whole[0], tmp_path / "copied")


def test_a_run_writes_its_files(whole):
    directory, result = whole
    assert (result.step, result.target_met) == (6, False)
    names = {"log_loss", "auc", "normalized_entropy", "calibration"}
    assert set(result.metrics) == names
    files = {path.name for path in directory.iterdir()}
    assert files == {RECORDS_FILE, PLOT_FILE, "tensorboard", "checkpoints"}
    steps = {path.name for path in (directory / "checkpoints").iterdir()}
    assert steps == {"2", "4", "6"}
    first, *_ = read_records(directory / RECORDS_FILE)
    assert first["run"]["model"]["dim"] == 4
    losses = losses_of(directory)
    assert list(losses) == [2, 4, 6] and losses[6] < losses[2]
    assert any((directory / "tensorboard").iterdir())


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize("devices", [1, 3, 8])
def test_devices_do_not_change_the_results(whole, tmp_path, devices):
    other = run(tmp_path, devices=devices)
    assert other.metrics == pytest.approx(whole[1].metrics, abs=1e-5)
    assert losses_of(tmp_path) == pytest.approx(losses_of(whole[0]), abs=1e-6)


@pytest.mark.full
def test_a_stopped_run_resumes_to_the_same_numbers(whole, tmp_path, monkeypatch):
    read = SyntheticClicks.train_batch

    def read_and_signal(self, step):
        if step == 3:  # It is read ahead, so an earlier step is in progress.
            os.kill(os.getpid(), signal.SIGTERM)
        return read(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(SyntheticClicks, "train_batch", read_and_signal)
        stopped = run(tmp_path)
    assert stopped.metrics is None and 1 <= stopped.step < 4
    with rejects(RunDirectoryError, fix="--resume"):
        run(tmp_path)
    resumed = run(tmp_path, devices=8, existing_run="resume", stop_at=5)
    assert (resumed.step, resumed.metrics) == (5, None)
    result = run(tmp_path, existing_run="resume")
    assert result.metrics == pytest.approx(whole[1].metrics, abs=1e-5)


@pytest.mark.full
def test_a_finished_run_is_evaluated_again(whole, copied, capsys):
    assert evaluate(small_config(), copied, mesh=mesh_of(2)) == whole[1]
    again = run(copied, "dense_learning_rate=0.5", existing_run="resume")
    assert again == whole[1]
    assert "dense_learning_rate 0.01 -> 0.5" in capsys.readouterr().out


LOSSES_OF_STEPS = (0.5, 0.3, 0.4, 0.45, 0.2, 0.1)
BEST = ("evaluate_every=1", "keep_best=True", "checkpoints_kept=1", "patience=2")


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize("stop_at", [None, 2])
def test_the_best_checkpoint_is_kept_and_the_run_ends_early(
    tmp_path, monkeypatch, stop_at
):
    losses = list(LOSSES_OF_STEPS)
    scripted = "tpu_embedding.tools.train.run.values_of"
    monkeypatch.setattr(scripted, lambda _: {"log_loss": losses.pop(0)})
    if stop_at is not None:
        assert run(tmp_path, *BEST, stop_at=stop_at).metrics is None
    result = run(tmp_path, *BEST, existing_run="resume")
    assert (result.step, result.best_step) == (4, 2)
    assert result.metrics == {"log_loss": 0.3}
    saved = {int(path.name) for path in (tmp_path / "checkpoints").iterdir()}
    assert saved == {2, 4}
    assert result_checkpoint(tmp_path).name == "2"
    losses.insert(0, 0.45)  # A run that has ended evaluates its last step again.
    assert run(tmp_path, *BEST, existing_run="resume") == result
    losses.insert(0, 0.3)
    assert evaluate(small_config(*BEST), tmp_path, mesh=mesh_of(2)).best_step == 2


@pytest.mark.parametrize("line", [b"\xff", b"123", b"[" * 10**5, b'{"run": 1}'])
def test_damaged_records_are_named_and_nothing_is_left(copied, line):
    with (copied / RECORDS_FILE).open("ab") as file:
        file.write(line + b"\n")
    before = (copied / RECORDS_FILE).read_bytes()
    with rejects(RunDirectoryError, fix="metrics.jsonl, line "):
        run(copied, existing_run="resume")
    assert (copied / RECORDS_FILE).read_bytes() == before
    assert not {"run.lock", "metrics.jsonl.partial"} & {
        x.name for x in copied.iterdir()
    }


def test_a_run_that_cannot_start_leaves_no_directory(tmp_path):
    with rejects(field="capacity", value=-1):
        run(tmp_path / "run", "capacity=-1")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "run.lock"])
def test_links_out_of_a_run_are_not_followed(copied, name, tmp_path):
    (copied / name).exists() and (copied / name).rename(tmp_path / "moved")
    target = tmp_path / "target"
    shutil.copytree(copied, target)
    (copied / name).symlink_to(target)
    with rejects(RunDirectoryError, fix=name):
        run(copied, existing_run="resume")
    with rejects(RunDirectoryError, fix=name):
        evaluate(small_config(), copied, mesh=mesh_of(2))


@pytest.mark.full
def test_the_second_step_compiles_nothing(tmp_path, caplog):
    with jax.log_compiles():
        run(tmp_path, "log_every=1", "num_steps=4", "checkpoint_every=0")
    compiled = [r.getMessage() for r in caplog.records if "train_step" in r.message]
    assert len([text for text in compiled if text.startswith("Compiling")]) == 1


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize("place", ["loss", "rate"])
def test_a_run_that_diverges_saves_nothing_more(tmp_path, place):
    settings = ["dense_learning_rate=1e38"] if place == "loss" else []
    settings += ["table_learning_rate=inf"] if place == "rate" else []
    with rejects(TrainingDivergedError):
        run(tmp_path, *settings, devices=1)
    steps = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert "6" not in steps
    if place == "rate":
        assert not steps


@pytest.mark.full
def test_a_run_without_the_exchange_stops_beyond_the_limit(tmp_path):
    backend = te.SparseCore(max_ids=8, exchange=False)
    config = dataclasses.replace(small_config("batch_size=480"), backend=backend)
    with rejects(TrainingDivergedError, fix="backend='sparse_core'"):
        train(config, tmp_path, mesh=mesh_of(1))


def test_a_damaged_checkpoint_is_rejected_by_name(copied):
    files = (copied / "checkpoints" / "6").rglob("*tags*/**/*")
    chunk = next(x for x in files if x.is_file() and x.stat().st_size > 1000)
    chunk.write_bytes(chunk.read_bytes()[:-100])
    with rejects(CheckpointError, fix="tags"):
        run(copied, existing_run="resume")


@pytest.mark.exhaustive
def test_dynamic_tables(tmp_path):
    settings = ["data.num_users=100", "data.num_items=50", "num_steps=4"]
    settings += ["data.evaluation_step=4"]
    config = small_config(*settings, name="synthetic_stream")
    result = train(config, tmp_path / "stream", mesh=mesh_of(2))
    assert 0 < result.metrics["hits/user"] <= 1
    records = read_records(tmp_path / "stream" / RECORDS_FILE)
    counts = [r["train"] for r in records if "train" in r]
    assert counts[0]["user/inserts"] > counts[-1]["user/inserts"]
    stopped = train(config, tmp_path / "stopped", mesh=mesh_of(2), stop_at=2)
    assert stopped.metrics is None
    resumed = train(
        config, tmp_path / "stopped", mesh=mesh_of(3), existing_run="resume"
    )
    assert resumed.metrics == pytest.approx(result.metrics, abs=1e-5)


@pytest.mark.full
def test_a_second_run_in_the_directory_is_rejected(tmp_path):
    first = start_command(tmp_path, "--devices", 1, settings=["num_steps=100000"])
    wait_for_line(first, "train")
    with rejects(RunDirectoryError, fix="--output-dir"):
        run(tmp_path, existing_run="resume")
    first.terminate()
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 75, errors


@pytest.mark.full
def test_a_full_disk_ends_a_run_with_one_line(tmp_path):
    # The limit of a file stands for a disk without more space.
    limited = ["bash", "-c", 'ulimit -f 10; exec "$@"', "bash"]
    limited += ["env", "-u", "JAX_COMPILATION_CACHE_DIR"]
    process = start_command(tmp_path, "--devices", 1, within=limited)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors.count("\n") == 1
    assert errors.startswith("error: ")


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize("end", ["killed", "crashed"])
def test_a_killed_run_resumes_and_reports_each_step_once(
    whole, tmp_path, monkeypatch, end
):
    # Reports of single steps are the same wherever the kill falls.
    settings = ["log_every=1", "checkpoint_every=1", "evaluate_every=2"]
    if end == "killed":
        options = {"settings": [*SMALL, *settings]}
        process = start_command(tmp_path, "--devices", 2, **options)
        wait_for_line(process, "train 2/6")
        process.kill()
        process.communicate()
    else:
        crash = mock.Mock(side_effect=KeyboardInterrupt)
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(_Run, "evaluate", crash)
            run(tmp_path, *settings)
    result = run(tmp_path, *settings, existing_run="resume")
    assert result.metrics == pytest.approx(whole[1].metrics, abs=1e-5)
    records = [r for r in read_records(tmp_path / RECORDS_FILE) if "step" in r]
    reported = sorted((*({"train", "evaluation"} & set(r)), r["step"]) for r in records)
    evaluations = [("evaluation", step) for step in (2, 4, 6)]
    assert reported == [*evaluations, *(("train", step) for step in range(1, 7))]
    losses = losses_of(tmp_path)
    means = {step: np.mean([losses[step - 1], losses[step]]) for step in (2, 4, 6)}
    assert means == pytest.approx(losses_of(whole[0]), abs=1e-6)
    assert not (tmp_path / "run.lock").exists()


@pytest.mark.exhaustive
def test_a_profile_is_recorded(copied):
    run(copied, "num_steps=8", existing_run="resume", profile=(6, 7))
    assert list((copied / "profile").rglob("*.xplane.pb"))

"""Runs that a signal stops save their state, and continue with the same numbers."""

import signal
import threading

import pytest

from tests.conftest import mesh_of
from tests.tiers import quick_cases
from tests.tools.train.loop.test_training_loop import losses, tiny_config
from tpu_embedding.checkpoint.run_checkpoints import RunCheckpoints, saved_steps
from tpu_embedding.tools.data.synthetic_clicks import SyntheticClicks
from tpu_embedding.tools.jobs.stop_signals import RunStopped
from tpu_embedding.tools.train import SyntheticClicksSource, train
from tpu_embedding.tools.train.loop import training_loop
from tpu_embedding.tools.train.loop.reporting import (
    RECORDS_FILE,
    RunReport,
    read_records,
)

NUM_STEPS = 8


def run(directory, **arguments):
    config = tiny_config(f"num_steps={NUM_STEPS}", "checkpoint_every=5")
    return train(config, directory, mesh=mesh_of(1), **arguments)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    return run(directory), directory


def signal_in_a_step(monkeypatch, number):
    """Raises a signal while step 4 is in progress, when the loss of step 2 is read."""
    progress = RunReport.progress

    def and_raise(self, record, num_steps):
        progress(self, record, num_steps)
        if record["step"] == 2:
            signal.raise_signal(number)

    monkeypatch.setattr(RunReport, "progress", and_raise)


def signal_in_the_preparation(monkeypatch, number):
    """Raises a signal in the preparation of the batch of step 7, which then waits."""
    train_batch = SyntheticClicks.train_batch
    saved, is_saved = RunReport.saved, threading.Event()

    def raise_and_wait(self, step):
        if step == 6:
            signal.raise_signal(number)
            assert is_saved.wait(timeout=60)
        return train_batch(self, step)

    def and_set(self, step):
        saved(self, step)
        if step != 5:  # not a checkpoint that was due anyway
            is_saved.set()

    monkeypatch.setattr(SyntheticClicks, "train_batch", raise_and_wait)
    monkeypatch.setattr(RunReport, "saved", and_set)


def signal_in_an_evaluation(monkeypatch, number, call=2):
    """Raises a signal in the evaluation after step 6, or in that at the end."""
    evaluation_batches = SyntheticClicks.evaluation_batches
    calls = []

    def and_raise(self):
        calls.append(self)
        for batch in evaluation_batches(self):
            if len(calls) == call:
                signal.raise_signal(number)
            yield batch

    monkeypatch.setattr(SyntheticClicks, "evaluation_batches", and_raise)


def signal_in_the_last_evaluation(monkeypatch, number):
    signal_in_an_evaluation(monkeypatch, number, call=3)


@pytest.mark.parametrize(
    ("signal_at", "number", "saved"),
    quick_cases(
        [
            pytest.param(*case, id=f"{name}-{case[1].name}")
            for name, *case in [
                ("in_a_step", signal_in_a_step, signal.SIGTERM, 4),
                ("in_a_step", signal_in_a_step, signal.SIGINT, 4),
                ("unready", signal_in_the_preparation, signal.SIGHUP, 6),
                ("evaluation", signal_in_an_evaluation, signal.SIGINT, 6),
                ("at_the_end", signal_in_the_last_evaluation, signal.SIGTERM, 8),
            ]
        ],
        "in_a_step-SIGTERM",
    ),
)
def test_a_signal_saves_the_state(
    undisturbed, tmp_path, monkeypatch, signal_at, number, saved
):
    result, directory = undisturbed
    stopped = KeyboardInterrupt if number == signal.SIGINT else RunStopped
    message = f"^{number.name}: stopped; step {saved} is saved; --resume continues"
    with monkeypatch.context() as patch:
        signal_at(patch, number)
        with pytest.raises(stopped, match=message):
            run(tmp_path)
    assert saved_steps(tmp_path / "checkpoints")[-1] == saved
    records = list(read_records(tmp_path / RECORDS_FILE))
    assert records[-1] == {"step": saved, "saved": True}
    assert not (tmp_path / "run.lock").exists()

    resumed = run(tmp_path, existing_run="resume")
    assert resumed.metrics == result.metrics
    assert losses(tmp_path) == losses(directory)


@pytest.mark.full
def test_a_run_resumes_from_the_checkpoint_that_was_agreed_on(
    undisturbed, tmp_path, monkeypatch
):
    """Another host may see an older one only; see `agree_on_checkpoint`."""
    result, directory = undisturbed
    run(tmp_path)
    assert saved_steps(tmp_path / "checkpoints") == [5, NUM_STEPS]
    monkeypatch.setattr(
        training_loop, "agree_on_checkpoint", lambda job, checkpoints: 5
    )
    monkeypatch.setattr(RunCheckpoints, "save", lambda *_: None)  # 8 is there
    assert run(tmp_path, existing_run="resume").metrics == result.metrics
    starts = [
        r["first_step"] for r in read_records(tmp_path / RECORDS_FILE) if "run" in r
    ]
    assert starts == [0, 5]


def test_a_signal_before_the_run_leaves_nothing(tmp_path, monkeypatch):
    def open_data(*arguments, **options):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(SyntheticClicksSource, "open", open_data)
    with pytest.raises(RunStopped, match="^SIGTERM: the run has not started$"):
        run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_signal_before_the_first_step(tmp_path, monkeypatch):
    report = RunReport.record

    def and_raise(self, record):
        report(self, record)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(RunReport, "record", and_raise)
    with pytest.raises(
        RunStopped, match="SIGTERM: stopped before the first step; --re"
    ):
        run(tmp_path)
    assert saved_steps(tmp_path / "checkpoints") == []

"""Tests that TensorBoard reads the records of a run from its event files."""

import sys

import numpy as np
import pytest

from tests.tools.train.run_files import read_curves
from tpu_embedding.tools.train.errors import ConfigError
from tpu_embedding.tools.train.loop.reporting import (
    RECORDS_FILE,
    RunReport,
    read_records,
)
from tpu_embedding.tools.train.loop.tensorboard import (
    TENSORBOARD_DIR,
    ScalarWriter,
    load_tensorboard,
)

PROGRESS = {
    "loss": 0.5,
    "steps_per_second": 12.5,
    "samples_per_second": 12500.0,
    "input_wait": 0.25,
    "rounds": 2,
    "skipped": 1,
    "out_of_range": 0,
    "unique_ratio": 0.375,
    "hottest_shard_over_mean": 1.25,
}


def report_of(directory, first_step):
    report = RunReport(directory)
    report.start_tensorboard(first_step)
    return report


def test_all_numbers_of_records_are_scalars(tmp_path):
    report = report_of(tmp_path, 0)
    counts = {"ids": 40, "hits": 30, "not_admitted": 0, "no_place": 1, "load": 0.75}
    dynamic = {"dynamic_tables": {"user": counts}}
    report.progress({"step": 50} | PROGRESS | dynamic, 100)
    report.evaluation(100, {"log_loss": 0.25, "auc": 0.75}, 1.0)
    # Written at once: the report is still open.
    curves = read_curves(tmp_path / TENSORBOARD_DIR)
    report.close()
    wanted = {f"train/{name}": {50: value} for name, value in PROGRESS.items()}
    wanted |= {f"dynamic_tables/user/{name}": {50: x} for name, x in counts.items()}
    wanted |= {"evaluation/log_loss": {100: 0.25}, "evaluation/auc": {100: 0.75}}
    assert curves == wanted
    assert len(list(read_records(tmp_path / RECORDS_FILE))) == 2


def test_a_resumed_run_continues_the_curves(tmp_path):
    """Steps after the checkpoint are repeated; those before it stay."""
    for first_step, steps, loss in ((0, (1, 2, 3, 4), 8.0), (2, (3,), 4.0)):
        report = report_of(tmp_path, first_step)
        for step in steps:
            report.progress(PROGRESS | {"step": step, "loss": loss}, 9)
        report.close()
    losses = read_curves(tmp_path / TENSORBOARD_DIR)["train/loss"]
    assert losses == {1: 8.0, 2: 8.0, 3: 4.0}


def test_values_that_are_no_finite_numbers_are_left_out(tmp_path):
    writer = ScalarWriter(tmp_path, first_step=0)
    values = {"none": None, "nan": float("nan"), "inf": float("inf"), "text": "x"}
    writer.write(1, "train", values | {"int": 3, "numpy": np.float64(2)})
    writer.close()
    assert read_curves(tmp_path) == {"train/int": {1: 3}, "train/numpy": {1: 2}}


def test_nothing_is_written_unless_asked_for(tmp_path):
    report = RunReport(tmp_path)
    report.progress({"step": 50} | PROGRESS, 100)
    report.close()
    assert not (tmp_path / TENSORBOARD_DIR).exists()


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"tensorboardX.*'tpu-embedding\[train\]'"):
        load_tensorboard()

"""Tests that a run with loader processes has the numbers of a run without."""

import dataclasses
import json

import pytest

from tests.tools.data.criteo_text import write_criteo_text
from tpu_embedding.tools import train
from tpu_embedding.tools.data.criteo_to_parquet import convert
from tpu_embedding.tools.train.loop.reporting import RECORDS_FILE

pytest.importorskip("grain")

CONFIG = train.apply_overrides(
    train.load_config("dlrm"),
    [
        *("batch_size=64", "num_steps=6", "log_every=1", "evaluate_every=0"),
        *("data.num_evaluation_samples=100", "data.vocabulary_size=50"),
        *("model.bottom_sizes=16", "model.top_sizes=16", "model.dim=8"),
        "checkpoint_every=3",
    ],
)


def run(path, output_dir, num_processes, **arguments):
    config = dataclasses.replace(CONFIG, loader_processes=num_processes, target=None)
    return train.train(config, output_dir, data_dir=path, **arguments)


def losses(directory):
    lines = (directory / RECORDS_FILE).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {r["step"]: r["loss"] for r in records if "loss" in r}


@pytest.mark.exhaustive
def test_runs_with_and_without_loader_processes_are_equal(tmp_path):
    path = tmp_path / "day_0.parquet"
    convert(write_criteo_text(tmp_path / "day_0", 1000), path)
    expected = run(path, tmp_path / "thread", 0)
    # The other run starts with one process, and goes on with two after half the steps.
    assert run(path, tmp_path / "processes", 1, stop_at=3) is None
    found = run(path, tmp_path / "processes", 2, existing_run="resume")
    assert found.metrics == expected.metrics
    assert losses(tmp_path / "processes") == losses(tmp_path / "thread")

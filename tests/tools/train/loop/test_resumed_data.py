"""A run does not resume on files with other samples than its checkpoint saw."""

import dataclasses

import pytest

from tests.conftest import mesh_of
from tpu_embedding.checkpoint.differences import value_differences
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.tools import train
from tpu_embedding.tools.data.synthetic_criteo import write_criteo_sample

CONFIG = dataclasses.replace(
    train.apply_overrides(
        train.load_config("dlrm"),
        [
            *("batch_size=64", "num_steps=4", "log_every=1", "evaluate_every=0"),
            *("data.num_evaluation_samples=100", "data.vocabulary_size=50"),
            *("model.bottom_sizes=16", "model.top_sizes=16", "model.dim=8"),
            "checkpoint_every=2",
        ],
    ),
    target=None,
)


def run(directory, **options):
    paths = {"data_dir": directory / "day_0", "mesh": mesh_of(1)}
    return train.train(CONFIG, directory / "run", **paths, **options)


def test_a_file_of_as_many_other_lines_is_refused(tmp_path):
    write_criteo_sample(tmp_path / "day_0", 600)
    assert run(tmp_path, stop_at=2) is None
    lines = (tmp_path / "day_0").read_bytes().splitlines(keepends=True)
    (tmp_path / "day_0").write_bytes(b"".join(lines[1:] + lines[:1]))
    with pytest.raises(CheckpointError, match=r"same .*data.*\n.*dataset\.digest: '"):
        run(tmp_path, existing_run="resume")
    (tmp_path / "day_0").write_bytes(b"".join(lines))
    assert run(tmp_path, existing_run="resume").step == 4


def test_checkpoints_of_earlier_releases_have_no_digest():
    saved = {"dataset": {"num_train_samples": 7}}
    wanted = {"dataset": {"num_train_samples": 7, "digest": "0a1b2c3d"}}
    assert not value_differences(saved, wanted)
    assert value_differences(wanted, saved)

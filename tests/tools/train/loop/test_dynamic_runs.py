"""Whole runs with dynamic tables: their records, and a resume on other devices."""

import numpy as np
import pytest

from tests.conftest import mesh_of
from tests.tools.train.loop.test_killed_runs import counts_of
from tests.tools.train.loop.test_step import small_config
from tests.tools.train.loop.test_training_loop import losses
from tests.tools.train.run_files import read_curves
from tpu_embedding.tools.train import train
from tpu_embedding.tools.train.loop.tensorboard import TENSORBOARD_DIR

SETTINGS = ("num_steps=12", "log_every=1", "evaluate_every=0", "checkpoint_every=0")


def run(directory, *overrides, num_devices=1, **arguments):
    config = small_config("synthetic_stream", *SETTINGS, *overrides)
    return train(config, directory, mesh=mesh_of(num_devices), **arguments)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    result = run(directory, "data.evaluation_step=11", tensorboard=True)
    return result, directory


def test_records_and_curves_have_the_counts(whole_run):
    result, directory = whole_run
    counts = counts_of(directory)
    curves = read_curves(directory / TENSORBOARD_DIR)
    assert list(counts) == list(range(1, 13))
    for name in ("user", "item"):
        for key in ("hits", "inserts", "evictions", "no_place", "load"):
            wanted = {step: x[name][key] for step, x in counts.items()}
            found = curves[f"dynamic_tables/{name}/{key}"]
            assert found == pytest.approx(wanted, rel=1e-6)
        assert 0.9 < result.metrics[f"hits/{name}"] <= 1
        assert curves[f"evaluation/hits/{name}"] == {
            12: pytest.approx(result.metrics[f"hits/{name}"])
        }
    assert counts[12]["user"]["evictions"] > 0


@pytest.mark.full
def test_a_run_continues_on_other_devices(whole_run, tmp_path):
    """Ids, evictions and places are equal; losses are, but for rounding."""
    result, directory = whole_run
    evaluation = "data.evaluation_step=11"
    assert run(tmp_path, evaluation, num_devices=3, stop_at=7) is None
    resumed = run(tmp_path, evaluation, existing_run="resume")
    assert counts_of(tmp_path) == counts_of(directory)
    found, wanted = losses(tmp_path), losses(directory)
    assert found.keys() == wanted.keys()
    np.testing.assert_allclose(
        [found[step] for step in wanted], list(wanted.values()), rtol=1e-5
    )
    for name, value in result.metrics.items():
        assert resumed.metrics[name] == pytest.approx(value, rel=1e-4), name

"""Runs whose tables have rows on the host: the same bits, stops, progress, exports."""

import filecmp

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tools.train.runs import (
    losses_of,
    run,
    set_options,
    small_config,
)
from tpu_embedding.tools.cli.__main__ import main
from tpu_embedding.tools.train import evaluate
from tpu_embedding.tools.train.run_directory import RECORDS_FILE, read_records

CACHE = "cache_rows=300"
EVALUATIONS = "evaluate_every=2"


@pytest.fixture(scope="module")
def on_devices(tmp_path_factory):
    """A run with all rows on the devices."""
    directory = tmp_path_factory.mktemp("on_devices")
    return directory, run(directory, EVALUATIONS)


@pytest.fixture(scope="module")
def on_host(tmp_path_factory):
    """A run with all rows on the host, which evaluates in between."""
    directory = tmp_path_factory.mktemp("on_host")
    return directory, run(directory, EVALUATIONS, CACHE)


def check_same_files(*directories):
    """Compares the last checkpoints, but for the file with their time."""
    left, right = (
        {
            path.relative_to(directory): path
            for path in (directory / "checkpoints" / "6" / "default").rglob("*")
            if path.is_file() and path.name != "commit_success.txt"
        }
        for directory in directories
    )
    assert left.keys() == right.keys() and len(left) > 20
    assert all(filecmp.cmp(left[x], right[x], shallow=False) for x in left)


@pytest.mark.full
def test_a_cache_does_not_change_a_bit(on_devices, on_host):
    assert on_host[1] == on_devices[1]
    assert losses_of(on_host[0]) == losses_of(on_devices[0])
    on_host, on_devices = on_host[0], on_devices[0]
    check_same_files(on_host, on_devices)
    evaluations, trains, plain = (
        {r["step"]: r[kind] for r in read_records(run / RECORDS_FILE) if kind in r}
        for run, kind in (
            *((on_host, "evaluation"), (on_host, "train"), (on_devices, "train")),
        )
    )
    assert list(evaluations) == [2, 4, 6]
    rates = [values["hit_rate"] for values in trains.values()]
    assert 0 < rates[0] < rates[-1] < 1
    record_bytes = 4 * (4 + 4)  # a row, and its accumulators
    for values in trains.values():
        num_rows = values["exchanged_bytes"] / (2 * record_bytes)
        assert (2 * num_rows).is_integer() and num_rows > 0  # a mean of two steps
    assert not {"hit_rate", "exchanged_bytes"} & set(plain[6])


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize(
    ("first", "stop_at", "second"),
    [
        (CACHE, 3, "cache_rows=400"),
        (CACHE, 4, "cache_rows=0"),
        ("cache_rows=0", 4, CACHE),
    ],
)
def test_a_stopped_run_resumes_to_the_same_bits(
    on_devices, tmp_path, first, stop_at, second
):
    """Batches are drawn ahead, but a checkpoint is of the batch that was trained."""
    run(tmp_path, EVALUATIONS, first, stop_at=stop_at)
    assert run(tmp_path, EVALUATIONS, second, existing_run="resume") == on_devices[1]
    check_same_files(tmp_path, on_devices[0])


@pytest.mark.full
def test_the_end_of_a_run_is_evaluated_and_exported(on_host, tmp_path):
    directory, result = on_host
    assert evaluate(small_config(CACHE), directory, mesh=mesh_of(2)) == result
    settings = ["model.dim=4", "model.hidden_sizes=8", CACHE]
    options = ["--config", "synthetic", "--format", "safetensors"]
    options += ["--dtype", "bfloat16"]
    output = tmp_path / "served"
    command = ["export", str(directory), str(output), *options, *set_options(settings)]
    assert main(command) == 0
    served = {
        k: v for x in output.rglob("*.safetensors") for k, v in load_file(x).items()
    }
    assert sum(len(rows) for rows in served.values()) == 3620
    assert all(rows.dtype.name == "bfloat16" for rows in served.values())
    assert all(np.isfinite(rows).all() for rows in served.values())


@pytest.mark.full
def test_wrong_settings(tmp_path):
    with rejects(fix="HostRows.cache_rows"):
        run(tmp_path, "cache_rows=20")
    with rejects(fix="tables_split_over"):
        small_config(CACHE, "tables_split_over=slice")

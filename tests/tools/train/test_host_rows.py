"""Runs whose tables have rows on the host: the same bits, stops, progress, exports."""

import filecmp
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import mesh_of
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


def saved_files(directory, step=6):
    """Returns the files of a checkpoint, but for the one with its time."""
    root = pathlib.Path(directory) / "checkpoints" / str(step) / "default"
    files = {p.relative_to(root): p for p in root.rglob("*") if p.is_file()}
    return {k: p for k, p in files.items() if k.name != "commit_success.txt"}


def check_same_files(left, right):
    left, right = saved_files(left), saved_files(right)
    assert left.keys() == right.keys() and len(left) > 20
    assert all(filecmp.cmp(left[x], right[x], shallow=False) for x in left)


def evaluations_of(directory):
    records = read_records(directory / RECORDS_FILE)
    return {r["step"]: r["evaluation"] for r in records if "evaluation" in r}


@pytest.mark.full
def test_a_cache_does_not_change_a_bit(on_devices, on_host):
    assert on_host[1] == on_devices[1]
    assert losses_of(on_host[0]) == losses_of(on_devices[0])
    assert evaluations_of(on_host[0]) == evaluations_of(on_devices[0])
    assert list(evaluations_of(on_host[0])) == [2, 4, 6]
    check_same_files(on_host[0], on_devices[0])


@pytest.mark.full
def test_progress_has_the_hit_rate_and_the_bytes(on_devices, on_host):
    trains = [
        r["train"] for r in read_records(on_host[0] / RECORDS_FILE) if "train" in r
    ]
    rates = [values["hit_rate"] for values in trains]
    assert 0 < rates[0] < rates[-1] < 1
    record_bytes = 4 * (4 + 4)  # a row, and its accumulators
    for values in trains:
        num_rows = values["exchanged_bytes"] / (2 * record_bytes)
        assert (2 * num_rows).is_integer() and num_rows > 0  # a mean of two steps
    (record,) = [
        r
        for r in read_records(on_devices[0] / RECORDS_FILE)
        if r.get("step") == 6 and "train" in r
    ]
    assert not {"hit_rate", "exchanged_bytes"} & set(record["train"])


@pytest.mark.full
def test_a_stopped_run_resumes_to_the_same_bits(on_devices, tmp_path):
    """Batches are drawn ahead, but a checkpoint is of the batch that was trained."""
    run(tmp_path, EVALUATIONS, CACHE, stop_at=3)
    second = [EVALUATIONS, "cache_rows=400"]
    assert run(tmp_path, *second, existing_run="resume") == on_devices[1]
    check_same_files(tmp_path, on_devices[0])


@pytest.mark.full
@pytest.mark.parametrize("first", [CACHE, "cache_rows=0"])
def test_a_run_resumes_with_its_rows_elsewhere(on_devices, tmp_path, first):
    second = ({CACHE, "cache_rows=0"} - {first}).pop()
    run(tmp_path, EVALUATIONS, first, stop_at=4)
    assert run(tmp_path, EVALUATIONS, second, existing_run="resume") == on_devices[1]
    check_same_files(tmp_path, on_devices[0])


@pytest.mark.full
def test_the_end_of_a_run_is_evaluated_and_exported(on_host, tmp_path):
    directory, result = on_host
    assert evaluate(small_config(CACHE), directory, mesh=mesh_of(2)) == result
    settings = ["model.dim=4", "model.hidden_sizes=8", CACHE]
    options = ["--config", "synthetic", "--format", "safetensors"]
    output = tmp_path / "served"
    command = ["export", str(directory), str(output), *options, *set_options(settings)]
    assert main(command) == 0
    served = {
        k: v for x in output.rglob("*.safetensors") for k, v in load_file(x).items()
    }
    assert sum(len(rows) for rows in served.values()) == 3620
    assert all(np.isfinite(rows).all() for rows in served.values())


@pytest.mark.full
def test_files_are_mapped(on_devices, tmp_path):
    (tmp_path / "rows").mkdir()
    settings = [EVALUATIONS, CACHE, f"rows_directory={tmp_path / 'rows'}"]
    assert run(tmp_path / "run", *settings) == on_devices[1]


def test_a_cache_that_is_too_small(tmp_path):
    with pytest.raises(ValueError, match=r"HostRows.cache_rows to at least \d+"):
        run(tmp_path, "cache_rows=20")


def test_one_copy_of_a_table_only():
    with pytest.raises(ValueError, match="tables_split_over must be 'all' with cache"):
        small_config(CACHE, "tables_split_over=slice")

"""A disk that is full, or hangs, ends a job in time; the older checkpoint is whole."""

import os
import platform
import re
import subprocess
import time

import pytest

from tests.tools.jobs.jobs import JobServer
from tests.tools.jobs.test_training import DAMAGED
from tpu_embedding.checkpoint import describe, read_table
from tpu_embedding.checkpoint.run_checkpoints import saved_steps

ENDS_WITHIN_SECONDS = 60
SETTINGS = (
    *("batch_size=16", "num_steps=100000", "log_every=1", "checkpoint_every=10"),
    # Each process writes a part of the dense parameters; process 0 writes the tables.
    *("data.num_evaluation_samples=40", "model.dim=4", "model.hidden_sizes=128"),
)


def arguments_of(config, directory, num_processes, *settings):
    arguments = [config, "--devices", 2 * num_processes, "--output-dir", directory]
    for setting in (*SETTINGS, *settings):
        arguments += ["--set", setting]
    return arguments


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = JobServer(tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("log"))
    yield server
    server.close()


def check_end(job, directory, message):
    """Checks that each process ends with one error, and the checkpoints."""
    job.wait_for("saved step 10")
    assert set(job.wait(seconds=ENDS_WITHIN_SECONDS)) == {1}, "\n".join(job.outputs())
    for output in job.outputs():
        (line,) = re.findall("^error: .*", output, re.MULTILINE)
        assert re.search(message, line)
        assert "Traceback" not in output
    checkpoints = directory / "checkpoints"
    steps = saved_steps(checkpoints)
    assert steps
    for step in steps:
        for name, table in describe(checkpoints / str(step)).tables.items():
            for slot in (None, *table.slots):
                read_table(checkpoints / str(step), name, slot=slot)


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize(
    ("num_processes", "damage", "message"),
    [
        (2, "disk", "The checkpoint .* cannot be written: .*File too large"),
        (2, "hanging disk", "The checkpoint of step 20 is not complete after 10 s"),
        pytest.param(
            *(4, "disk", "The checkpoint .* cannot be written: .*File too large"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_save_that_fails_in_one_process(
    num_processes, damage, message, server, tmp_path
):
    settings = [f"data.damage={damage}"]
    if damage == "hanging disk":
        settings.append("max_save_seconds=10")
    arguments = arguments_of(DAMAGED, tmp_path, num_processes, *settings)
    job = server.start(num_processes, *arguments)
    check_end(job, tmp_path, message)
    host = platform.node()
    if damage == "disk":
        assert f"error: process 1 (host {host}): " in job.outputs()[0]


@pytest.fixture
def small_disk(tmp_path):
    """A directory with room for a few checkpoints."""
    command = ["mount", "-t", "tmpfs", "-o", "size=2500k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(command).returncode:
        pytest.skip("only root mounts file systems")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("run", range(10))
@pytest.mark.parametrize("num_processes", [2, 4])
def test_a_full_disk(num_processes, run, server, small_disk):
    settings = ["checkpoints_kept=1000"]
    arguments = arguments_of("synthetic", small_disk, num_processes, *settings)
    begin = time.monotonic()
    job = server.start(num_processes, *arguments)
    check_end(job, small_disk, "No space left on device")
    print(f"run {run}: {time.monotonic() - begin:.1f} s, {job.outputs()[1]}")

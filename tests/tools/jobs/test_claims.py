"""Jobs that cannot start end with an error; a job that runs goes on."""

import platform
import signal
import subprocess
import sys

import pytest

from tests.processes.test_processes import ROOT, environment_of, free_port
from tests.tools.jobs.jobs import JobServer
from tests.tools.jobs.test_training import arguments_of

ENDS_WITHIN_SECONDS = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = JobServer(tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("log"))
    yield server
    server.close()


@pytest.mark.full
def test_two_processes_with_one_id(server, tmp_path):
    arguments = arguments_of("synthetic", tmp_path / "run", 3)
    job = server.start(3, *arguments, of_process={2: ["--process-id", "1"]})
    assert job.wait(ENDS_WITHIN_SECONDS) == [2, 2, 2], "\n".join(job.outputs())
    host = platform.node()
    for output in job.outputs():
        (line,) = output.splitlines()
        assert line.startswith("error: Process 1 of the job at 127.0.0.1:")
        for pid in job.pids[1:]:
            assert f"host {host} (pid {pid})" in line
    assert not (tmp_path / "run").exists()


LATE = """
import sys
from tpu_embedding.tools import cli
from tpu_embedding.distributed import roll_call

roll_call.RUNNING_SECONDS = 1
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.full
def test_a_process_that_comes_to_a_job_that_runs(server, tmp_path):
    """As the second process of another job, whose first one cannot listen there."""
    settings = ["num_steps=100000", "log_every=1", "checkpoint_every=0"]
    arguments = arguments_of("synthetic", tmp_path / "run", 2, *settings)
    address = f"127.0.0.1:{free_port()}"
    place = ["--coordinator", address]
    job = server.start(2, *arguments, of_process={0: place, 1: place})
    job.wait_for("step      2/")
    others = [*place, "--num-processes", "2", "--supervise", "never", "--process-id"]
    for process, message in (
        ("1", f"error: The coordinator {address} already runs a job, which process 1"),
        ("0", f"error: Process 0 must listen on port {address.split(':')[1]} of 127"),
    ):
        command = ["train", *map(str, arguments), *others, process]
        late = subprocess.run(
            [sys.executable, "-c", LATE, *command],
            cwd=ROOT,
            env=environment_of(),
            capture_output=True,
            text=True,
            timeout=ENDS_WITHIN_SECONDS,
        )
        assert late.returncode == 2, late.stderr
        (line,) = late.stderr.splitlines()
        assert line.startswith(message)
    job.send(signal.SIGTERM, job.pids[0])
    assert job.wait() == [75, 75], "\n".join(job.outputs())


WITHOUT_OTHERS = """
import sys
from tpu_embedding.tools import cli
from tpu_embedding.distributed import roll_call
from tpu_embedding.distributed import starting

starting.start.__kwdefaults__["timeout_seconds"] = 1
roll_call.TELL_SECONDS = 0
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.full
def test_processes_that_never_start(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    place = ["--coordinator", address, "--num-processes", "2", "--process-id", "0"]
    command = ["train", "synthetic", "--output-dir", tmp_path / "run", *place]
    command += ["--supervise", "never"]  # A parent would start an unchanged command.
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_OTHERS, *command],
        env=environment_of(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 2, result.stderr
    message = "error: Not all of the 2 processes have connected to the coordinator"
    assert f"{message} {address} within 1 s" in result.stderr
    assert not (tmp_path / "run").exists()

"""Processes of a real job die, stop or are asked to stop; the command reports it.

Each process has a parent of its own, as on the hosts of a slice. In the full tier, jobs
have two processes with one emulated device each; in the exhaustive tier, four processes
with two devices each.
"""

import os
import pathlib
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.conftest import mesh_of
from tests.processes.test_processes import free_port
from tpu_embedding.checkpoint.run_checkpoints import saved_steps
from tpu_embedding.tools.train import apply_overrides, load_config, train
from tpu_embedding.tools.train.loop.reporting import RECORDS_FILE, read_records

ROOT = pathlib.Path(__file__).parents[3]
NUM_STEPS = 40
SETTINGS = [
    "batch_size=32",
    "model.dim=4",
    "model.hidden_sizes=4",
    "data.num_evaluation_samples=64",
    "log_every=1",
    "checkpoint_every=10",
]
HEARTBEAT_SECONDS = 10
ENDS_WITHIN_SECONDS = 60

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="finds the workers in /proc"
)


class Job:
    """A run of several commands, whose output is read as it comes."""

    def __init__(
        self,
        directory,
        cache,
        *options,
        num_processes=2,
        num_devices=2,
        num_steps=NUM_STEPS,
    ):
        program = [sys.executable, "-m", "tpu_embedding.tools.cli"]
        command = [*program, "train", "synthetic", "--devices", str(num_devices)]
        command += ["--coordinator", f"127.0.0.1:{free_port()}"]
        command += ["--num-processes", str(num_processes)]
        command += ["--heartbeat", str(HEARTBEAT_SECONDS)]
        command += ["--output-dir", str(directory), *options]
        for setting in (*SETTINGS, f"num_steps={num_steps}"):
            command += ["--set", setting]
        environment = {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.parents = [
            subprocess.Popen(
                [*command, "--process-id", str(index)],
                cwd=ROOT,
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index in range(num_processes)
        ]
        self.lines = []
        self._queue = queue.Queue()
        for parent in self.parents:
            threading.Thread(target=self._read, args=(parent,), daemon=True).start()

    def _read(self, parent):
        with parent.stdout:
            for line in parent.stdout:
                self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def await_line(self, pattern, timeout=300):
        end = time.monotonic() + timeout
        while True:
            line = self._queue.get(timeout=max(0.1, end - time.monotonic()))
            assert line is not None, "\n".join(self.lines)
            self.lines.append(line)
            if re.search(pattern, line):
                return line

    def send(self, number, process):
        """Sends a signal to the worker of a process."""
        pid = self.parents[process].pid
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
        os.kill(int(children), number)

    def finish(self, timeout=300):
        """Waits for the end; returns the exit statuses and the output."""
        statuses = [parent.wait(timeout) for parent in self.parents]
        ended = 0
        while ended < len(self.parents):
            line = self._queue.get(timeout=30)
            if line is None:
                ended += 1
            else:
                self.lines.append(line)
        return statuses, "\n".join(self.lines)


def losses(directory):
    records = read_records(directory / RECORDS_FILE)
    return {r["step"]: r["loss"] for r in records if "loss" in r}


def result(directory):
    (record,) = (r for r in read_records(directory / RECORDS_FILE) if "result" in r)
    return record["result"]["metrics"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A directory of compiled programs, for all jobs."""
    return tmp_path_factory.mktemp("xla")


FOUR = {"num_processes": 4, "num_devices": 8}


def check_numbers(directory, undisturbed):
    found, expected = losses(directory), losses(undisturbed)
    assert list(found) == list(expected) == list(range(1, NUM_STEPS + 1))
    # The same programs on the same data; gloo may sum in another order.
    np.testing.assert_allclose(
        list(found.values()), list(expected.values()), rtol=1e-6, atol=0
    )
    for name, value in result(undisturbed).items():
        assert result(directory)[name] == pytest.approx(value, rel=1e-6)


@pytest.mark.full
def test_a_run_goes_on_after_a_kill_and_a_stop(tmp_path, cache):
    undisturbed = tmp_path / "undisturbed"
    settings = [*SETTINGS, f"num_steps={NUM_STEPS}"]
    config = apply_overrides(load_config("synthetic"), settings)
    train(config, undisturbed, mesh=mesh_of(2))
    directory = tmp_path / "run"
    # One for each failure, and one for a process that starts again before the others
    # have noticed, which fails once more.
    job = Job(directory, cache, "--restarts", "3")
    job.await_line("saved step 10")
    job.send(signal.SIGKILL, 1)
    job.await_line("supervisor: process 1 of 2 .* was killed by SIGKILL")
    job.await_line("supervisor: restart 1 of 3 .* newest checkpoint")
    job.await_line("resumed after step")
    job.await_line("^step ")
    job.send(signal.SIGSTOP, 1)
    begin = time.monotonic()
    job.await_line("supervisor: process 1 of 2 .* not answered for")
    # Also the time in which it may print its stacks, and a busy machine.
    assert time.monotonic() - begin < HEARTBEAT_SECONDS + 20
    statuses, output = job.finish()
    assert statuses == [0, 0], output
    check_numbers(directory, undisturbed)


@pytest.mark.exhaustive
def test_sigterm_to_one_process_of_four_saves_on_all(tmp_path, cache):
    job = Job(tmp_path, cache, **FOUR)
    job.await_line("step +3/")
    job.send(signal.SIGTERM, 3)
    statuses, output = job.finish()
    assert statuses == [75] * 4, output
    (step,) = saved_steps(tmp_path / "checkpoints")
    assert 3 <= step < NUM_STEPS
    assert f"step {step} is saved" in output
    assert "supervisor" not in output


@pytest.mark.exhaustive
def test_a_stopped_process_of_four_is_found_within_the_heartbeat(tmp_path, cache):
    job = Job(tmp_path, cache, **FOUR)
    job.await_line("step +3/")
    job.send(signal.SIGSTOP, 2)
    begin = time.monotonic()
    statuses, output = job.finish()
    print(f"found and ended after {time.monotonic() - begin:.1f} s")
    assert statuses == [1] * 4, output
    assert re.search("supervisor: process 2 of 4 .*not answered for", output)
    assert time.monotonic() - begin < HEARTBEAT_SECONDS + 20


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(10))
def test_a_process_killed_at_any_moment_after_a_step_is_named(seed, tmp_path, cache):
    chance = random.Random(seed)
    victim, moment = chance.randrange(4), chance.uniform(0, 10)
    job = Job(tmp_path, cache, **FOUR, num_steps=100_000)
    job.await_line("^step ")
    time.sleep(moment)  # It is the moment that the seed has drawn.
    job.send(signal.SIGKILL, victim)
    begin = time.monotonic()
    statuses, output = job.finish()
    seconds = time.monotonic() - begin
    print(f"process {victim} after {moment:.1f} s: {seconds:.1f} s")
    assert statuses == [1] * 4, output
    assert re.search(
        rf"supervisor: process {victim} of 4 .* was killed by SIGKILL", output
    ), output
    assert seconds < ENDS_WITHIN_SECONDS


@pytest.mark.exhaustive
def test_a_run_of_four_kills_ends_with_the_undisturbed_numbers(tmp_path, cache):
    """Each kill comes a few steps behind another checkpoint, the first before any."""
    chance = random.Random(0)
    undisturbed = tmp_path / "undisturbed"
    statuses, output = Job(undisturbed, cache, **FOUR).finish()
    assert statuses == [0] * 4, output
    directory = tmp_path / "killed"
    # Each parent counts its own restarts; see the comment in the test of two processes.
    job = Job(directory, cache, "--restarts", "8", **FOUR)
    for saved in (0, 10, 20, 30):
        victim = chance.randrange(4)
        job.await_line(rf"^step +{saved + chance.randrange(1, 6)}/")
        job.send(signal.SIGKILL, victim)
        for _ in job.parents:
            job.await_line("supervisor: restart [1-8] of 8 ")
        killed = f"supervisor: process {victim} of 4 .* was killed by SIGKILL"
        assert any(re.search(killed, line) for line in job.lines)
    statuses, output = job.finish(timeout=600)
    assert statuses == [0] * 4, output
    assert output.count("was killed by SIGKILL") == 4
    check_numbers(directory, undisturbed)

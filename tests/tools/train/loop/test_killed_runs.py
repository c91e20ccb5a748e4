"""Runs that are killed at random times continue as if nothing had happened."""

import contextlib
import json
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

import jax
import numpy as np
import pytest

from tests.tools.train.loop.test_training_loop import losses
from tpu_embedding.checkpoint import describe, read_table
from tpu_embedding.checkpoint.run_checkpoints import saved_steps
from tpu_embedding.tools.train.loop.reporting import RECORDS_FILE, read_records

ROOT = pathlib.Path(__file__).parents[4]
NUM_STEPS, CHECKPOINT_EVERY = 36, 3
SETTINGS = [
    "batch_size=16",
    "model.dim=4",
    "model.hidden_sizes=4",
    "data.num_evaluation_samples=32",
    f"num_steps={NUM_STEPS}",
    "log_every=1",
    "evaluate_every=20",
    f"checkpoint_every={CHECKPOINT_EVERY}",
]
SETTINGS_OF_STREAM = [
    "data.num_users=40",
    "data.num_items=20",
    "data.life_steps=4",
    f"data.evaluation_step={NUM_STEPS - 1}",
]


class RunServer:
    """Runs in forks of one process; see `run_server.py`."""

    def __init__(self, cache):
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.tools.train.run_server"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def start(self, directory, *more, config="synthetic"):
        arguments = ["train", config, "--devices", "1", "--output-dir"]
        arguments += [str(directory), *more]
        of_config = SETTINGS_OF_STREAM if config == "synthetic_stream" else []
        for setting in (*SETTINGS, *of_config):
            arguments += ["--set", setting]
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        return Run(self._lines)


class Run:
    """A run of the server.

    Attributes:
      output: lines that it has printed.
      status: exit status of its process; None while it runs.
    """

    def __init__(self, lines):
        self._lines = lines
        self.output, self.status = [], None
        self._pid = int(lines.get(timeout=60).removeprefix("pid "))

    def wait(self, seconds=120.0, until="status"):
        """Reads output for some time, or until a line that starts with a word."""
        end = time.monotonic() + seconds
        while self.status is None:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return
            self.output.append(line)
            if line.startswith("status "):
                self.status = int(line.removeprefix("status "))
            if line.startswith(until):
                return

    def send(self, number):
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def numbers_after(self, words):
        pattern = re.compile(rf"{words} (\d+)")
        return [int(n) for line in self.output for n in pattern.findall(line)]

    @property
    def first_step(self):
        """The step after which the run continued; None if it did not get so far."""
        if any("from the beginning" in line for line in self.output):
            return 0
        return next(iter(self.numbers_after("resumed after step")), None)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    cache = jax.config.jax_compilation_cache_dir or tmp_path_factory.mktemp("cache")
    server = RunServer(cache)
    yield server
    server.close()


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "undisturbed"
    run = server.start(directory)
    run.wait()
    assert run.status == 0, run.output
    return directory


def values_of(directory):
    """Returns all arrays of tables after the last step, ids included."""
    checkpoint = directory / "checkpoints" / str(NUM_STEPS)
    return {
        (name, slot): read_table(checkpoint, name, slot=slot)
        for name, table in describe(checkpoint).tables.items()
        for slot in table.arrays
    }


def counts_of(directory):
    """Returns the counts of dynamic tables by step."""
    return {
        record["step"]: record.get("dynamic_tables", {})
        for record in read_records(directory / RECORDS_FILE)
        if "loss" in record
    }


def check_equal(directory, undisturbed):
    results = [
        list(read_records(d / RECORDS_FILE))[-1] for d in (directory, undisturbed)
    ]
    metrics, wanted = (record["result"]["metrics"] for record in results)
    assert metrics == wanted
    assert losses(directory) == losses(undisturbed)
    assert counts_of(directory) == counts_of(undisturbed)
    found, wanted = values_of(directory), values_of(undisturbed)
    assert found.keys() == wanted.keys()
    for key, values in found.items():
        np.testing.assert_array_equal(values, wanted[key], err_msg=str(key))
    names = {path.name for path in (directory / "checkpoints").iterdir()}
    assert names == {str(step) for step in saved_steps(directory / "checkpoints")}
    assert not (directory / "run.lock").exists()


def disturb(server, directory, generator, stop, at_most, config="synthetic"):
    """Starts a run again and again until it is done, and stops some of its processes.

    Returns the numbers of runs and of saves that were stopped. Checks that each run
    continues from a complete checkpoint that is not older than the last reported one.
    """
    reported = num_stopped = num_saves_stopped = 0
    while True:
        # Before its first record, a killed run has left nothing to resume.
        has_run = (directory / RECORDS_FILE).exists()
        run = server.start(directory, *(["--resume"] if has_run else []), config=config)
        if num_stopped < at_most:
            stop(run, generator)
        run.wait()
        if run.first_step is not None:
            assert run.first_step >= reported, run.output
        reported = max([reported, *run.numbers_after("saved step")])
        if run.status == 0:
            return num_stopped, num_saves_stopped
        num_stopped += 1
        assert num_stopped <= at_most, run.output
        steps = saved_steps(directory / "checkpoints")
        num_saves_stopped += bool(list(directory.glob("checkpoints/*tmp*")))
        assert max(steps, default=0) >= reported


def kill(run, generator):
    """Kills a run at a random time, most often while it trains."""
    kind = generator.choice(["training", "training", "grace", "early"])
    if kind == "early":
        run.wait(2 * generator.random())
    else:
        run.wait(until="step")
        run.wait(0.3 * generator.random())
    if kind == "grace":  # The save takes longer than the grace period.
        run.send(signal.SIGTERM)
        run.wait(0.1 * generator.random())
    run.send(signal.SIGKILL)


@pytest.mark.parametrize(
    "num_kills",
    [3, pytest.param(50, marks=pytest.mark.exhaustive)],
    ids="{}kills".format,
)
def test_sigkill_at_random_times(server, undisturbed, tmp_path, num_kills):
    generator = random.Random(num_kills)
    kills = kills_of_saves = num_runs = 0
    while kills < num_kills:  # A run may be done first.
        directory, left = tmp_path / str(num_runs), num_kills - kills
        found = disturb(server, directory, generator, kill, left)
        check_equal(directory, undisturbed)
        kills, kills_of_saves = kills + found[0], kills_of_saves + found[1]
        num_runs += 1
    print(f"{kills} kills, {kills_of_saves} in a save, of {num_runs} runs")


def test_dynamic_tables_survive_kills(server, tmp_path):
    """Ids, rows, slots, counts and losses of a run that evicts all the time."""
    config = "synthetic_stream"
    undisturbed = tmp_path / "undisturbed"
    run = server.start(undisturbed, config=config)
    run.wait()
    assert run.status == 0, run.output
    evictions = [c["user"]["evictions"] for c in counts_of(undisturbed).values()]
    assert sum(evictions) > 50
    generator, kills, num_runs = random.Random(0), 0, 0
    while kills < 2:
        directory, left = tmp_path / str(num_runs), 2 - kills
        kills += disturb(server, directory, generator, kill, left, config)[0]
        check_equal(directory, undisturbed)
        num_runs += 1


@pytest.mark.full
def test_sigterm_at_random_times(server, undisturbed, tmp_path):
    generator = random.Random(0)

    def stop(run, generator):
        run.wait(until="step")
        run.wait(0.3 * generator.random())
        run.send(signal.SIGTERM)
        run.wait()
        if run.status == 0:  # It was done first.
            return
        assert run.status == 75, run.output
        (step,) = run.numbers_after("SIGTERM: stopped; step")
        assert step == run.numbers_after("saved step")[-1]
        # The step in progress at the signal; metrics are read behind it.
        assert step >= max(run.numbers_after("^step +"), default=0)

    signals = num_runs = 0
    while signals < 10:
        directory, left = tmp_path / str(num_runs), 10 - signals
        signals += disturb(server, directory, generator, stop, left)[0]
        check_equal(directory, undisturbed)
        num_runs += 1
    print(f"{signals} signals to {num_runs} runs")

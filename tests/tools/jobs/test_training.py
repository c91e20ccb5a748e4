"""The training command in real processes: equal numbers, and an end for all."""

import pathlib
import platform
import signal

import jax
import numpy as np
import pytest

from tests.tools.jobs.jobs import JobServer
from tests.tools.train.loop.test_training_loop import losses
from tpu_embedding.checkpoint import describe, read_table
from tpu_embedding.checkpoint.run_checkpoints import saved_steps
from tpu_embedding.tools.train.loop.reporting import RECORDS_FILE, read_records

NUM_STEPS = 4
DAMAGED = str(pathlib.Path(__file__).with_name("damaged_config.py"))
SETTINGS = {
    "synthetic": ["data.num_evaluation_samples=40", "model.hidden_sizes=4"],
    DAMAGED: ["data.num_evaluation_samples=40", "model.hidden_sizes=4"],
    "dlrm": [
        "data.num_evaluation_samples=64",
        "data.vocabulary_size=50",
        "model.bottom_sizes=8",
        "model.top_sizes=8",
    ],
    "movielens": ["batch_size=1000", "model.dim=8"],
}


def arguments_of(config, directory, num_devices, *settings):
    common = ("batch_size=16", f"num_steps={NUM_STEPS}", "log_every=1", "model.dim=4")
    names = {setting.partition("=")[0] for setting in settings}
    chosen = [
        setting
        for setting in common
        if setting.partition("=")[0]
        not in names | {s.partition("=")[0] for s in SETTINGS[config]}
    ]
    arguments = [config, "--devices", num_devices, "--output-dir", directory]
    for setting in (*chosen, *SETTINGS[config], *settings):
        arguments += ["--set", setting]
    return arguments


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    cache = jax.config.jax_compilation_cache_dir or tmp_path_factory.mktemp("cache")
    server = JobServer(cache, tmp_path_factory.mktemp("logs"))
    yield server
    server.close()


def values_of(directory):
    """Returns losses, metrics, tables and slot variables after the last step."""
    checkpoint = directory / "checkpoints" / str(NUM_STEPS)
    result = list(read_records(directory / RECORDS_FILE))[-1]["result"]
    tables = {
        f"{name} {slot}": read_table(checkpoint, name, slot=slot)
        for name, table in describe(checkpoint).tables.items()
        for slot in (None, *table.slots)
    }
    return tables | {"losses": list(losses(directory).values())} | result["metrics"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "num_processes"),
    [
        ("dlrm", 2),
        ("movielens", 4),
        pytest.param("dlrm", 4, marks=pytest.mark.exhaustive),
        pytest.param("movielens", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_processes_equal_one(config, num_processes, server, tmp_path, request):
    """Losses, metrics, tables and slot variables, with two devices per process."""
    more = []
    if config == "movielens":
        more = ["--data-dir", request.getfixturevalue("movielens_dir")]
    found = {}
    for processes in (num_processes, 1):
        directory = tmp_path / str(processes)
        arguments = arguments_of(config, directory, 2 * num_processes)
        job = server.run(processes, *arguments, *more)
        assert sum("step 4/4" in output for output in job.outputs()) == 1
        found[processes] = values_of(directory)
    several, one = found.values()
    assert several.keys() == one.keys()
    assert len(several["losses"]) == NUM_STEPS
    for name, values in several.items():
        # The same program; gloo may sum in another order.
        np.testing.assert_allclose(values, one[name], rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize(
    ("damage", "status", "message"),
    [
        ("line", 2, "process 1 (host {host}): clicks.tsv, line 7: expected 40 fields"),
        pytest.param(
            "evaluation",
            2,
            "All processes must have the same number of evaluation batches, got 2 on "
            "process 1 (host {host}) and more on process 0 (host {host})",
            marks=pytest.mark.exhaustive,
        ),
        (
            "plot",
            1,
            "process 0 (host {host}): OSError: [Errno 28] No space left on device",
        ),
    ],
)
def test_an_error_of_one_process_ends_all(damage, status, message, server, tmp_path):
    arguments = arguments_of(DAMAGED, tmp_path / "run", 4, f"data.damage={damage}")
    job = server.run(2, *arguments, status=status)
    for output in job.outputs():
        assert message.format(host=platform.node()) in output
    assert not (tmp_path / "run" / "run.lock").exists()


@pytest.mark.full
def test_processes_that_differ_end_before_the_first_step(server, tmp_path):
    arguments = arguments_of("synthetic", tmp_path / "run", 2)
    other = {1: ["--set", "seed=5"]}
    job = server.run(2, *arguments, status=2, of_process=other)
    host = platform.node()
    for output in job.outputs():
        assert f"  config.seed is 0 on process 0 (host {host})" in output
        assert f"  config.seed is 5 on process 1 (host {host})" in output
        assert "checksum of batch 0" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_signal_to_one_process_saves_on_all(server, tmp_path):
    """The run then continues with another number of processes."""
    settings = ["num_steps=100000", "log_every=1", "checkpoint_every=0"]
    arguments = arguments_of("synthetic", tmp_path / "run", 4, *settings)
    job = server.start(2, *arguments)
    job.wait_for("step      2/")
    job.send(signal.SIGTERM, job.pids[1])
    assert job.wait() == [75, 75], "\n".join(job.outputs())
    (step,) = saved_steps(tmp_path / "run" / "checkpoints")
    for output in job.outputs():
        assert f"SIGTERM: stopped; step {step} is saved" in output
    server.run(1, *arguments, "--resume", "--stop-at", step + 2)
    found = losses(tmp_path / "run")
    assert list(found) == list(range(1, step + 3))

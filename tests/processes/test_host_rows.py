"""Jobs of several processes train rows on the host as one process trains its own."""

import signal

import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.host_rows import models
from tests.host_rows.twins import check_equal
from tests.processes import (
    host_rows_faults_worker,
    host_rows_resuming_worker,
    host_rows_state_worker,
    host_rows_worker,
)
from tests.processes.host_rows_faults_worker import FAULTY_STEP, STEPS
from tests.processes.host_rows_state_worker import run_rule, trained
from tests.processes.test_processes import free_port, run_job, start
from tpu_embedding.tables import line_exchange

ALL_RULES = ["sgd", "adagrad", "adam", "adafactor"]
EVERY_CASE = pytest.mark.full(every_case=True)


@pytest.mark.parametrize(
    ("num_processes", "seeds"),
    [
        pytest.param(2, range(10), marks=EVERY_CASE, id="2"),
        *(
            pytest.param(
                n, range(i, i + 10), marks=pytest.mark.exhaustive, id=f"{n}_{i}"
            )
            for n, seeds in ((2, range(10, 110, 10)), (4, range(110, 200, 10)))
            for i in seeds
        ),
    ],
)
def test_random_programs(num_processes, seeds, tmp_path):
    """Each equals itself with all rows on the devices, bit for bit."""
    arguments = tmp_path, seeds.start, seeds.stop
    found, _ = run_job(
        *(host_rows_worker, 2, tmp_path, *arguments), num_processes=num_processes
    )
    for values in found:
        assert 0 < values["fetched"] < values["rows"]


@pytest.mark.parametrize(
    ("num_processes", "rules"),
    [
        pytest.param(2, ["adagrad", "adafactor"], marks=EVERY_CASE),
        pytest.param(2, ["sgd", "adam"], marks=pytest.mark.exhaustive),
        pytest.param(4, ALL_RULES, marks=pytest.mark.exhaustive),
    ],
)
def test_jobs_equal_one_process(num_processes, rules, tmp_path, monkeypatch):
    """Training, saves, exports and restores, against rows on the devices of one."""
    monkeypatch.setattr(line_exchange, "_MIN_BLOCK_BYTES", 512)
    monkeypatch.setattr(models, "mesh_of", mesh_of)
    one = models.make(num_devices=3)
    trained(*one, 0, 6)
    te.save(tmp_path / "one", one)
    found, _ = run_job(
        *(host_rows_state_worker, 2, tmp_path, tmp_path, *rules),
        num_processes=num_processes,
    )
    mesh = mesh_of(2 * num_processes)
    wanted = {}
    for rule in rules:
        wanted |= run_rule(rule, te.Sharded(), mesh)
    twin = models.make(num_devices=3, seed=1)
    te.restore(tmp_path / "one", twin)
    restored = trained(*twin, 6, 12)
    for values in found:
        for name, value in wanted.items():
            if name.startswith("adafactor"):  # Gloo sums its totals in another order.
                np.testing.assert_allclose(values[name], value, rtol=1e-5, atol=1e-6)
            else:
                check_equal(values[name], value)
        for name, value in restored.items():
            np.testing.assert_allclose(
                # Other devices sum the gradients of the head in another order.
                *(values[f"restored {name}"], value),
                rtol=1e-4,
                atol=1e-6,
            )

    # One process restores the job's checkpoint, with and without te.HostRows.
    states = []
    for placement in (te.HostRows(cache_rows=90), te.Sharded()):
        model = models.make(placement, 3, seed=1)
        te.restore(tmp_path / "job", model)
        states.append(trained(*model, 6, 12))
    check_equal(*states)

    of_one, of_job = models.make(te.Sharded(), 3, seed=1), tmp_path / "job_tables"
    te.restore(tmp_path / "job", of_one)
    te.export.save_tables(of_one[0], tmp_path / "tables")
    files = [
        (x / "tables/user.safetensors").read_bytes()
        for x in (tmp_path / "tables", of_job)
    ]
    assert files[0] == files[1]
    # Padding rows add less than a tenth.
    num_bytes = sum(int(values["store_bytes"]) for values in found)
    assert num_bytes <= 1.1 * 4 * models.ROWS * 2 * models.DIM


FAULTS = {
    "cache too small": "cached rows",
    "iterator raises": "no more data",
    "iterator ends": "have only 5",
    "iterator ends, ragged": "has only 5 batches",
    "features_of raises": "KeyError",
    "writer fails": "TypeError",
    "directory": "HostRows.directory",
    "break": "has left the loop",
    "break and stay": "has left the loop",
    "interrupt": "KeyboardInterrupt",
    "body raises": "ArithmeticError",
}


IN_FULL_TIER = "cache too small", "interrupt"
BEFORE_STEP_5 = (
    "features_of raises",
    "writer fails",
    "directory",
    "iterator ends, ragged",
)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault, marks=EVERY_CASE if fault in IN_FULL_TIER else pytest.mark.exhaustive
        )
        for fault in FAULTS
    ],
)
def test_a_fault_in_one_process_ends_all(fault, tmp_path):
    """Each process ends by itself, and names the cause."""
    address = f"127.0.0.1:{free_port()}"
    jobs = [
        start(host_rows_faults_worker, address, 2, process, 2, tmp_path, fault)
        for process in range(2)
    ]
    for process, job in enumerate(jobs):
        if fault.startswith("break") and process == 1:  # It has no error.
            job.kill()
            job.communicate()
            continue
        output = job.communicate(timeout=120)[0]
        assert job.returncode and FAULTS[fault] in output, output
        assert output.count("step") < STEPS
        if fault not in BEFORE_STEP_5:
            assert f"step {FAULTY_STEP} " in output


@pytest.mark.exhaustive
def test_jobs_that_are_killed_resume(tmp_path):
    """At 20 random moments; no checkpoint is lost, and the result has equal bits."""
    draw = np.random.default_rng(0)

    def start_job(directory):
        address = f"127.0.0.1:{free_port()}"
        return [
            start(host_rows_resuming_worker, address, 2, process, 2, file, directory)
            for process, file in enumerate([tmp_path / "0.npz", tmp_path / "1.npz"])
        ]

    def end_of(jobs):
        outputs = [job.communicate(timeout=300)[0] for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0], outputs
        return dict(np.load(tmp_path / "0.npz"))

    wanted = end_of(start_job(tmp_path / "whole"))
    last_saved = 0
    for _ in range(20):
        jobs = start_job(tmp_path / "killed")
        first_step = 0
        for line in jobs[0].stdout:
            if line.startswith("resumed"):
                first_step = int(line.split()[1])
            if line.startswith("step") and draw.random() < 0.3:
                break
        assert first_step >= last_saved
        last_saved = first_step
        victim = jobs[draw.integers(2)]
        victim.send_signal(signal.SIGKILL)
        for job in jobs:  # Whatever starts the job again ends the others.
            job.kill()
            job.communicate()
    check_equal(end_of(start_job(tmp_path / "killed")), wanted)

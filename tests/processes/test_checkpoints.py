"""Two real processes save, restore and export one model, each its own part."""

import numpy as np
import pytest
import safetensors.numpy

import tpu_embedding as te
from tests.processes.checkpoint_worker import STREAM
from tests.processes.test_processes import free_port, start


def start_job(num_processes, num_devices, work, directory, path):
    """Starts the processes of a job."""
    address = f"127.0.0.1:{free_port()}" if num_processes > 1 else "none"
    return [
        start(
            *(address, num_processes, process, num_devices, work, directory),
            path / f"{work}-{num_processes}-{process}.npz",
            module="tests.processes.checkpoint_worker",
        )
        for process in range(num_processes)
    ]


def run_job(num_processes, num_devices, work, directory, path):
    """Runs a job to its end; returns the values that its first process wrote."""
    for job in start_job(num_processes, num_devices, work, directory, path):
        output, _ = job.communicate(timeout=300)
        assert job.returncode == 0, output
    with np.load(path / f"{work}-{num_processes}-0.npz") as values:
        return dict(values)


@pytest.mark.full
def test_processes_save_and_restore_together(tmp_path):
    directory = tmp_path / "checkpoints"
    saved = run_job(2, 2, "save", directory, tmp_path)
    for num_processes, num_devices in ((1, 3), (2, 1)):
        restored = run_job(num_processes, num_devices, "restore", directory, tmp_path)
        assert set(restored) == set(saved)
        for name, value in saved.items():
            np.testing.assert_array_equal(restored[name], value)
        here, there = (
            arrays_of(where)
            for where in (f"{directory}-{num_processes}", directory / "2")
        )
        assert len(there[":ids"]) > 1
        for name, value in there.items():
            np.testing.assert_array_equal(here[name], value)
    check_damage_stops_all(directory, tmp_path)


def check_damage_stops_all(directory, path):
    """Only one of the processes verifies a chunk, and none waits for the other."""
    chunk = directory / "2" / "default" / "tables.sharded.values" / "c" / "0" / "0"
    data = bytearray(chunk.read_bytes())
    data[3] ^= 1
    chunk.write_bytes(data)
    outputs = []
    for job in start_job(2, 1, "restore", directory, path):
        outputs.append(job.communicate(timeout=100)[0])
        assert job.returncode != 0
    assert any("array tables.sharded.values of" in text for text in outputs)
    assert any("found damage; see its error" in text for text in outputs)


def arrays_of(directory):
    """Returns all arrays of the dynamic table of a checkpoint."""
    table = te.checkpoint.describe(directory).tables[STREAM]
    return {
        name: te.checkpoint.read_table(directory, STREAM, slot=name)
        for name in table.arrays
    }


@pytest.mark.full
def test_a_job_exports_the_tables_of_one_process(tmp_path):
    contents = []
    for num_processes, num_devices in ((1, 4), (2, 2)):
        directory = tmp_path / f"{num_processes}"
        run_job(num_processes, num_devices, "export", directory, tmp_path)
        paths = (path for path in directory.rglob("*") if path.is_file())
        contents.append({x.relative_to(directory): x.read_bytes() for x in paths})
    assert contents[0] == contents[1] != {}


@pytest.mark.exhaustive
def test_processes_import_together(tmp_path):
    generator = np.random.default_rng(0)
    arrays = {
        f"{table}{suffix}": generator.normal(size=(rows, 8)).astype(np.float32)
        for table, rows in {"sharded": 101, "replicated": 13}.items()
        for suffix in ("", "/momenta", "/velocities")
    }
    file = tmp_path / "tables.safetensors"
    safetensors.numpy.save_file(arrays, file)
    imported = run_job(2, 2, "import", file, tmp_path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(imported[name], array)

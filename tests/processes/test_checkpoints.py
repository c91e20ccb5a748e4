"""Two real processes save, restore and export one model, each its own part."""

import numpy as np
import pytest
import safetensors.numpy

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.processes import checkpoint_worker
from tests.processes.checkpoint_worker import SIZES, STREAM, export, make
from tests.processes.test_processes import run_job
from tpu_embedding.tables import line_exchange


@pytest.mark.full
def test_processes_export_save_and_restore_together(tmp_path, monkeypatch):
    monkeypatch.setattr(line_exchange, "_MIN_BLOCK_BYTES", 512)
    directory = tmp_path / "checkpoints"
    (saved, _), _ = run_job(checkpoint_worker, 2, tmp_path, "save", directory)
    check_exports(tmp_path)
    damage(directory / "1" / "default")
    (on_two, _), outputs = run_job(checkpoint_worker, 1, tmp_path, "restore", directory)
    # Only one of the processes verifies a chunk, and none waits for the other.
    assert any("array tables.sharded.values of" in text for text in outputs)
    assert any("found damage; see its error" in text for text in outputs)
    on_one = checkpoint_worker.run("restore", directory, mesh_of(3))
    there = arrays_of(directory / "2")
    assert len(there[":ids"]) > 1
    for num_processes, restored in enumerate((on_one, on_two), 1):
        assert set(restored) == set(saved)
        for name, value in saved.items():
            np.testing.assert_array_equal(restored[name], value)
        here = arrays_of(f"{directory}-{num_processes}")
        for name, value in there.items():
            np.testing.assert_array_equal(here[name], value)


def damage(directory):
    """Flips a bit of a chunk."""
    chunk = directory / "tables.sharded.values" / "c" / "0" / "0"
    data = bytearray(chunk.read_bytes())
    data[3] ^= 1
    chunk.write_bytes(data)


def check_exports(path):
    """Compares the tables that the job exported with those of one process."""
    sizes = SIZES | {STREAM: te.Dynamic(capacity=1000)}
    export(*make(sizes, 0, mesh_of(4)), path / "of_one")
    contents = [
        {x.relative_to(folder): x.read_bytes() for x in folder.rglob("*.*")}
        for folder in (path / "checkpoints-tables", path / "of_one")
    ]
    assert contents[0] == contents[1] != {}


def arrays_of(directory):
    """Returns all arrays of the dynamic table of a checkpoint."""
    table = te.checkpoint.describe(directory).tables[STREAM]
    return {
        name: te.checkpoint.read_table(directory, STREAM, slot=name)
        for name in table.arrays
    }


@pytest.mark.exhaustive
def test_processes_import_together(tmp_path):
    generator = np.random.default_rng(0)
    arrays = {
        f"{table}{suffix}": generator.normal(size=(rows, 8)).astype(np.float32)
        for table, rows in SIZES.items()
        for suffix in ("", "/momenta", "/velocities")
    }
    file = tmp_path / "tables.safetensors"
    safetensors.numpy.save_file(arrays, file)
    (imported, _), _ = run_job(checkpoint_worker, 2, tmp_path, "import", file)
    for name, array in arrays.items():
        np.testing.assert_array_equal(imported[name], array)

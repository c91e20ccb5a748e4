"""Two real processes export tables and deltas, which equal those of one process."""

import numpy as np
import pytest

import tpu_embedding as te
from tests.export.test_deltas import table_bytes
from tests.processes.test_processes import free_port, start


def run_job(num_processes, num_devices, *directories):
    address = f"127.0.0.1:{free_port()}"
    return [
        start(
            *(address, num_processes, process, num_devices, directory),
            module="tests.processes.delta_worker",
        )
        for process, directory in enumerate(directories)
    ]


@pytest.mark.full
def test_a_job_writes_the_deltas_of_one_process(tmp_path):
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    for job in (*run_job(1, 4, one), *run_job(2, 2, two, other)):
        output, _ = job.communicate(timeout=300)
        assert job.returncode == 0, output
    # The first process writes, so the second needs no common file system.
    assert not other.exists()
    for delta in ("first", "second"):
        alone, together = (te.export.read_delta(x / delta).tables for x in (one, two))
        names = {"sharded", "other", "replicated", "dynamic"}
        assert set(alone) == set(together) == names
        for name, rows in alone.items():
            for field, values in rows._asdict().items():
                np.testing.assert_array_equal(getattr(together[name], field), values)
        te.export.apply_delta(two / "base", two / delta)
    assert len(alone["other"].row_ids) == 7
    assert table_bytes(two / "base") == table_bytes(two / "later")
    assert table_bytes(two / "later") == table_bytes(one / "later")

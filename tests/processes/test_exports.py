"""Two real processes export tables, which equal those of one process."""

import pytest

from tests.processes.test_processes import free_port, start


def run_job(num_processes, num_devices, *directories):
    address = f"127.0.0.1:{free_port()}"
    return [
        start(
            *(address, num_processes, process, num_devices, directory),
            module="tests.processes.export_worker",
        )
        for process, directory in enumerate(directories)
    ]


def content_of(directory):
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {str(x.relative_to(directory)): x.read_bytes() for x in paths}


@pytest.mark.full
def test_a_job_writes_the_tables_of_one_process(tmp_path):
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    for job in (*run_job(1, 4, one), *run_job(2, 2, two, other)):
        output, _ = job.communicate(timeout=300)
        assert job.returncode == 0, output
    # The first process writes, so the second needs no common file system.
    assert not other.exists()
    assert content_of(two) == content_of(one) != {}

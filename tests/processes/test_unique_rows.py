"""Two real processes look up unique rows of their own samples, as one process does."""

import numpy as np
import pytest

from tests.processes.test_processes import free_port, start


@pytest.mark.full
def test_unique_rows_of_own_samples_equal_those_of_one_process(tmp_path):
    address, module = f"127.0.0.1:{free_port()}", "tests.processes.unique_rows_worker"
    jobs = [
        start(address, 2, 0, 2, tmp_path / "two.npz", module=module),
        start(address, 2, 1, 2, tmp_path / "other.npz", module=module),
        start("none", 1, 0, 4, tmp_path / "one.npz", module=module),
    ]
    for job in jobs:
        output, _ = job.communicate(timeout=300)
        assert job.returncode == 0, output
    two, other, one = (
        dict(np.load(tmp_path / f"{name}.npz")) for name in ("two", "other", "one")
    )
    # Processes agree on the size of buffers, which grow with the ids of one of them.
    widths = [job.pop("widths").tolist() for job in (two, other, one)]
    assert widths[0] == widths[1]
    assert widths[0][0] < widths[0][-1]
    for name, wanted in one.items():
        # The same program on the same number of devices; gloo may sum in another order.
        np.testing.assert_allclose(two[name], wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(other[name], two[name])

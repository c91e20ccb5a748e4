"""Two real processes train on dynamic tables, as one process does."""

import numpy as np
import pytest

from tests.processes.test_processes import free_port, start


@pytest.mark.full
def test_two_processes_give_new_ids_the_rows_of_one(tmp_path):
    address, module = f"127.0.0.1:{free_port()}", "tests.processes.dynamic_worker"
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
    assert two.keys() == other.keys() == one.keys()
    assert one["evictions"] > 0
    for name, wanted in one.items():
        np.testing.assert_array_equal(other[name], two[name])
        if wanted.dtype.kind in "iu":
            np.testing.assert_array_equal(two[name], wanted)
        else:
            # The gloo library may sum in another order.
            np.testing.assert_allclose(two[name], wanted, rtol=1e-5, atol=1e-6)

"""Two real processes over gloo compute what one process computes, on any placement."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]


def start(*arguments, module="tests.processes.worker"):
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment_of(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def environment_of(num_devices=None):
    """Returns the environment of a process with so many emulated devices."""
    # The package of this checkout, even if another one is installed.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    devices = {} if num_devices is None else {"JAX_NUM_CPU_DEVICES": str(num_devices)}
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **devices}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.full
def test_two_processes_equal_one(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    jobs = [
        start(address, 2, 0, 2, tmp_path / "two.npz"),
        start(address, 2, 1, 2, tmp_path / "other.npz"),
        start("none", 1, 0, 4, tmp_path / "one.npz"),
    ]
    for job in jobs:
        output, _ = job.communicate(timeout=300)
        assert job.returncode == 0, output
    names = ("two.npz", "other.npz", "one.npz")
    two, other, one = (np.load(tmp_path / name) for name in names)
    assert two["devices"] == one["devices"] == 4
    assert set(two) == set(other) == set(one)
    assert two["verdict of process"] == other["verdict of process"] == 0
    copies = [name for name in one if "copies of" in name]
    assert len(copies) == 2 * (2 + 1)  # grouped: two shards; replicated: one
    for name in copies:
        # All devices of both processes hold the same bits.
        held = np.concatenate([two[name], other[name]])
        assert held.shape[0] == one[name].shape[0] >= 2
        np.testing.assert_array_equal(held, np.broadcast_to(held[0], held.shape))
    for name in set(one) - {"devices"} - set(copies):
        # The same program on the same number of devices; gloo may sum in another order.
        np.testing.assert_allclose(two[name], one[name], rtol=1e-5, atol=1e-6)

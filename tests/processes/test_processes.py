"""Two real processes over gloo compute what one process computes."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]


def start(*arguments):
    command = [sys.executable, "-m", "tests.processes.worker", *map(str, arguments)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_two_processes_equal_one(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    jobs = [
        start(address, 2, 0, 2, tmp_path / "two.npz"),
        start(address, 2, 1, 2, tmp_path / "unused.npz"),
        start("none", 1, 0, 4, tmp_path / "one.npz"),
    ]
    for job in jobs:
        output, _ = job.communicate(timeout=300)
        assert job.returncode == 0, output
    two, one = (np.load(tmp_path / name) for name in ("two.npz", "one.npz"))
    assert two["devices"] == one["devices"] == 4
    # The same program on the same number of devices; gloo may sum in another order.
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=1e-6)
    np.testing.assert_allclose(two["items"], one["items"], rtol=1e-5, atol=1e-6)

"""Two real processes over gloo compute what one process computes."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import mesh_of
from tests.lookup.placements import mesh_of_shape
from tests.processes import dynamic_worker, unique_ids_worker, worker

ROOT = pathlib.Path(__file__).parents[2]


def start(module, *arguments):
    """Starts a worker as a process."""
    return subprocess.Popen(
        [sys.executable, "-m", module.__name__, *map(str, arguments)],
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


def run_job(module, num_devices, directory, *arguments, num_processes=2):
    """Runs the processes of a worker; returns what each one writes and prints."""
    address = f"127.0.0.1:{free_port()}"
    paths = [directory / f"{i}.npz" for i in range(num_processes)]
    jobs = [
        start(module, address, num_processes, process, num_devices, path, *arguments)
        for process, path in enumerate(paths)
    ]
    outputs = []
    for job in jobs:
        outputs.append(job.communicate(timeout=300)[0])
        assert job.returncode == 0, outputs
    return [dict(np.load(path)) for path in paths], outputs


def check_close(two, one):
    """The same program on as many devices; gloo may sum in another order."""
    assert set(two) == set(one)
    for name, wanted in one.items():
        wanted = np.asarray(wanted)
        if wanted.dtype.kind in "iu":
            np.testing.assert_array_equal(two[name], wanted)
        else:
            np.testing.assert_allclose(two[name], wanted, rtol=1e-5, atol=1e-6)


def test_two_processes_equal_one_on_any_placement(tmp_path):
    (two, other), _ = run_job(worker, 2, tmp_path)
    one = worker.train(mesh_of_shape("2x2"))
    copies = [name for name in one if "copies of" in name]
    assert len(copies) == 2 + 1  # grouped: two shards; replicated: one
    for name in copies:
        # All devices of both processes hold the same bits.
        held = np.concatenate([two.pop(name), other[name]])
        assert held.shape[0] == len(one.pop(name)) >= 2
        np.testing.assert_array_equal(held, np.broadcast_to(held[0], held.shape))
    check_close(two, one)


@pytest.mark.full
@pytest.mark.parametrize("module", [dynamic_worker, unique_ids_worker])
def test_two_processes_of_own_samples_equal_one(module, tmp_path):
    (two, other), _ = run_job(module, 2, tmp_path)
    one = module.train(mesh_of(4))
    if module is unique_ids_worker:
        # Processes agree on the size of buffers, which grow with the ids of one.
        widths = [np.asarray(job.pop("widths")).tolist() for job in (two, other, one)]
        assert widths[0] == widths[1]
        assert widths[0][0] < widths[0][-1]
    else:
        assert one["evictions"] > 0
    for name, value in two.items():
        np.testing.assert_array_equal(other[name], value)
    check_close(two, one)

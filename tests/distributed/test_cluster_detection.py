"""The place of a process: options win over the environment, and must be complete."""

import pytest
from jax._src import cloud_tpu_init

from tpu_embedding.distributed.cluster_detection import Place, StartError, find_place

SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "node[007-009],other",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "4",
}
GKE = {
    "TPU_WORKER_HOSTNAMES": "localhost,host-1,host-2",
    "TPU_WORKER_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT", *SLURM, *GKE):
        monkeypatch.setenv(name, "")  # which is put back, if code sets it, too
        monkeypatch.delenv(name)


def find(*options):
    return find_place(*options, timeout_seconds=1.0)


def place(coordinator, num_processes, process_id, devices=None):
    return Place(
        coordinator=coordinator,
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=devices,
    )


CASES = {
    "nothing": ((None, None, None), {}, None),
    "one_process": ((None, 1, None), SLURM, None),
    "one_process_with_number": (("host", 1, 0), {}, None),
    "all_options": (("host:1234", 4, 3), {}, place("host:1234", 4, 3)),
    "default_port": (("host", 2, 0), {}, place("host:8476", 2, 0)),
    "ipv6": (("[::1]:99", 2, 0), {}, place("[::1]:99", 2, 0)),
    "ipv6_without_port": (("[::1]", 2, 0), {}, place("[::1]:8476", 2, 0)),
    "slurm": ((None, None, None), SLURM, place("node007:62344", 4, 2, (0,))),
    "options_win": (("host", None, 3), SLURM, place("host:8476", 4, 3, (0,))),
    "all_options_win": (("host", 2, 1), SLURM, place("host:8476", 2, 1)),
    "one_task": ((None, None, None), SLURM | {"SLURM_NTASKS": "1"}, None),
}


@pytest.mark.parametrize(
    ("options", "environment", "expected"), CASES.values(), ids=CASES.keys()
)
def test_place(options, environment, expected, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find(*options) == expected


def test_gke_with_two_slices(monkeypatch):
    for name, value in GKE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cloud_tpu_init, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(
        "jax._src.clusters.cloud_tpu_cluster.running_in_cloud_tpu_vm", True
    )
    assert find(None, None, None) == place("localhost:8476", 6, 4)


def test_address():
    assert place("[::1]:99", 2, 0).address == ("::1", 99)
    assert place("host:8476", 2, 0).address == ("host", 8476)


WRONG = {
    "id_too_large": (("h", 4, 4), "--process-id must be below --num-processes, 4"),
    "id_negative": (("h", 4, -1), "--process-id must be at least 0, got -1"),
    "id_of_one_process": ((None, 1, 2), "--process-id must be below"),
    "no_processes": (("h", 0, 0), "--num-processes must be at least 1, got 0"),
    "coordinator_alone": (
        ("h", None, None),
        "--coordinator must be given together with --num-processes and --process-id",
    ),
    "id_alone": (
        (None, None, 1),
        "--process-id must be given together with --coordinator and --num-processes",
    ),
    "no_id": (("h", 4, None), "given together with --process-id"),
    "port": (("h:x", 4, 1), "--coordinator must be HOST or HOST:PORT .* got 'h:x'"),
    "port_too_large": (("h:70000", 4, 1), "port from 1 to 65535"),
    "no_host": ((":8476", 4, 1), "HOST or HOST:PORT"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_options(options, message):
    with pytest.raises(StartError, match=message):
        find(*options)


def test_an_unreadable_environment_names_the_way_out(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_PROCID", "many")
    with pytest.raises(StartError, match="ValueError: .*'many'.*--num-processes 1"):
        find(None, None, None)

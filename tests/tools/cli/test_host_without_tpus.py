"""On a machine without TPUs, libtpu prints nothing; a TPU VM is left as it is."""

import os
import subprocess
import sys

import pytest

from tpu_embedding.tools.cli import host_without_tpus
from tpu_embedding.tools.cli.host_without_tpus import describe_host_without_tpus

NAMES = ("TPU_WORKER_HOSTNAMES", "TPU_HOST_BOUNDS")


@pytest.fixture
def host(monkeypatch):
    """Sets what JAX and the file system say of the host's chips."""

    def make(*, skips_metadata, device_files=()):
        # Removed after the test, also where the test did not set them.
        for name in NAMES:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
        if skips_metadata:
            monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
        monkeypatch.setattr(
            host_without_tpus, "tpu_device_files", lambda: list(device_files)
        )

    return make


def described():
    return [os.environ.get(name) for name in NAMES]


def test_a_host_without_chips_is_described(host):
    host(skips_metadata=True)
    describe_host_without_tpus()
    assert described() == ["localhost", "1,1,1"]


@pytest.mark.parametrize(
    "chips",
    [
        {"skips_metadata": False},
        {"skips_metadata": False, "device_files": ["/dev/vfio/0"]},
        # A user may have set the variable on a TPU VM.
        {"skips_metadata": True, "device_files": ["/dev/accel0"]},
    ],
    ids=["chips on the bus", "chips", "chips, and the variable by hand"],
)
def test_a_host_with_chips_is_left_alone(host, chips):
    host(**chips)
    describe_host_without_tpus()
    assert described() == [None, None]


def test_values_of_the_user_stay(host, monkeypatch):
    host(skips_metadata=True)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "one,two")
    describe_host_without_tpus()
    assert described() == ["one,two", "1,1,1"]


@pytest.mark.tpu_compiler
def test_libtpu_prints_nothing():
    """A process that looks for devices, as commands do, prints nothing on stderr."""
    pytest.importorskip("libtpu")
    if host_without_tpus.tpu_device_files():
        pytest.skip("this host has TPUs")
    code = """
import jax
from tpu_embedding.tools.cli.host_without_tpus import describe_host_without_tpus
describe_host_without_tpus()
print(jax.default_backend())
"""
    unset = {"JAX_PLATFORMS", "JAX_PLATFORM_NAME", *NAMES}
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""

"""On a machine without TPUs, libtpu prints nothing; a TPU VM is left as it is."""

import os
import subprocess
import sys

import pytest

from tests.tiers import with_ids
from tpu_embedding import host_without_tpus
from tpu_embedding.host_without_tpus import describe_host_without_tpus

NAMES = ("TPU_WORKER_HOSTNAMES", "TPU_HOST_BOUNDS")
ONE_HOST, LEFT_ALONE = ["localhost", "1,1,1"], [None, None]
GOOGLE, OTHER = "0x1ae0", "0x8086"
NETWORK, STORAGE, CHIP = "0x020000", "0x010802", "0xff0000"


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Sets what the file system says of the host's devices."""

    def make(devices=(), device_files=()):
        # Removed after the test, also where the test did not set them.
        for name in NAMES:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        for number, (vendor, kind) in enumerate(devices):
            folder = tmp_path / f"0000:00:0{number}.0"
            folder.mkdir()
            (folder / "vendor").write_text(f"{vendor}\n")
            (folder / "class").write_text(f"{kind}\n")
        monkeypatch.setattr(host_without_tpus, "_PCI_DEVICES", str(tmp_path))
        monkeypatch.setattr(
            host_without_tpus, "tpu_device_files", lambda: list(device_files)
        )

    return make


def described():
    return [os.environ.get(name) for name in NAMES]


HOSTS = {
    "no devices": ({}, ONE_HOST),
    "a machine of Google without chips": (
        {"devices": [(GOOGLE, NETWORK), (GOOGLE, STORAGE), (OTHER, CHIP)]},
        ONE_HOST,
    ),
    "chips on the bus": ({"devices": [(OTHER, NETWORK), (GOOGLE, CHIP)]}, LEFT_ALONE),
    "files of chips": ({"device_files": ["/dev/accel0"]}, LEFT_ALONE),
}


@pytest.mark.parametrize(("devices", "expected"), with_ids(HOSTS))
def test_only_a_host_without_chips_is_described(host, devices, expected, monkeypatch):
    host(**devices)
    describe_host_without_tpus()
    assert described() == expected
    # Values of the user stay.
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "one,two")
    describe_host_without_tpus()
    assert described()[0] == "one,two"


@pytest.mark.tpu_compiler
@pytest.mark.full
def test_libtpu_prints_nothing():
    """A user's script that looks for devices prints nothing on stderr."""
    pytest.importorskip("libtpu")
    if host_without_tpus.tpu_device_files():
        pytest.skip("this host has TPUs")
    code = "import tpu_embedding, jax; print(jax.default_backend())"
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

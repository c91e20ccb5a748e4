"""Starts that must fail do so in time, with the address and what to check."""

import contextlib
import socket

import pytest

from tests.processes.test_processes import free_port
from tpu_embedding import distributed
from tpu_embedding.distributed import starting
from tpu_embedding.distributed.cluster_detection import StartError
from tpu_embedding.distributed.job import Job
from tpu_embedding.distributed.store import MemoryStore


def test_an_unreachable_coordinator():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(StartError) as error:
        distributed.start(address, 2, 1, timeout_seconds=0.3)
    message = str(error.value)
    assert message.startswith(f"Process 1 cannot reach the coordinator {address}")
    assert "within 0.3 s" in message and "firewall" in message


def test_an_unknown_host():
    with pytest.raises(StartError, match=r"coordinator no-such-host\.invalid:8476"):
        distributed.start("no-such-host.invalid", 2, 1, timeout_seconds=0.3)


def test_a_port_in_use():
    with contextlib.closing(socket.socket()) as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartError, match=f"listen on port {port} of 127.0.0.1"):
            distributed.start(f"127.0.0.1:{port}", 2, 0)


def test_a_wrong_heartbeat():
    with pytest.raises(StartError, match="--heartbeat must be at least 1 s, got 0"):
        distributed.start("host", 2, 0, heartbeat_seconds=0)


def test_a_process_alone_starts_nothing():
    job = distributed.start(num_processes=1)
    assert job.num_processes == 1
    with pytest.raises(ZeroDivisionError), distributed.ending_together(job):
        raise ZeroDivisionError


def test_a_failure_is_not_noticed_before_the_acts_for_it_are_known(monkeypatch):
    for name in ("hold_roll_call", "_initialize"):
        monkeypatch.setattr(starting, name, lambda *_: None)
    monkeypatch.setattr(starting, "current_job", lambda: Job(0, 2, MemoryStore()))
    acts = []
    monkeypatch.setattr(starting, "watch_job", lambda job: acts.extend(job.final_acts))
    distributed.start("127.0.0.1", 2, 0, final_acts=[print])
    assert acts == [print]

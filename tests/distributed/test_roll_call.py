"""Two processes with one id, or two jobs on one port, are refused before JAX starts."""

import concurrent.futures
import contextlib
import os
import platform
import socket
import time

import pytest

from tests.processes.test_processes import free_port
from tests.tiers import quick_cases, with_ids
from tpu_embedding.distributed import roll_call
from tpu_embedding.distributed.cluster_detection import Place, StartError
from tpu_embedding.distributed.roll_call import answer_roll_call, hold_roll_call

OWN = f"host {platform.node()} (pid {os.getpid()})"


@pytest.fixture(autouse=True)
def no_wait_for_late_processes(monkeypatch):
    monkeypatch.setattr(roll_call, "TELL_SECONDS", 1.0)
    monkeypatch.setattr(roll_call, "RUNNING_SECONDS", 0.5)
    monkeypatch.setattr(roll_call, "GRACE_SECONDS", 30.0)


def call(places, timeout_seconds=60.0):
    """Runs each process in a thread; returns its error, or None if the job starts."""

    def start(place):
        run = answer_roll_call if place.process_id else hold_roll_call
        try:
            return run(place, timeout_seconds)
        except StartError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(start, places))


def places(*process_ids, num_processes=None, port=None):
    address = f"127.0.0.1:{port or free_port()}"
    count = num_processes or len(process_ids)
    return [
        Place(coordinator=address, num_processes=count, process_id=i)
        for i in process_ids
    ]


def test_a_job_whose_processes_have_ids_of_their_own_starts():
    assert call(places(2, 0, 1, 3)) == [None] * 4


@pytest.mark.parametrize(
    "ids",
    quick_cases(
        with_ids({"011": [0, 1, 1], "1013": [1, 0, 1, 3], "330": [3, 3, 0]}), "011"
    ),
)
def test_an_id_that_two_processes_have(ids):
    """The id of another one is then missing, so the job waits for it."""
    given = places(*ids, num_processes=4)
    errors = call(given)
    assert errors == [errors[0]] * len(ids)
    (twice,) = {i for i in ids if ids.count(i) == 2}
    assert errors[0].startswith(
        f"Process {twice} of the job at {given[0].coordinator} was started twice: on "
        f"{OWN} and on {OWN}."
    )


@pytest.mark.full
def test_jobs_of_another_size_on_one_port():
    given = places(0, num_processes=2)
    other = places(1, num_processes=4, port=given[0].address[1])
    errors = call([*given, *other])
    assert errors[0] == errors[1]
    message = f"must have the same --num-processes, got 2 on {OWN} and 4 on {OWN}"
    assert message in errors[0]


@pytest.mark.full
def test_processes_that_do_not_come_are_named():
    errors = call(places(0, 2, num_processes=4), timeout_seconds=5.0)
    assert errors[0] == errors[1]
    assert "Not all of the 4 processes" in errors[0]
    assert "within 5 s; missing: 1, 3." in errors[0]


def test_a_process_0_that_no_other_reaches():
    (error,) = call(places(0, num_processes=2), timeout_seconds=0.0)
    assert error.endswith("on another host than --coordinator names.")


@pytest.mark.parametrize(
    "greeting",
    quick_cases(
        with_ids(
            {"nothing": b"", "HTTP/2": b"\0\0\x12\4\0\0\0\0\0", "JSON": b'{"a": 1}\n'}
        ),
        "JSON",
    ),
)
def test_a_port_on_which_something_else_runs(greeting):
    """As JAX's coordinator of a job that runs."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        (place,) = places(1, num_processes=2, port=server.getsockname()[1])
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            error = pool.submit(call, [place])
            while not error.done():
                server.settimeout(0.1)
                with contextlib.suppress(TimeoutError):
                    connection, _ = server.accept()
                    connection.sendall(greeting)
                    connection.close()
            (message,) = error.result()
    assert message.startswith(f"The coordinator {place.coordinator} already runs a job")
    assert f"process 1 on {OWN} cannot join" in message


def test_a_process_whose_time_is_over_before_that_of_process_0(monkeypatch):
    """Process 0 may have started later, and says nothing while it waits for others."""
    monkeypatch.setattr(roll_call, "GRACE_SECONDS", 0.0)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        (place,) = places(1, num_processes=3, port=server.getsockname()[1])
        (message,) = call([place], timeout_seconds=0.5)
    assert message == (
        f"Process 0 has not started the job at {place.coordinator} within 0.5 s of the "
        "start of process 1: not all 3 processes have come; see its log."
    )


@pytest.mark.full
def test_a_process_that_came_and_ended_is_missing():
    first, second, third = places(0, 1, 2)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        held = pool.submit(call, [first], 3.0)
        with roll_call.connect(second, 30, time.monotonic() + 30) as connection:
            connection.sendall(CLAIM_OF_PROCESS_1)
        (error,) = call([third])
        assert held.result() == [error]
    assert "within 3 s; missing: 1." in error


def test_a_process_that_ended_may_come_again():
    """Its parent may have started it again. Other programs may look at the port."""
    first, second, third = places(0, 1, 2)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        held = pool.submit(call, [first])
        deadline = time.monotonic() + 30
        for hello in (b"", b"GET / HTTP/1.1\r\n\r\n", CLAIM_OF_PROCESS_1):
            with roll_call.connect(second, 30, deadline) as connection:
                connection.sendall(hello)
        assert call([second, third]) == [None, None]
        assert held.result() == [None]


CLAIM_OF_PROCESS_1 = b'{"process": 1, "num_processes": 3, "host": "a", "pid": 7}\n'

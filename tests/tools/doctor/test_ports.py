"""Ports between hosts: one listens, the others connect, and nothing waits for ever."""

import socket
import threading

import pytest

from tpu_embedding.tools.doctor.ports import check_hosts, check_loopback


@pytest.fixture
def port():
    """Returns a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_loopback(port):
    (finding,) = check_loopback(port)
    assert finding.status == "ok" and str(port) in finding.text


def test_a_port_in_use(port):
    with socket.create_server(("127.0.0.1", port)):
        (finding,) = check_loopback(port)
    assert finding.status == "failed" and "in use" in finding.text
    assert f"ss -ltnp sport = :{port}" in (finding.way_out or "")


def run_hosts(hosts, port, indices, seconds=30.0):
    """Runs the check of several hosts at the same time; returns their findings."""
    results = {}

    def run(index):
        results[index] = check_hosts(hosts, port, index=index, seconds=seconds)

    threads = [threading.Thread(target=run, args=(index,)) for index in indices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results


def test_all_hosts_reach_the_first(port):
    hosts = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    results = run_hosts(hosts, port, [0, 1, 2])
    assert [f.status for f in results[0]] == ["ok", "ok"]
    assert "127.0.0.2 reached port" in results[0][0].text
    for index in (1, 2):
        (finding,) = results[index]
        assert finding.status == "ok" and "127.0.0.1" in finding.text


def test_a_host_that_does_not_connect(port):
    hosts = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
    # The second host is quick; the deadline is what the third one is given.
    results = run_hosts(hosts, port, [0, 1], seconds=1.0)
    statuses = {f.text.split()[0]: f.status for f in results[0]}
    assert statuses == {"127.0.0.2": "ok", "127.0.0.3": "failed"}
    assert "firewall" in (results[0][1].way_out or "")


def test_an_unreachable_port(port):
    (finding,) = check_hosts(("127.0.0.1", "b"), port, index=1, seconds=0.5)
    assert finding.status == "failed"
    assert f"Port {port} of 127.0.0.1 is not reachable" in finding.text
    assert "Start the doctor on 127.0.0.1" in (finding.way_out or "")


def test_a_port_behind_a_firewall(port, monkeypatch):
    def dropped(address, timeout):
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", dropped)
    (finding,) = check_hosts(("127.0.0.1", "b"), port, index=1, seconds=0.3)
    assert finding.status == "failed" and "timed out" in finding.text
    assert f"tcp:{port}" in (finding.way_out or "")
    assert "gcloud compute firewall-rules list" in (finding.way_out or "")


def test_another_program_on_the_port(port):
    def answer(server):
        connection, _ = server.accept()
        with connection:
            connection.recv(64)
            connection.sendall(b"SSH-2.0\r\n")

    with socket.create_server(("127.0.0.1", port)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        (finding,) = check_hosts(("127.0.0.1", "b"), port, index=1, seconds=30)
        thread.join(timeout=30)
    assert finding.status == "failed" and "another program answers" in finding.text


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 100])
def test_strangers_do_not_count_as_hosts(port, greeting):
    def connect():
        for _ in range(100):
            try:
                with socket.create_connection(("127.0.0.1", port), 1) as connection:
                    connection.sendall(greeting)
                return
            except ConnectionRefusedError:
                threading.Event().wait(0.01)

    thread = threading.Thread(target=connect)
    thread.start()
    findings = check_hosts(("127.0.0.1", "b"), port, index=0, seconds=1.0)
    thread.join(timeout=30)
    assert [finding.status for finding in findings] == ["failed"]


def test_an_unknown_first_host(port):
    # A name that no resolver knows (RFC 6761).
    (finding,) = check_hosts(("gone.invalid", "b"), port, index=1, seconds=30)
    assert finding.status == "failed" and "gone.invalid is not known" in finding.text


def test_the_place_of_this_host_is_found(port):
    # 192.0.2.1 belongs to documentation (RFC 5737), and to no host.
    (finding,) = check_hosts(("192.0.2.1", "gone.invalid"), port, seconds=0.1)
    assert finding.status == "failed" and "None of the hosts" in finding.text
    (finding,) = check_hosts(("127.0.0.1", "192.0.2.1"), port, seconds=0.1)
    assert "192.0.2.1 did not connect" in finding.text

"""Checks that hosts reach the coordinator's port.

`jax.distributed` needs one port, which the first host opens and all others connect to.
Here the first host listens, and the others connect. Every wait has a deadline.
"""

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Final

from tpu_embedding.tools.doctor.findings import Finding

DEFAULT_PORT: Final = 8476
"""Port of JAX's coordinator. The `default` network's firewall rule admits it."""

_GREETING: Final = b"tpu-embedding doctor "
_MAX_GREETING: Final = 64
HOST_SECONDS: Final = 60.0
"""Deadline for all hosts to meet."""

_RETRY_SECONDS: Final = 0.2
_CONNECT_SECONDS: Final = 5.0

_FIREWALL: Final = (
    "Look at the firewall rules of the network: gcloud compute firewall-rules list. A "
    "rule must admit tcp:{port} between the hosts, as default-allow-internal does."
)


def check_loopback(port: int) -> list[Finding]:
    """Checks that this host can open the port, and connect to it."""
    listener, finding = _listen("127.0.0.1", port)
    if listener is None:
        return [finding]
    with listener:
        try:
            with socket.create_connection(("127.0.0.1", port), _CONNECT_SECONDS):
                pass
        except OSError as error:
            text = f"This host cannot connect to its own port {port}: {_text(error)}."
            way_out = "Look at the packet filter of the host: sudo iptables -L."
            return [Finding(check="port", status="failed", text=text, way_out=way_out)]
    text = f"Port {port} is free, and reachable on this host. --hosts checks others."
    return [Finding(check="port", status="ok", text=text)]


def check_hosts(
    hosts: Sequence[str],
    port: int,
    *,
    index: int | None = None,
    seconds: float | None = None,
) -> list[Finding]:
    """Checks the port between hosts; all of them run it at about the same time.

    Args:
      hosts: names or addresses, the coordinator first, alike on all hosts.
      port: that the coordinator opens.
      index: of this host among them; None: the one that is an address of this host.
      seconds: deadline for all; None: `HOST_SECONDS`.
    """
    seconds = HOST_SECONDS if seconds is None else seconds
    if index is None:
        index = next((i for i, host in enumerate(hosts) if _is_local(host)), None)
    if index is None:
        text = f"None of the hosts {', '.join(hosts)} is this one."
        way_out = "Give its name or address in --hosts, or its place by --host-index."
        return [Finding(check="port", status="failed", text=text, way_out=way_out)]
    if index == 0:
        return _check_as_first(hosts, port, seconds)
    return [_check_as_other(hosts[0], port, index, seconds)]


def _check_as_first(hosts: Sequence[str], port: int, seconds: float) -> list[Finding]:
    """Waits until all other hosts have connected."""
    listener, finding = _listen("", port)
    if listener is None:
        return [finding]
    missing = set(range(1, len(hosts)))
    end = time.monotonic() + seconds
    with listener:
        while missing and (remaining := end - time.monotonic()) > 0:
            listener.settimeout(remaining)
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    missing.discard(_greeted(connection, min(remaining, 5.0)))
    findings = []
    for i, host in enumerate(hosts[1:], 1):
        if i in missing:
            text = f"{host} did not connect to port {port} within {seconds:g} s."
            way_out = "Start the doctor there with the same --hosts. "
            way_out += _FIREWALL.format(port=port)
            finding = Finding(check="port", status="failed", text=text, way_out=way_out)
        else:
            text = f"{host} reached port {port} of this host."
            finding = Finding(check="port", status="ok", text=text)
        findings.append(finding)
    return findings


def _greeted(connection: socket.socket, seconds: float) -> int:
    """Returns the index of the host that connected, after answering; -1: no host."""
    connection.settimeout(seconds)
    received = b""
    try:
        while not received.endswith(b"\n") and len(received) < _MAX_GREETING:
            part = connection.recv(_MAX_GREETING)
            if not part:
                return -1
            received += part
        if not received.startswith(_GREETING):
            return -1
        connection.sendall(received)
        return int(received[len(_GREETING) :])
    except (OSError, ValueError):
        return -1


def _check_as_other(first: str, port: int, index: int, seconds: float) -> Finding:
    """Connects to the first host until it answers or time runs out."""
    end = time.monotonic() + seconds
    greeting = b"%s%d\n" % (_GREETING, index)
    problem: OSError | None = None
    while (remaining := end - time.monotonic()) > 0:
        try:
            with socket.create_connection(
                (first, port), min(remaining, _CONNECT_SECONDS)
            ) as connection:
                connection.settimeout(min(remaining, _CONNECT_SECONDS))
                connection.sendall(greeting)
                answer = connection.recv(_MAX_GREETING)
            if answer == greeting:
                text = f"This host reached port {port} of {first}."
                return Finding(check="port", status="ok", text=text)
            text = f"Port {port} of {first} is open, but another program answers."
            way_out = "Give another --port on all hosts, or end that program."
            return Finding(check="port", status="failed", text=text, way_out=way_out)
        except socket.gaierror as error:
            text = f"The host {first} is not known: {_text(error)}."
            way_out = (
                "Use internal addresses, or names of the same network, in --hosts."
            )
            return Finding(check="port", status="failed", text=text, way_out=way_out)
        except OSError as error:
            problem = error
            # The first host may start later: wait, and try again.
            threading.Event().wait(min(_RETRY_SECONDS, max(0.0, remaining)))
    return _unreachable(first, port, seconds, problem)


def _unreachable(
    first: str, port: int, seconds: float, problem: OSError | None
) -> Finding:
    reason = "no answer" if problem is None else _text(problem)
    way_out = _FIREWALL.format(port=port)
    if isinstance(problem, ConnectionRefusedError):
        way_out = f"Start the doctor on {first} with the same --hosts. Nothing listens "
        way_out += "there, though the network admits the port."
    return Finding(
        check="port",
        status="failed",
        text=f"Port {port} of {first} is not reachable from this host within "
        f"{seconds:g} s: {reason}.",
        way_out=way_out,
    )


def _listen(address: str, port: int) -> tuple[socket.socket | None, Finding]:
    """Opens a port; returns a finding that says why if it cannot."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen()
    except OSError as error:
        listener.close()
        text = f"This host cannot open port {port}: {_text(error)}."
        way_out = "Give another --port on all hosts."
        if error.errno == errno.EADDRINUSE:
            way_out = (
                f"End the process that has it (ss -ltnp sport = :{port}), or give "
            )
            way_out += "another --port on all hosts."
        return None, Finding(check="port", status="failed", text=text, way_out=way_out)
    return listener, Finding(check="port", status="ok", text=f"Port {port} is open.")


def _is_local(host: str) -> bool:
    """Returns True if a name is one of this host: its address can be bound here."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return True
    return False


def _text(error: OSError) -> str:
    return error.strerror or (os.strerror(error.errno) if error.errno else str(error))

"""The roll call before a job: who claims which process, on which host.

JAX's coordinator aborts the running members of a job when a second process comes with
the id of one. So process 0 first listens on the coordinator's port itself, and JAX
starts once each id was claimed by one process. A process that meets JAX's coordinator
in place of the roll call has come to a job that already runs.
"""

import contextlib
import dataclasses
import errno
import json
import os
import platform
import socket
import time
from typing import Any, Final

from tpu_embedding.distributed.cluster_detection import Place, StartError

RUNNING_SECONDS: Final = 30.0
"""Time in which a job that runs on the port may end: a restart may come too early."""

TELL_SECONDS: Final = 20.0
"""Time in which process 0 tells late processes why the job does not start."""

GRACE_SECONDS: Final = 5.0
"""Others wait longer for the answer than process 0 for the claims, which it names."""

_MAX_BYTES: Final = 4096
_RETRY_SECONDS: Final = 0.2
_HELLO_SECONDS: Final = 2.0
"""Longest wait for the claim of a connection; others than processes may connect."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """The claim of one process to its place.

    Attributes:
      process: number of the process.
      num_processes: processes of the job, as its command says.
      host: name of its host.
      pid: number of the process at the operating system of its host.
    """

    process: int
    num_processes: int
    host: str = dataclasses.field(default_factory=platform.node)
    pid: int = dataclasses.field(default_factory=os.getpid)

    @property
    def owner(self) -> str:
        """Host and number of the process, for messages."""
        return f"host {self.host} (pid {self.pid})"


def hold_roll_call(place: Place, timeout_seconds: float) -> None:
    """Waits in process 0 until each process has claimed its place.

    Raises:
      StartError: if the port is in use, two processes claim one place other than 0,
        they disagree on their number, or some do not come in time.
    """
    own = Claim(process=0, num_processes=place.num_processes)
    deadline = time.monotonic() + timeout_seconds
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(place))
        present = _Present(place, own, stack)
        problem = None
        while problem is None and not present.is_complete:
            if time.monotonic() > deadline:
                problem = present.absence(timeout_seconds)
                break
            problem = present.admit(listener)
            present.forget_ended()
        if problem is not None:
            present.answer(problem)
            end = time.monotonic() + TELL_SECONDS
            while not present.is_complete and time.monotonic() < end:
                present.admit(listener)
                present.answer(problem)
            raise StartError(problem)
        # Those who are told then connect to JAX's coordinator, not to this listener.
        listener.close()
        present.answer(None)


def _listen(place: Place) -> socket.socket:
    """Listens on the coordinator's port, on all addresses of this host."""
    host, port = place.address
    options: list[dict[str, Any]] = [{"family": socket.AF_INET}]
    if socket.has_dualstack_ipv6():
        options.insert(0, {"family": socket.AF_INET6, "dualstack_ipv6": True})
    code = None
    for each in options:
        try:
            return socket.create_server(("", port), backlog=1024, **each)
        except OSError as error:
            code = code or error.errno or errno.EADDRINUSE
            if code == errno.EADDRINUSE:
                break  # Other errors may be those of a host without IPv6.
    raise StartError(
        f"Process 0 must listen on port {port} of {host}, as --coordinator "
        f"says, but cannot: {os.strerror(code or 0)}. End the program that uses "
        "it, or give all processes another --coordinator HOST:PORT."
    )


class _Present:
    """The processes that have come to the roll call."""

    def __init__(self, place: Place, own: Claim, stack: contextlib.ExitStack):
        self._place = place
        self._own = own
        self._stack = stack
        self._claims: dict[int, Claim] = {0: own}
        self._connections: dict[int, socket.socket] = {}
        self._refused: list[socket.socket] = []

    @property
    def is_complete(self) -> bool:
        return len(self._claims) == self._place.num_processes

    def admit(self, listener: socket.socket) -> str | None:
        """Waits for a connection, for a while; returns the problem of its claim."""
        listener.settimeout(_RETRY_SECONDS)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return None
        self._stack.callback(connection.close)
        try:
            claim = Claim(**_receive(connection, _HELLO_SECONDS))
        except (TimeoutError, TypeError):  # another program
            return None
        self.forget_ended()
        problem = self._problem(claim, self._claims.get(claim.process))
        if problem is not None:
            self._refused.append(connection)
        elif claim.process in range(self._place.num_processes):
            self._claims[claim.process] = claim
            self._connections[claim.process] = connection
        return problem

    def forget_ended(self) -> None:
        """Drops the claims of processes that have ended since."""
        for process, connection in list(self._connections.items()):
            if _peek(connection) == b"":
                self._connections.pop(process).close()
                del self._claims[process]

    def _problem(self, claim: Claim, earlier: Claim | None) -> str | None:
        place, own = self._place, self._own
        if claim.num_processes != own.num_processes:
            return (
                f"All processes of the job at {place.coordinator} must have the same "
                f"--num-processes, got {own.num_processes} on {own.owner} and "
                f"{claim.num_processes} on {claim.owner}. Another job needs another "
                "port: give it a --coordinator HOST:PORT of its own."
            )
        if earlier is None:
            return None
        return (
            f"Process {claim.process} of the job at {place.coordinator} was started "
            f"twice: on {earlier.owner} and on {claim.owner}. Give each process its "
            f"own --process-id, 0 to {own.num_processes - 1}, and each job a "
            "--coordinator HOST:PORT of its own."
        )

    def absence(self, seconds: float) -> str:
        """Returns the message that some processes have not come."""
        place = self._place
        absent = sorted(set(range(place.num_processes)) - set(self._claims))
        named = ", ".join(map(str, absent[:10])) + (", ..." if absent[10:] else "")
        return (
            f"Not all of the {place.num_processes} processes have connected to the "
            f"coordinator {place.coordinator} within {seconds:.0f} s; missing: "
            f"{named}. Check that each host runs the same command with its own "
            f"--process-id, 0 to {place.num_processes - 1}, and see the logs of the "
            "others. Or process 0 was started on another host than --coordinator "
            "names."
        )

    def answer(self, problem: str | None) -> None:
        """Answers all that wait, once."""
        for connection in (*self._connections.values(), *self._refused):
            with contextlib.suppress(OSError):
                connection.settimeout(_HELLO_SECONDS)
                _send(connection, {"problem": problem})
        self._connections.clear()
        self._refused.clear()


def answer_roll_call(place: Place, timeout_seconds: float) -> None:
    """Claims the place of a process that is not process 0, and waits for the others.

    Raises:
      StartError: if process 0 cannot be reached, refuses the job, already runs one, or
        still waits for others when the time is over.
    """
    own = Claim(process=place.process_id, num_processes=place.num_processes)
    deadline = time.monotonic() + timeout_seconds
    running_since: float | None = None
    while True:
        with connect(place, timeout_seconds, deadline) as connection:
            with contextlib.suppress(OSError):
                _send(connection, dataclasses.asdict(own))
            seconds = max(deadline - time.monotonic(), 0.0) + GRACE_SECONDS
            try:
                answer = _receive(connection, seconds)
            except TimeoutError:
                raise StartError(_not_started(place, timeout_seconds)) from None
        if answer.get("problem"):
            raise StartError(answer["problem"])
        if "problem" in answer:
            return
        now = time.monotonic()
        running_since = running_since or now
        if now > min(running_since + RUNNING_SECONDS, deadline):
            raise StartError(_runs_already(place))
        time.sleep(_RETRY_SECONDS)


def connect(place: Place, timeout_seconds: float, deadline: float) -> socket.socket:
    """Returns a connection to the coordinator, once it accepts one.

    Args:
      place: place of this process.
      timeout_seconds: whole time of the wait, for the message.
      deadline: end of the wait, as `time.monotonic` tells it.

    Raises:
      StartError: if it does not accept one in time.
    """
    while True:
        try:
            return socket.create_connection(place.address, timeout=10 * _RETRY_SECONDS)
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS >= deadline:
                raise StartError(
                    f"Process {place.process_id} cannot reach the coordinator "
                    f"{place.coordinator} within {timeout_seconds:g} s: {error}. Check "
                    "that process 0 runs on that host, that the address is right, and "
                    "that the firewall admits its port between the hosts."
                ) from error
        time.sleep(_RETRY_SECONDS)


def _runs_already(place: Place) -> str:
    return (
        f"The coordinator {place.coordinator} already runs a job, which process "
        f"{place.process_id} on host {platform.node()} (pid {os.getpid()}) cannot "
        "join. Either this process was started twice, or another job uses the port: "
        "give each job a --coordinator HOST:PORT of its own."
    )


def _not_started(place: Place, timeout_seconds: float) -> str:
    return (
        f"Process 0 has not started the job at {place.coordinator} within "
        f"{timeout_seconds:g} s of the start of process {place.process_id}: not all "
        f"{place.num_processes} processes have come; see its log."
    )


def _send(connection: socket.socket, value: dict[str, Any]) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def _receive(connection: socket.socket, seconds: float) -> dict[str, Any]:
    """Returns what the other end says.

    Process 0 answers by `problem`, the message of the error, or None if the job starts.

    Returns:
      Its claim or answer; {} if it closes the connection, or is another program.

    Raises:
      TimeoutError: if it says nothing in time.
    """
    connection.settimeout(seconds)
    data = b""
    try:
        while not data.endswith(b"\n"):
            part = connection.recv(_MAX_BYTES)
            data += part
            if not part or not data.startswith(b"{") or len(data) > _MAX_BYTES:
                return {}
        return json.loads(data)
    except TimeoutError:
        raise
    except (OSError, ValueError):
        return {}


def _peek(connection: socket.socket) -> bytes | None:
    """Returns a byte that has arrived, b"" after the end, None if it still waits."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:
        return b""

"""Runs sides in processes of their own, and times them in turns.

Load on a machine changes within minutes. Sides that take turns of a few steps meet the
same load, so the ratios of their times hold, also where the times do not.
"""

import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any, Final

from settings import Setting

DIRECTORY: Final = pathlib.Path(__file__).parent
LAST_CHARACTERS: Final = 1500
"""Length of the end of a side's messages that an error shows."""


class SideFailedError(RuntimeError):
    """Raised if the process of a side ends before its work is done."""


class SideProcess:
    """One side in a process of its own, which lives until `close`.

    Args:
      module: module of `sides`.
      setting: shapes.
      batches_file: of the batches, for all sides.
      python: path of the interpreter.
      environment: variables of the process; None: those of this one.
    """

    def __init__(
        self,
        module: str,
        setting: Setting,
        batches_file: pathlib.Path,
        *,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
    ):
        self._module = module
        self._messages = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [python, str(DIRECTORY / "side_worker.py"), module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            text=True,
            env=environment,
        )
        fields = dataclasses.asdict(setting)
        try:
            self.ask("start", setting=fields, batches_file=str(batches_file))
        except SideFailedError:
            self.close()
            raise

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command to the worker and waits for its reply.

        Raises:
          SideFailedError: if the process ends; the message has its last words.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(
                json.dumps({"do": command} | arguments),
                file=self._process.stdin,
                flush=True,
            )
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            raise SideFailedError(
                f"{self._module} ended with status {self._process.wait()} in its "
                f"command {command!r}:\n{self._last_words()}"
            )
        return json.loads(reply)

    def close(self) -> None:
        """Ends the process, and frees its memory."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._messages):
            assert pipe is not None
            pipe.close()

    def _last_words(self) -> str:
        self._messages.flush()
        self._messages.seek(0)
        return self._messages.read()[-LAST_CHARACTERS:]


def missing_modules(python: str, modules: Iterable[str]) -> list[str]:
    """Returns the modules that an interpreter cannot find; imports none."""
    code = (
        "import importlib.util, sys\n"
        "print(*(m for m in sys.argv[1:] if not importlib.util.find_spec(m)))"
    )
    command = [python, "-c", code, *modules]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return found.stdout.split()


@dataclasses.dataclass
class Times:
    """The timed steps of one side, in seconds."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0

    def add(self, reply: dict[str, Any]) -> None:
        """Adds the reply to a command that timed steps."""
        self.extend(Times(reply["seconds"], reply["peak_bytes"]))

    def extend(self, other: "Times") -> None:
        """Adds the steps of another run of the same side."""
        self.seconds += other.seconds
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)

    @property
    def median_ms(self) -> float:
        """Median of a step."""
        return 1e3 * statistics.median(self.seconds)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        """Lower and upper quartile of a step."""
        if len(self.seconds) == 1:
            return self.median_ms, self.median_ms
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return 1e3 * low, 1e3 * high

    def fields(self, name: str) -> dict[str, Any]:
        """Returns the fields of a result."""
        return {
            f"{name}_ms": self.median_ms,
            f"{name}_quartiles_ms": self.quartiles_ms,
            f"{name}_steps": len(self.seconds),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turns:
    """The length of a run.

    Attributes:
      rounds: turns of each side.
      steps: timed steps of a turn, at most.
      seconds: time after which a turn ends early, for slow sides.
    """

    rounds: int
    steps: int
    seconds: float

    def num_batches(self, num_methods: int) -> int:
        """Returns the number of batches of a run, so that no step sees one again."""
        return 1 + num_methods * self.rounds * (self.steps + 1)


def time_in_turns(
    sides: dict[str, SideProcess], methods: Iterable[str], turns: Turns
) -> dict[str, dict[str, Times]]:
    """Times all sides on the same batches, A B A B, and prints each round.

    Returns:
      Side, then method, to its times.
    """
    methods = tuple(methods)
    times = {side: {method: Times() for method in methods} for side in sides}
    first = 1  # Batch 0 is that of the check.
    for number in range(turns.rounds):
        for method in methods:
            last = []
            for name, side in sides.items():
                reply = side.ask(
                    "time_each",
                    method=method,
                    first=first,
                    count=turns.steps,
                    limit=turns.seconds,
                )
                times[name][method].add(reply)
                last.append(f"{name} {1e3 * statistics.median(reply['seconds']):.2f}")
            print(
                f"  round {number + 1} of {turns.rounds}, {method}, ms: "
                + ", ".join(last),
                flush=True,
            )
            first += turns.steps + 1
    return times

"""The lines that the doctor's child process prints, one JSON object per line.

The child runs *cases* on the devices: each one checks or times one thing. It first
prints all cases of its run, so the parent knows those that never ran. It prints an
event before a case and after it, so the parent knows the case that hung or crashed:

    {"event": "plan", "capabilities": {case: capability, ...}}
    {"event": "start", "case": ..., "capability": ...}
    {"event": "end", "case": ..., "capability": ..., "ok": ..., "problem": ...,
     "seconds": ..., "figures": {...}}
    {"event": "done"}

Other lines are noise of libraries. `capability` groups the cases that one verdict
decides; `kernel_verdicts.capability_name` makes it.

A case of the part `speed` has the same name for every backend, and its figures are:

* `seconds_per_call`: time of one call of the program, the median of several.
* `spread`: largest minus smallest time, as a fraction of the median.
* `xla_seconds_per_call`: time of XLA's program for the same case. The same process
  times both programs in turns.
* `speed_ratio`: XLA's time over the backend's, the median over the turns.
* `bytes`: minimum traffic of the call, from its ids and rows.
* `model_bytes`: traffic of the compile report's model of the program; None: unmeasured.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any, Final, Literal

Part = Literal["correctness", "speed"]
Tier = Literal["quick", "full"]

SECONDS_PER_CALL: Final = "seconds_per_call"
SPREAD: Final = "spread"
XLA_SECONDS_PER_CALL: Final = "xla_seconds_per_call"
SPEED_RATIO: Final = "speed_ratio"
BYTES: Final = "bytes"
MODEL_BYTES: Final = "model_bytes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """The cases of a run, before the first one starts.

    Attributes:
      capabilities: case to capability, also of cases that an earlier child ran.
    """

    capabilities: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseStarted:
    """A case starts now.

    Attributes:
      case: its name, unique within a run of the child.
      capability: that the case belongs to.
    """

    case: str
    capability: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseEnded:
    """The result of a case.

    Attributes:
      case: its name.
      capability: that the case belongs to.
      ok: True if the case passed.
      problem: one sentence; None if the case passed.
      seconds: time of the case, compilation included.
      figures: numbers, such as the largest difference, or None where not measured.
    """

    case: str
    capability: str
    ok: bool
    problem: str | None
    seconds: float
    figures: Mapping[str, float | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllDone:
    """All cases have run."""


Event = Planned | CaseStarted | CaseEnded | AllDone


def emit(event: Event) -> None:
    """Prints an event to stdout, at once."""
    print(to_line(event), file=sys.stdout, flush=True)


def to_line(event: Event) -> str:
    """Returns the line of an event, without its end.

    Example:
      >>> to_line(CaseStarted(case="a", capability="read, dim 8"))
      '{"event": "start", "case": "a", "capability": "read, dim 8"}'
    """
    name = _NAMES[type(event)]
    return json.dumps({"event": name, **dataclasses.asdict(event)})


def parse_line(line: str) -> Event | None:
    """Returns the event of a line; None if the line is none of the child's events.

    Example:
      >>> parse_line(to_line(AllDone()))
      AllDone()
      >>> parse_line("WARNING: a library says hello")
    """
    try:
        fields = json.loads(line)
        event_type = _TYPES[fields.pop("event")]
        return event_type(**fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


_TYPES: Final[dict[Any, type[Any]]] = {
    "plan": Planned,
    "start": CaseStarted,
    "end": CaseEnded,
    "done": AllDone,
}
_NAMES: Final = {event_type: name for name, event_type in _TYPES.items()}

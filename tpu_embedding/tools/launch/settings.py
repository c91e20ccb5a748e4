"""The settings of a launch: one frozen value, read from a TOML file.

The printed script follows from this value alone; see `script.py`.
"""

import dataclasses
import functools
import pathlib
import re
import tomllib
from typing import Any, Final, Literal, get_args

from tpu_embedding.field_checks import is_int, raise_all
from tpu_embedding.hardware import MAX_SLICES
from tpu_embedding.tools.launch.slices import (
    BACKEND_NAMES,
    BackendName,
    SliceFacts,
    slice_facts,
)

Capacity = Literal["on_demand", "spot", "reservation"]
CAPACITIES: Final[tuple[Capacity, ...]] = get_args(Capacity)

UNTIL_DELETED: Final = "until_deleted"
"""Lifetime of machines that only the printed script deletes, when told to."""

_UNITS: Final = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION: Final = re.compile(r"(?:\d{1,6}[dhms])+", re.ASCII)

_TYPE_NAMES: Final = {int: "an int", str: "a string", tuple: "a list of strings"}

_PATTERNS: Final = {
    "name": (
        r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?",
        "1 to 30 lower-case letters, digits and hyphens, beginning with a letter",
    ),
    "project": (r"[a-z][-a-z0-9:.]{4,60}[a-z0-9]", "the id of a Google Cloud project"),
    "zone": (r"[a-z]+-[a-z]+\d+-[a-z]\w*", "a zone, such as us-east5-a"),
    "cluster": (
        r"([a-z]([-a-z0-9]{0,38}[a-z0-9])?)?",
        "the name of a GKE cluster: lower-case letters, digits and hyphens",
    ),
    "bucket": (
        r"[a-z0-9][-_.a-z0-9]{1,61}[a-z0-9]",
        "the name of a bucket, without gs://",
    ),
    "service_account": (
        r"[-a-z0-9]+@[-a-z0-9.:]+\.gserviceaccount\.com",
        "the address of a service account, ending in gserviceaccount.com",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One training run on TPUs of Google Cloud, and the machines for it.

    Attributes:
      name: name of the run; the names of all its resources begin with it.
      backend: `"gke"`, or `"queued_resource"` for Cloud TPU VMs.
      project: id of the Google Cloud project.
      zone: zone of the TPUs.
      topology: generation and grid of chips of a slice, as for `tpu-embedding compile`.
      slices: number of such slices.
      capacity: `"on_demand"`, `"spot"` or `"reservation"`.
      reservation: name of the reservation, with capacity `"reservation"`. The Cloud TPU
        API takes none: it uses what the project has reserved.
      lifetime: duration after which the machines are deleted, such as `"6h"`, or
        `"until_deleted"`. Machines cost money until they are deleted.
      config: name of a config of the package, or path of a Python file.
      settings: changes of the config, as `KEY=VALUE`.
      data_dir: path of the data in the bucket; "" for configs that generate them.
      bucket: bucket for package, data and results.
      package: path of a wheel of this package, or a requirement that pip installs.
      service_account: account that the machines act as. It may read and write the
        bucket. No key file is needed.
      restarts: restarts after a failure or a preemption, each from the newest
        checkpoint.
      network: network of the machines.
      subnetwork: subnetwork; "" for the network's own choice.
      cluster: name of a GKE cluster that exists; "" creates one for this launch.
    """

    name: str
    backend: BackendName
    project: str
    zone: str
    topology: str
    slices: int = 1
    capacity: Capacity = "on_demand"
    reservation: str = ""
    lifetime: str
    config: str
    settings: tuple[str, ...] = ()
    data_dir: str = ""
    bucket: str
    package: str
    service_account: str
    restarts: int = 3
    network: str = "default"
    subnetwork: str = ""
    cluster: str = ""

    def __post_init__(self):
        _check_types(self)
        raise_all([*_field_problems(self), *_slice_problems(self)])
        raise_all(_capacity_problems(self))

    @functools.cached_property
    def facts(self) -> SliceFacts:
        """Machines and names of a slice."""
        return slice_facts(self.topology, self.backend)

    @property
    def region(self) -> str:
        """Region of the zone."""
        return self.zone.rpartition("-")[0]

    @property
    def lifetime_seconds(self) -> int | None:
        """Lifetime of the machines in seconds; None if nothing ends it."""
        return None if self.lifetime == UNTIL_DELETED else _seconds(self.lifetime)

    @property
    def slice_names(self) -> tuple[str, ...]:
        """Names of the slices, as node pools or nodes."""
        return tuple(f"{self.name}-{index}" for index in range(self.slices))

    @property
    def own_files(self) -> tuple[str, ...]:
        """Local files that the machines need: a wheel, a config of the user's own."""
        files = (self.package, self.config)
        return tuple(
            path
            for path in files
            if path.endswith((".whl", ".py")) and "://" not in path
        )


def load_launch(path: pathlib.Path) -> Launch:
    """Returns the launch that a TOML file describes.

    Args:
      path: file with a line `FIELD = VALUE` for each field of `Launch`.

    Raises:
      OSError: if the file cannot be read.
      ValueError: if the file is not TOML, has unknown or missing fields, or a field
        breaks a rule.
      TypeError: if a field has a wrong type.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f'{path} is not TOML: {error}. A line is FIELD = VALUE, with text in "".'
        ) from error
    fields = {field.name: field for field in dataclasses.fields(Launch)}
    unknown = [str(key) for key in document if key not in fields]
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in document
    ]
    problems = [f"{path} has the unknown field {name!r}" for name in unknown]
    if missing:
        problems.append(f"{path} must have the fields {', '.join(missing)}")
    if unknown:
        problems.append(f"the fields are {', '.join(fields)}")
    raise_all(problems)
    if isinstance(document.get("settings"), list):
        document["settings"] = tuple(document["settings"])
    return Launch(**document)


def _check_types(launch: Launch) -> None:
    wrong = []
    for field in dataclasses.fields(launch):
        value = getattr(launch, field.name)
        expected: Any = type(field.default)
        if field.default is dataclasses.MISSING:
            expected = str
        if expected is int:
            right = is_int(value)
        elif expected is tuple:
            right = isinstance(value, tuple) and all(isinstance(v, str) for v in value)
        else:
            right = isinstance(value, expected)
        if not right:
            kind = _TYPE_NAMES[expected]
            wrong.append(f"{field.name} must be {kind}, got {value!r}")
    if wrong:
        raise TypeError(f"The launch's {'; '.join(wrong)}.")


def _field_problems(launch: Launch) -> list[str]:
    problems = []
    for field, (pattern, rule) in _PATTERNS.items():
        value = getattr(launch, field)
        if not re.fullmatch(pattern, value, re.ASCII):
            problems.append(f"{field} must be {rule}, got {value!r}")
    for field, choices in (("backend", BACKEND_NAMES), ("capacity", CAPACITIES)):
        if getattr(launch, field) not in choices:
            problems.append(
                f"{field} must be one of {', '.join(choices)}, got "
                f"{getattr(launch, field)!r}"
            )
    for field in ("config", "package", "network"):
        value = getattr(launch, field)
        if not value or value.startswith("-"):
            problems.append(
                f"{field} must not be empty, nor begin with a hyphen, got {value!r}"
            )
    for field, value in dataclasses.asdict(launch).items():
        texts = value if isinstance(value, tuple) else (str(value),)
        if not all(text.isprintable() for text in texts):
            problems.append(
                f"{field} must be printable text of one line, got {value!r}"
            )
    if launch.lifetime != UNTIL_DELETED and not (
        _DURATION.fullmatch(launch.lifetime) and _seconds(launch.lifetime)
    ):
        problems.append(
            f"lifetime must be a duration such as 6h, or {UNTIL_DELETED}, got "
            f"{launch.lifetime!r}"
        )
    if launch.restarts < 0:
        problems.append(f"restarts must be at least 0, got {launch.restarts}")
    if not 1 <= launch.slices <= MAX_SLICES:
        problems.append(f"slices must be from 1 to {MAX_SLICES}, got {launch.slices}")
    for setting in launch.settings:
        if not setting.partition("=")[1]:
            problems.append(f"settings takes KEY=VALUE, got {setting!r}")
    if launch.data_dir.startswith(("/", "gs:")) or ".." in launch.data_dir.split("/"):
        problems.append(
            f"data_dir must be a path within the bucket, such as criteo, got "
            f"{launch.data_dir!r}"
        )
    return problems


def _slice_problems(launch: Launch) -> list[str]:
    """Returns what is wrong with generation, topology, slices and backend together."""
    if launch.backend not in BACKEND_NAMES:
        return []
    try:
        facts = slice_facts(launch.topology, launch.backend)
    except ValueError as error:
        return [str(error).rstrip(".")]
    if launch.slices > 1 and launch.backend == "gke" and facts.num_hosts == 1:
        return [
            f"slices must be 1 for the topology {launch.topology!r}, got "
            f"{launch.slices}: GKE joins only slices of several hosts"
        ]
    return []


def _capacity_problems(launch: Launch) -> list[str]:
    """Returns what is wrong with capacity, lifetime and backend together."""
    problems = []
    named = launch.capacity == "reservation" and launch.backend != "queued_resource"
    if named != bool(launch.reservation):
        problems.append(
            "reservation must be given with capacity reservation on gke, "
            f"and only then, got {launch.reservation!r} with capacity "
            f"{launch.capacity} and backend {launch.backend}"
        )
    if launch.backend == "queued_resource" and launch.lifetime != UNTIL_DELETED:
        problems.append(
            f"lifetime must be {UNTIL_DELETED} with backend queued_resource, got "
            f"{launch.lifetime!r}: the Cloud TPU API deletes no machines by itself"
        )
    return problems


def _seconds(duration: str) -> int:
    """Returns the seconds of a duration such as `"1d12h"`."""
    parts = re.findall(r"(\d+)([dhms])", duration)
    return sum(int(number) * _UNITS[unit] for number, unit in parts)

"""Reads the verdicts of `tpu-embedding doctor` on the kernels.

The doctor runs each kernel beside XLA on the live chip, and stores one verdict for each
*capability*: one direction, such as reading, for one kind of row. `make_plan` with
`kernels="auto"` uses a kernel only where a verdict says that its results are right and
that it is faster. Verdicts hold for one device kind, the installed libraries, and the
present source of the kernels. Any other verdict is stale.
"""

import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import importlib.resources
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

from tpu_embedding.paths import local_path, user_cache

Direction = Literal["read", "pool", "spread", "update", "write"]
"""A use of rows, as `plan/backends.py` chooses a backend for each."""

RuleKind = Literal["elements", "row sums"]
"""`"row sums"`: the rule sums over a row, or keeps one value per row."""

KernelName = Literal["sparse_core", "interpreter"]
"""A backend that runs kernels."""

MIN_SPEED_RATIO: Final = 1.05
"""XLA's time over the kernel's, from which a kernel counts as faster. Two timings of
one program differ by a few percent."""

DIRECTORY_VARIABLE: Final = "TPU_EMBEDDING_VERDICTS"
"""Environment variable that names the directory of the file of verdicts."""

RUN_DOCTOR: Final = "run tpu-embedding doctor"
"""The way to a verdict, at the end of every reason that lacks one."""

_WIDEST_KIND: Final = 512
_LIBRARIES: Final = ("jax", "jaxlib", "libtpu", "tpu-embedding")

_KERNEL_SOURCES: Final = (
    "rows/kernels",
    "rows/access.py",
    "optimizers/analysis/kernel_lowering.py",
    "optimizers/analysis/operations.py",
)
"""Files that decide on the code of kernels: a change makes their verdicts stale."""


class Capability(NamedTuple):
    """One direction for one kind of row. Each has a verdict of its own.

    Attributes:
      direction: the use of the rows.
      dim: elements of a row; 512 stands for all rows of more than 128.
      rule: kind of the optimizer's rule; `"elements"` unless the direction is update.
    """

    direction: Direction
    dim: int
    rule: RuleKind = "elements"


def capability_of(
    direction: Direction, dim: int, rule: RuleKind = "elements"
) -> Capability:
    """Returns the capability that a direction of some rows belongs to.

    Args:
      direction: the use of the rows.
      dim: elements of a row. A kernel cuts rows of more than 128 into parts of 128, so
        all of them are one kind.
      rule: kind of the optimizer's rule, which only updates run.

    Example:
      >>> capability_of("read", 8)
      Capability(direction='read', dim=8, rule='elements')
      >>> capability_of("update", 1024, "row sums")
      Capability(direction='update', dim=512, rule='row sums')
    """
    return Capability(
        direction=direction,
        dim=dim if dim <= 128 else _WIDEST_KIND,
        rule=rule if direction == "update" else "elements",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one capability.

    Attributes:
      direction: the use of the rows.
      dim: elements of a row, as in `Capability`.
      rule: kind of the optimizer's rule, as in `Capability`.
      problem: the reason to refuse the kernel, such as wrong rows, a hang, or a case
        that did not run. None: every case ran and agreed with the reference.
      speed_ratio: XLA's time over the kernel's; None: not timed.
      date: day of the check, such as "2026-01-31".

    Raises:
      TypeError, ValueError: if a field has another type or range.
    """

    direction: Direction
    dim: int
    rule: RuleKind = "elements"
    problem: str | None
    speed_ratio: float | None
    date: str

    def __post_init__(self):
        is_valid = (
            self.direction in get_args(Direction)
            and self.rule in get_args(RuleKind)
            and type(self.dim) is int
            and self.dim >= 1
            and self.capability == capability_of(*self.capability)
            and (self.problem is None or _is_text(self.problem))
            and (self.speed_ratio is None or _is_ratio(self.speed_ratio))
            and _is_text(self.date)
            and datetime.date.fromisoformat(self.date)
        )
        if not is_valid:
            raise ValueError(
                "A Verdict must have direction, dim and rule of capability_of, a "
                "problem of some text or None, a finite speed_ratio above 0 or None, "
                f"and a date such as 2026-01-31, got {self}. Run tpu-embedding doctor "
                "for verdicts of this machine."
            )

    @property
    def capability(self) -> Capability:
        """The capability that the verdict decides on."""
        return Capability(self.direction, self.dim, self.rule)

    @property
    def allows_kernel(self) -> bool:
        """True if all results are right, and the kernel is faster than XLA."""
        ratio = self.speed_ratio
        return self.problem is None and ratio is not None and ratio >= MIN_SPEED_RATIO

    def describe(self) -> str:
        """Returns the verdict as the reason of a choice."""
        if self.problem is not None:
            return f"verdict of {self.date}: {self.problem}"
        if self.speed_ratio is None:
            return f"verdict of {self.date}: equal, but not timed"
        return f"verdict of {self.date}: {self.speed_ratio:.2f}x the speed of XLA"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_ratio(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelVerdicts:
    """The verdicts that a plan follows.

    All processes of a job need the same ones: `to_json` and `verdicts_from_json` carry
    those of one process to the others.

    Attributes:
      backend: the backend that runs the kernels.
      verdicts: at most one per capability, in any order.
      absence: the reason why a capability may lack a verdict.
    """

    backend: KernelName
    verdicts: tuple[Verdict, ...] = ()
    absence: str = f"no verdict for this device; {RUN_DOCTOR}"

    def __post_init__(self):
        capabilities = [verdict.capability for verdict in self.verdicts]
        twice = sorted({c for c in capabilities if capabilities.count(c) > 1})
        if self.backend not in get_args(KernelName) or twice:
            raise ValueError(
                f"KernelVerdicts needs a backend of {get_args(KernelName)} and one "
                "verdict per direction and kind of row, got "
                f"{self.backend!r} and several verdicts on {twice}. Run tpu-embedding "
                "doctor for verdicts of this machine."
            )

    def find(self, capability: Capability) -> Verdict | None:
        """Returns the verdict on a capability; None if there is none."""
        return next((v for v in self.verdicts if v.capability == capability), None)

    def allows(self, capability: Capability) -> bool:
        """Returns True if the kernel's results are right and it is faster."""
        verdict = self.find(capability)
        return verdict is not None and verdict.allows_kernel

    def reason(self, capability: Capability) -> str:
        """Returns the reason of the choice for a capability, for `print(plan)`."""
        verdict = self.find(capability)
        return f"auto: {self.absence if verdict is None else verdict.describe()}"

    def to_json(self) -> dict[str, Any]:
        """Returns the verdicts as JSON values."""
        return dataclasses.asdict(self)


def verdicts_from_json(document: Mapping[str, Any]) -> KernelVerdicts:
    """Returns the verdicts of `KernelVerdicts.to_json`.

    Raises:
      KeyError, TypeError, ValueError: if the document is not such a value.
    """
    return KernelVerdicts(
        backend=document["backend"],
        verdicts=tuple(Verdict(**verdict) for verdict in document["verdicts"]),
        absence=document["absence"],
    )


def current_versions() -> dict[str, str]:
    """Returns the versions that verdicts made now hold for."""
    found = {name: installed_version(name) or "absent" for name in _LIBRARIES}
    return {**found, "source of the kernels": _digest_of_kernels()}


def installed_version(name: str) -> str | None:
    """Returns the version of an installed distribution; None if it is absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _digest_of_kernels() -> str:
    root = importlib.resources.files("tpu_embedding")
    digest = hashlib.sha256()
    for source in _KERNEL_SOURCES:
        path = root / source
        files = [path] if path.is_file() else list(path.iterdir())
        for file in sorted(files, key=lambda file: file.name):
            if file.name.endswith(".py"):
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def verdict_file() -> pathlib.Path:
    """Returns the path of the file of verdicts.

    It lies in the directory that `TPU_EMBEDDING_VERDICTS` names, or in the user's
    cache.
    """
    given = os.environ.get(DIRECTORY_VARIABLE)
    directory = local_path(given) if given else user_cache()
    return directory / "kernel_verdicts.json"


def load_verdicts(device_kind: str, backend: KernelName) -> KernelVerdicts:
    """Returns the stored verdicts on a device kind, for the installed versions.

    Verdicts of other versions are stale: none is returned, and `absence` says what has
    changed. A damaged file counts as absent.
    """
    path = verdict_file()
    try:
        record = read_records(path).get((device_kind, backend))
        if record is not None:
            return _unless_stale(backend, record["versions"], record["verdicts"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        reason = f"the verdicts in {path} are damaged; {RUN_DOCTOR}"
        return KernelVerdicts(backend=backend, absence=reason)
    return KernelVerdicts(backend=backend)


def _unless_stale(
    backend: KernelName, versions: dict[str, str], entries: list[dict[str, Any]]
) -> KernelVerdicts:
    """Returns verdicts; none if a version has changed since they were stored."""
    verdicts = tuple(Verdict(**entry) for entry in entries)
    known = KernelVerdicts(
        backend=backend,
        verdicts=verdicts,
        absence=f"no verdict on these rows; {RUN_DOCTOR}",
    )
    changes = ", ".join(
        f"{name} {versions[name]} then, {version} now"
        for name, version in current_versions().items()
        if versions[name] != version
    )
    if not changes:
        return known
    reason = f"verdict is stale: {changes}; {RUN_DOCTOR}"
    return KernelVerdicts(backend=backend, absence=reason)


def read_records(path: pathlib.Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the records of a file of verdicts, by device kind and backend.

    A record has the versions that its verdicts hold for, and the verdicts.

    Raises:
      OSError: if the file cannot be read.
      KeyError, TypeError, ValueError: if it is damaged.
    """
    text = path.read_text(encoding="utf-8")
    document = json.loads(text, object_pairs_hook=_without_repeats)
    found = [(r["device_kind"], r["backend"], r) for r in document["records"]]
    return _without_repeats([((kind, name), record) for kind, name, record in found])


def _without_repeats(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Returns a dictionary of pairs, which must have different keys."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"keys must be different, got {[key for key, _ in pairs]}")
    return dict(pairs)

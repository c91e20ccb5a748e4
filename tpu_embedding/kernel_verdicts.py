"""Verdicts of a live chip on the kernels: are their results equal, and are they faster?

`tpu-embedding doctor` runs each kernel beside XLA, and stores one verdict per
*capability*: a direction, such as reading, for one kind of row. `make_plan` with
`kernels="auto"` uses a kernel only where a verdict says that it is equal and faster. A
verdict holds for one device kind, one version of each library, and one state of the
kernels' source. Everything else makes it stale.
"""

import contextlib
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
import re
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, get_args

from tpu_embedding.paths import local_path

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
"""Environment variable that names the directory of the verdicts."""

RUN_DOCTOR: Final = "run tpu-embedding doctor"
"""The way to a verdict, at the end of every reason that lacks one."""

_WIDEST_KIND: Final = 512
_LIBRARIES: Final = ("jax", "jaxlib", "libtpu")
_PACKAGE: Final = "tpu-embedding"

_KERNEL_SOURCES: Final = (
    "rows/kernels",
    "rows/access.py",
    "optimizers/analysis/kernel_lowering.py",
    "optimizers/analysis/operations.py",
)
"""Files that decide on the code of kernels: a change makes their verdicts stale."""


def capability_name(direction: Direction, dim: int, rule: RuleKind = "elements") -> str:
    """Returns the name of a capability, for which one verdict decides.

    Rows wider than 128 elements are one kind: a kernel cuts them into parts of 128.

    Args:
      direction: the use of rows.
      dim: elements of a row.
      rule: of the optimizer; only updates differ by it.

    Example:
      >>> capability_name("read", 8)
      'read, dim 8'
      >>> capability_name("update", 1024, "row sums")
      'update with row sums, dim 512'
    """
    if direction == "update" and rule == "row sums":
        name = "update with row sums"
    else:
        name = direction
    return f"{name}, dim {dim if dim <= 128 else _WIDEST_KIND}"


_CAPABILITY: Final = re.compile(
    rf"({'|'.join(get_args(Direction))})( with row sums)?, .*"
)
_ROWS: Final = re.compile(r".*, dim (\d+)")
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d")


def direction_of(capability: str) -> str | None:
    """Returns the direction of a capability; None if a plan asks for no such one.

    Example:
      >>> direction_of("update with row sums, dim 8")
      'update'
      >>> direction_of("step, dim 8")
    """
    match = _CAPABILITY.fullmatch(capability)
    return None if match is None else match[1]


def rows_of(capability: str) -> int | None:
    """Returns the dim that a capability ends with; None if it names none.

    Example:
      >>> rows_of("step, dim 8")
      8
      >>> rows_of("padded exchange")
    """
    match = _ROWS.fullmatch(capability)
    return None if match is None else int(match[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one capability of a backend.

    Attributes:
      capability: name from `capability_name`.
      is_equal: True if all cases ran, and all results agreed with the dense reference.
      problem: the first problem, such as wrong rows, a hang, or cases that did not run;
        None if there is none.
      speed_ratio: XLA's time over the kernel's; None: not timed.
      date: day of the check, as in "2026-01-31".
      num_cases: cases that could have refused the capability, at least 1; 1 for a
        check that is not complete.

    Raises:
      ValueError: if a field has another type or range, or if a problem stands beside
        `is_equal`.
    """

    capability: str
    is_equal: bool
    problem: str | None
    speed_ratio: float | None
    date: str
    num_cases: int = 1

    def __post_init__(self):
        is_valid = (
            isinstance(self.capability, str)
            and direction_of(self.capability) is not None
            and isinstance(self.is_equal, bool)
            and (self.problem is None or _is_text(self.problem))
            and (self.speed_ratio is None or _is_ratio(self.speed_ratio))
            and isinstance(self.date, str)
            and _DATE.fullmatch(self.date)
            and type(self.num_cases) is int
            and self.num_cases >= 1
            and not (self.is_equal and self.problem)
        )
        if not is_valid:
            raise ValueError(
                "A Verdict must have a capability of capability_name, is_equal as "
                "bool, a problem only if is_equal is False, a finite speed_ratio "
                f"above 0, a date as 2026-01-31, and num_cases from 1, got {self}. Run "
                "tpu-embedding doctor for verdicts of this machine."
            )

    @property
    def is_faster(self) -> bool:
        """True if the kernel was timed, and is faster than XLA."""
        return self.speed_ratio is not None and self.speed_ratio >= MIN_SPEED_RATIO

    def describe(self) -> str:
        """Returns the verdict as the reason of a choice."""
        if not self.is_equal:
            return f"verdict of {self.date}: {self.problem or 'results differ'}"
        if self.speed_ratio is None:
            return f"verdict of {self.date}: equal, but not timed"
        return f"verdict of {self.date}: {self.speed_ratio:.2f}x the speed of XLA"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_ratio(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerdictKey:
    """All that a verdict holds for.

    Attributes:
      device_kind: JAX's name of the device, such as "cpu".
      backend: of the kernels.
      versions: name and version of each library; "absent" if it is not installed.
      kernels: digest of the kernels' source.
    """

    device_kind: str
    backend: KernelName
    versions: tuple[tuple[str, str], ...]
    kernels: str

    def differences(self, now: "VerdictKey") -> list[str]:
        """Returns one text per version that has changed since, oldest facts first."""
        then, current = dict(self.versions), dict(now.versions)
        changed = [
            f"{name} {then.get(name, 'absent')} then, {version} now"
            for name, version in current.items()
            if then.get(name) != version
        ]
        if self.kernels != now.kernels:
            changed.append("the kernels' source has changed")
        return changed

    @property
    def file_name(self) -> str:
        """Name of the file that holds the verdicts."""
        facts = json.dumps(dataclasses.asdict(self))
        digest = hashlib.sha256(facts.encode()).hexdigest()[:12]
        return f"{_file_stem(self.device_kind, self.backend)}-{digest}.json"


def current_key(device_kind: str, backend: KernelName) -> VerdictKey:
    """Returns the key of verdicts made now, with the installed libraries."""
    versions = [(name, installed_version(name)) for name in (*_LIBRARIES, _PACKAGE)]
    return VerdictKey(
        device_kind=device_kind,
        backend=backend,
        versions=tuple((name, version or "absent") for name, version in versions),
        kernels=_digest_of_kernels(),
    )


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelVerdicts:
    """The verdicts that a plan follows.

    All processes of a job need the same ones: `to_json` and `verdicts_from_json` carry
    those of one process to the others.

    Attributes:
      backend: runs the kernels.
      verdicts: at most one per capability, in any order.
      absence: the reason why there are none, or why a capability may lack one.
    """

    backend: KernelName
    verdicts: tuple[Verdict, ...] = ()
    absence: str = f"no verdict for this device; {RUN_DOCTOR}"

    def __post_init__(self):
        names = [verdict.capability for verdict in self.verdicts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if self.backend not in get_args(KernelName) or twice:
            raise ValueError(
                f"KernelVerdicts needs a backend of {get_args(KernelName)} and one "
                f"verdict per capability, got {self.backend!r} and several verdicts on "
                f"{twice}. Run tpu-embedding doctor for verdicts of this machine."
            )

    def find(self, capability: str) -> Verdict | None:
        """Returns the verdict on a capability; None if there is none."""
        return next((v for v in self.verdicts if v.capability == capability), None)

    def allows(self, capability: str) -> bool:
        """Returns True if the kernel is equal and faster."""
        verdict = self.find(capability)
        return verdict is not None and verdict.is_equal and verdict.is_faster

    def reason(self, capability: str) -> str:
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


def verdict_directory() -> pathlib.Path:
    """Returns the directory of the verdicts: the user's cache, or the variable's."""
    given = os.environ.get(DIRECTORY_VARIABLE)
    if given:
        return local_path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "tpu_embedding" / "verdicts"


def save_verdicts(key: VerdictKey, verdicts: Iterable[Verdict]) -> pathlib.Path:
    """Stores verdicts, and returns the file. Earlier ones of the same key stay.

    The file is replaced atomically. A verdict replaces an earlier one on its
    capability. But an earlier problem counts until as many cases have run without one:
    a quick check must not overrule a full one.

    Raises:
      OSError: if the directory cannot be written.
    """
    directory = verdict_directory()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / key.file_name
    merged = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        merged = {v.capability: v for v in _read_file(path)[1]}
    for verdict in verdicts:
        earlier = merged.get(verdict.capability, verdict)
        if not verdict.is_equal and not earlier.is_equal:
            num_cases = max(verdict.num_cases, earlier.num_cases)
            verdict = dataclasses.replace(verdict, num_cases=num_cases)
        if earlier.is_equal or verdict.num_cases >= earlier.num_cases:
            merged[verdict.capability] = verdict
    document = {
        "key": dataclasses.asdict(key),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "verdicts": [dataclasses.asdict(verdict) for verdict in merged.values()],
    }
    with tempfile.NamedTemporaryFile(
        "w", dir=directory, prefix=".verdicts-", delete=False, encoding="utf-8"
    ) as file:
        temporary = pathlib.Path(file.name)
        try:
            file.write(json.dumps(document, indent=1) + "\n")
            file.close()
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def load_verdicts(device_kind: str, backend: KernelName) -> KernelVerdicts:
    """Returns the stored verdicts for this device kind and the installed versions.

    Verdicts of other versions are stale: none is returned, and `absence` says what has
    changed. A damaged file counts as absent.
    """
    key = current_key(device_kind, backend)
    directory = verdict_directory()
    path = directory / key.file_name
    try:
        found, verdicts = _read_file(path)
        if found == key:
            return KernelVerdicts(
                backend=backend,
                verdicts=verdicts,
                absence=f"no verdict on these rows; {RUN_DOCTOR}",
            )
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        reason = f"the verdicts in {path} are damaged; {RUN_DOCTOR}"
        return KernelVerdicts(backend=backend, absence=reason)
    stale = _newest_stale(directory, key)
    if stale is None:
        return KernelVerdicts(backend=backend)
    changes = ", ".join(stale.differences(key))
    reason = f"verdict is stale: {changes}; {RUN_DOCTOR}"
    return KernelVerdicts(backend=backend, absence=reason)


def _newest_stale(directory: pathlib.Path, key: VerdictKey) -> VerdictKey | None:
    """Returns the key of the newest verdicts of the device kind, of any version."""
    stem = _file_stem(key.device_kind, key.backend)
    newest: tuple[float, VerdictKey] | None = None
    for path in directory.glob(f"{stem}-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found, _ = _read_file(path)
            written = path.stat().st_mtime
            if found != key and (newest is None or written > newest[0]):
                newest = written, found
    return None if newest is None else newest[1]


def _read_file(path: pathlib.Path) -> tuple[VerdictKey, tuple[Verdict, ...]]:
    """Returns the contents of a file of verdicts.

    Raises:
      KeyError, TypeError, ValueError: if one entry is damaged: then none is believed.
    """
    text = path.read_text(encoding="utf-8")
    document = json.loads(text, object_pairs_hook=_without_repeats)
    fields = dict(document["key"])
    fields["versions"] = tuple(tuple(pair) for pair in fields["versions"])
    key = VerdictKey(**fields)
    verdicts = tuple(Verdict(**fields) for fields in document["verdicts"])
    return key, KernelVerdicts(backend=key.backend, verdicts=verdicts).verdicts


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a JSON object, which must have different names."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a field must not come twice")
    return dict(pairs)


def _file_stem(device_kind: str, backend: KernelName) -> str:
    return f"{re.sub('[^A-Za-z0-9]+', '_', device_kind)}-{backend}"

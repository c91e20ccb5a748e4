"""Checks versions, and the environment variables that change what JAX sees of a TPU.

JAX itself sets variables when it is imported, so the variables of the user are those
that the process was started with.
"""

import glob
import importlib.metadata
import os
import platform
import re
import socket
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from tpu_embedding.kernel_verdicts import installed_version
from tpu_embedding.tools.doctor.findings import Finding, Status

LIBRARIES: Final = (
    *("tpu-embedding", "jax", "jaxlib", "libtpu", "flax", "optax"),
    *("orbax-checkpoint", "numpy"),
)

DEVICE_FILES: Final = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
"""Patterns of the files by which a process opens TPU chips."""

_SET_BY_JAX: Final = (
    *("TPU_SKIP_MDS_QUERY", "LIBTPU_INIT_ARGS", "TPU_ML_PLATFORM"),
    *("TPU_ML_PLATFORM_VERSION", "GRPC_VERBOSITY", "TPU_LIBRARY_PATH"),
)
"""Variables that importing libtpu or JAX (`jax/_src/cloud_tpu_init.py`) changes."""


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of the libraries; None: not installed."""
    found = {name: installed_version(name) for name in LIBRARIES}
    return {"python": platform.python_version(), **found}


def tpu_device_files() -> list[str]:
    """Returns the device files of this host's TPU chips."""
    return sorted(path for pattern in DEVICE_FILES for path in glob.glob(pattern))


def user_environment() -> dict[str, str]:
    """Returns the environment without the changes that JAX made at its import."""
    environment = dict(os.environ)
    started_with = _variables_at_start()
    if started_with is None:
        return environment
    for name in _SET_BY_JAX:
        if name in started_with:
            environment[name] = started_with[name]
        else:
            environment.pop(name, None)
    return environment


def _variables_at_start() -> dict[str, str] | None:
    try:
        with open("/proc/self/environ", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    pairs = (entry.partition("=") for entry in text.split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}


def check_versions(requirements: list[str] | None = None) -> list[Finding]:
    """Checks that jaxlib and libtpu are those that jax asks for.

    Args:
      requirements: of jax, as in its metadata; None reads the installed jax's.
    """
    found = versions()
    listed = ", ".join(
        f"{name} {version or 'absent'}" for name, version in found.items()
    )
    findings = [Finding(check="versions", status="ok", text=listed)]
    if requirements is None:
        requirements = importlib.metadata.requires("jax") or []
    for name in ("jaxlib", "libtpu"):
        findings += _check_requirement(name, found[name], requirements, found["jax"])
    return findings


def _check_requirement(
    name: str, version: str | None, requirements: list[str], jax_version: str | None
) -> Iterator[Finding]:
    """Yields a finding about a library that jax's extra `tpu` asks for."""
    pattern = re.compile(rf"{name}([^;]+); *extra *== *[\"']tpu[\"']")
    matches = (pattern.fullmatch(text.strip()) for text in requirements)
    wanted = next((match[1].strip() for match in matches if match), None)
    way_out = "Install the versions that belong together: pip install -U 'jax[tpu]'."
    if version is None:
        text = f"{name} is not installed; compile reports and TPUs need it."
        yield Finding(check=name, status="ok", text=text)
    elif wanted is None:
        text = f"jax {jax_version} does not say which {name} it needs; found {version}."
        yield Finding(check=name, status="unmeasured", text=text)
    elif not all(_satisfies(version, part) for part in wanted.split(",")):
        text = f"jax {jax_version} needs {name}{wanted} for TPUs, but found {version}."
        yield Finding(check=name, status="failed", text=text, way_out=way_out)
    else:
        text = f"{name} {version} is one that jax {jax_version} needs."
        yield Finding(check=name, status="ok", text=text)


def _satisfies(version: str, specifier: str) -> bool:
    """Returns True if a version satisfies a specifier such as `==0.0.50.*`."""
    match = re.fullmatch(r"\s*(==|>=|<=)\s*([\d.]+?)(\.\*)?\s*", specifier)
    if match is None:
        return True  # A kind of specifier that says nothing about mismatches here.
    operator, wanted, is_prefix = match[1], _numbers(match[2]), match[3] is not None
    found = _numbers(version)
    if operator == "==":
        return found[: len(wanted)] == wanted if is_prefix else found == wanted
    return found >= wanted if operator == ">=" else found <= wanted


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


class _Variable(NamedTuple):
    """A variable that changes what JAX sees.

    Attributes:
      effect: of the variable, as a sentence after "which".
      status: on a host with TPU chips, if it is set.
      way_out: the thing to do about it.
    """

    effect: str
    status: Status
    way_out: str


_UNSET: Final = "Unset it, unless you set it on purpose."
_VARIABLES: Final[Mapping[str, _Variable]] = {
    "TPU_SKIP_MDS_QUERY": _Variable(
        "keeps libtpu from asking the metadata server for the slice, so chips or other "
        "hosts are not found",
        "failed",
        "Unset it: unset TPU_SKIP_MDS_QUERY.",
    ),
    "ALLOW_MULTIPLE_LIBTPU_LOAD": _Variable(
        "lets two processes open the same chips, which then fail or hang",
        "warning",
        _UNSET,
    ),
    "TPU_VISIBLE_DEVICES": _Variable("hides all other chips", "warning", _UNSET),
    "TPU_VISIBLE_CHIPS": _Variable("hides all other chips", "warning", _UNSET),
    "TPU_PROCESS_BOUNDS": _Variable(
        "sets the grid of processes that libtpu waits for", "warning", _UNSET
    ),
    "TPU_CHIPS_PER_PROCESS_BOUNDS": _Variable(
        "sets the chips that a process takes", "warning", _UNSET
    ),
    "TPU_LIBRARY_PATH": _Variable(
        "loads another libtpu than the installed one", "warning", _UNSET
    ),
    "LIBTPU_INIT_ARGS": _Variable(
        "changes options of libtpu and of its compiler", "warning", _UNSET
    ),
    "XLA_FLAGS": _Variable(
        "changes options of the compiler; an unknown one ends the process",
        "warning",
        _UNSET,
    ),
}
_OFF_VALUES: Final = ("", "0", "false", "False")
_NO_SWITCH: Final = ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD")


def check_variables(
    environment: Mapping[str, str], *, device_files: list[str]
) -> list[Finding]:
    """Checks the variables that switch off or change the detection of TPUs.

    Args:
      environment: of the user, from `user_environment`.
      device_files: from `tpu_device_files`; without any, variables are only listed.
    """
    findings = []
    for name, variable in _VARIABLES.items():
        value = environment.get(name, "")
        if not value or (name in _NO_SWITCH and value in _OFF_VALUES):
            continue
        finding = Finding(
            check=f"variable {name}",
            status=variable.status,
            text=f"{name}={value} is set, which {variable.effect}.",
            way_out=variable.way_out,
        )
        findings.append(finding if device_files else _without_chips(finding))
    platforms = _check_platforms(environment, device_files)
    findings += [*platforms, *_check_megascale(environment)]
    if not findings:
        text = "no variable changes the detection of TPUs"
        findings.append(Finding(check="variables", status="ok", text=text))
    return findings


def _without_chips(finding: Finding) -> Finding:
    text = f"{finding.text} This host has no TPU chips."
    return Finding(check=finding.check, status="ok", text=text)


def _check_platforms(
    environment: Mapping[str, str], device_files: list[str]
) -> Iterator[Finding]:
    for name in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME"):
        value = environment.get(name, "")
        if not value or "tpu" in value.split(","):
            continue
        finding = Finding(
            check=f"variable {name}",
            status="failed",
            text=f"{name}={value} is set, which hides the TPU from JAX.",
            way_out=f"Unset it: unset {name}.",
        )
        yield finding if device_files else _without_chips(finding)


_MEGASCALE: Final = (
    *("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"),
)


def _check_megascale(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding if variables of several slices are set, often left over."""
    values = {k: v for k, v in environment.items() if k.startswith("MEGASCALE_") and v}
    if not values:
        return
    listed = ", ".join(f"{name}={value}" for name, value in sorted(values.items()))
    missing = [name for name in _MEGASCALE if name not in values]
    address = values.get("MEGASCALE_COORDINATOR_ADDRESS", "")
    status: Status = "warning"
    text = f"libtpu waits for other slices, because of {listed}."
    if missing:
        status = "failed"
        text += f" They look stale: {', '.join(missing)} is missing."
    elif not _resolves(address):
        status = "failed"
        text += f" They look stale: the host {_host_of(address)!r} is not known."
    yield Finding(
        check="variables MEGASCALE_*",
        status=status,
        text=text,
        way_out="Unset them if this is a job of one slice; after a preemption, set "
        "them to the new coordinator.",
    )


def _host_of(address: str) -> str:
    return address.rpartition(":")[0] or address


def _resolves(address: str) -> bool:
    try:
        socket.getaddrinfo(_host_of(address), None)
    except OSError:
        return False
    return True

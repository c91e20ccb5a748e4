"""Checks versions, and the environment variables that change what JAX sees of a TPU.

JAX itself sets variables when it is imported, so the variables of the user are those
that the process was started with.
"""

import fnmatch
import glob
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from typing import Final

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
    """Lists the versions, and checks that libtpu is the one that jax asks for.

    Args:
      requirements: requirements of jax, as in its metadata; None reads those of the
        installed jax.
    """
    found = versions()
    listed = ", ".join(
        f"{name} {version or 'absent'}" for name, version in found.items()
    )
    findings = [Finding(check="versions", status="ok", text=listed)]
    if requirements is None:
        requirements = importlib.metadata.requires("jax") or []
    libtpu = found["libtpu"]
    for requirement in requirements:
        name, _, wanted = requirement.partition(";")[0].partition("==")
        if name.strip() != "libtpu" or libtpu is None:
            continue
        if fnmatch.fnmatchcase(libtpu, wanted.strip()):
            continue
        findings.append(
            Finding(
                check="libtpu",
                status="failed",
                text=f"jax {found['jax']} needs libtpu {wanted.strip()} for TPUs, but "
                f"found {libtpu}.",
                way_out="Install the versions that belong together: pip install -U "
                "'jax[tpu]'.",
            )
        )
    return findings


_HIDES_TPU: Final = "hides the TPU from JAX"
_EFFECTS: Final = {
    "JAX_PLATFORMS": _HIDES_TPU,
    "JAX_PLATFORM_NAME": _HIDES_TPU,
    "TPU_SKIP_MDS_QUERY": "keeps libtpu from asking the metadata server for the slice, "
    "so chips or other hosts are not found",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "lets two processes open the same chips, which then "
    "fail or hang",
    "TPU_VISIBLE_DEVICES": "hides all other chips",
    "TPU_VISIBLE_CHIPS": "hides all other chips",
    "TPU_PROCESS_BOUNDS": "sets the grid of processes that libtpu waits for",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "sets the chips that a process takes",
    "TPU_LIBRARY_PATH": "loads another libtpu than the installed one",
    "LIBTPU_INIT_ARGS": "changes options of libtpu and of its compiler",
    "XLA_FLAGS": "changes options of the compiler; an unknown one ends the process",
}
"""Effect of each variable that changes what JAX sees of a TPU."""

_FAILURES: Final = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "TPU_SKIP_MDS_QUERY")
"""Variables that leave no TPU; the others may be set on purpose."""

_SWITCHES: Final = ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD")
_OFF_VALUES: Final = ("0", "false", "False")


def check_variables(
    environment: Mapping[str, str], *, device_files: list[str]
) -> list[Finding]:
    """Checks the variables that switch off or change the detection of TPUs.

    Args:
      environment: the user's variables, from `user_environment`.
      device_files: files of TPU chips; without any, variables are only listed.
    """
    findings = []
    for name, effect in _EFFECTS.items():
        value = environment.get(name, "")
        is_off = name in _SWITCHES and value in _OFF_VALUES
        keeps_tpu = effect == _HIDES_TPU and "tpu" in value.split(",")
        if not value or is_off or keeps_tpu:
            continue
        check, text = f"variable {name}", f"{name}={value} is set, which {effect}."
        if not device_files:
            text += " This host has no TPU chips."
            findings.append(Finding(check=check, status="ok", text=text))
            continue
        status: Status = "failed" if name in _FAILURES else "warning"
        way_out = f"Unset it, unless you set it on purpose: unset {name}."
        findings.append(Finding(check=check, status=status, text=text, way_out=way_out))
    findings += _check_megascale(environment)
    if not findings:
        text = "no variable changes the detection of TPUs"
        findings.append(Finding(check="variables", status="ok", text=text))
    return findings


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
    text = f"libtpu waits for other slices, because of {listed}."
    if missing:
        text += f" They look stale: {', '.join(missing)} is missing."
    yield Finding(
        check="variables MEGASCALE_*",
        status="failed" if missing else "warning",
        text=text,
        way_out="Unset them if this is a job of one slice; after a preemption, set "
        "them to the new coordinator.",
    )

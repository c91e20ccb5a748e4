"""Checks versions, and the environment variables that change what JAX sees of a TPU."""

import fnmatch
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Iterator, Mapping
from typing import Final

from tpu_embedding.kernel_verdicts import installed_version
from tpu_embedding.tools.doctor.findings import Finding, Status

_LIBRARIES: Final = (
    *("tpu-embedding", "jax", "jaxlib", "libtpu", "flax", "optax"),
    *("orbax-checkpoint", "numpy"),
)

_SET_BY_JAX: Final = (
    *("TPU_SKIP_MDS_QUERY", "LIBTPU_INIT_ARGS", "TPU_ML_PLATFORM"),
    *("TPU_ML_PLATFORM_VERSION", "GRPC_VERBOSITY", "TPU_LIBRARY_PATH"),
)
"""Variables that importing libtpu or JAX (`jax/_src/cloud_tpu_init.py`) changes."""

_HIDES_TPU: Final = "hides the TPU from JAX"

_EFFECTS: Final[Mapping[str, tuple[Status, str]]] = {
    "JAX_PLATFORMS": ("failed", _HIDES_TPU),
    "JAX_PLATFORM_NAME": ("failed", _HIDES_TPU),
    "TPU_SKIP_MDS_QUERY": (
        "failed",
        "keeps libtpu from asking the metadata server for the slice, so chips or other "
        "hosts are not found",
    ),
    "ALLOW_MULTIPLE_LIBTPU_LOAD": (
        "warning",
        "lets two processes open the same chips, which then fail or hang",
    ),
    "TPU_VISIBLE_DEVICES": ("warning", "hides all other chips"),
    "TPU_VISIBLE_CHIPS": ("warning", "hides all other chips"),
    "TPU_PROCESS_BOUNDS": (
        "warning",
        "sets the grid of processes that libtpu waits for",
    ),
    "TPU_CHIPS_PER_PROCESS_BOUNDS": (
        "warning",
        "sets the chips that a process takes",
    ),
    "TPU_LIBRARY_PATH": ("warning", "loads another libtpu than the installed one"),
    "LIBTPU_INIT_ARGS": ("warning", "changes options of libtpu and of its compiler"),
    "XLA_FLAGS": (
        "warning",
        "changes options of the compiler; an unknown one ends the process",
    ),
}
"""Effect of each variable that changes what JAX sees of a TPU. A warning may be set on
purpose."""

_SWITCHES: Final = ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD")
_OFF_VALUES: Final = ("0", "false", "False")

_MEGASCALE: Final = (
    *("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"),
)
"""Variables of a job of several slices. libtpu reads all of them. JAX multiplies the
processes by the number of slices, whether or not the address is set."""


def user_environment() -> dict[str, str]:
    """Returns the environment without the changes that JAX made at its import."""
    try:
        text = pathlib.Path("/proc/self/environ").read_text("utf-8", "replace")
    except OSError:
        return dict(os.environ)
    at_start = (entry.partition("=") for entry in text.split("\0"))
    unchanged = {k: v for k, v in os.environ.items() if k not in _SET_BY_JAX}
    return unchanged | {name: v for name, _, v in at_start if name in _SET_BY_JAX}


def check_versions(requirements: list[str] | None = None) -> list[Finding]:
    """Lists the versions, and checks that libtpu is the one that jax asks for.

    Args:
      requirements: requirements of jax, as in its metadata; None reads those of the
        installed jax.
    """
    found = {name: installed_version(name) for name in _LIBRARIES}
    listed = [f"{name} {version or 'absent'}" for name, version in found.items()]
    text = ", ".join([f"python {platform.python_version()}", *listed])
    findings = [Finding(check="versions", status="ok", text=text)]
    if requirements is None:
        requirements = importlib.metadata.requires("jax") or []
    libtpu = found["libtpu"]
    for requirement in requirements:
        name, _, wanted = requirement.partition(";")[0].replace(" ", "").partition("==")
        if name != "libtpu" or libtpu is None or fnmatch.fnmatchcase(libtpu, wanted):
            continue
        text = f"jax {found['jax']} needs libtpu {wanted} for TPUs, but found {libtpu}."
        way_out = "Install versions that belong together: pip install -U 'jax[tpu]'."
        findings.append(
            Finding(check="libtpu", status="failed", text=text, way_out=way_out)
        )
    return findings


def check_variables(
    environment: Mapping[str, str], *, device_files: list[str]
) -> list[Finding]:
    """Checks the variables that switch off or change the detection of TPUs.

    Args:
      environment: the user's variables, from `user_environment`.
      device_files: files of TPU chips; without any, variables are only listed.
    """
    findings = []
    for name, (status, effect) in _EFFECTS.items():
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
        way_out = f"Unset it, unless you set it on purpose: unset {name}."
        findings.append(Finding(check=check, status=status, text=text, way_out=way_out))
    findings += _check_megascale(environment)
    if not findings:
        text = "no variable changes the detection of TPUs"
        findings.append(Finding(check="variables", status="ok", text=text))
    return findings


def _check_megascale(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding if variables of several slices are set, often left over."""
    values = {name: environment[name] for name in _MEGASCALE if environment.get(name)}
    if not values:
        return
    listed = ", ".join(f"{name}={value}" for name, value in values.items())
    text = f"The runtime waits for other slices, because of {listed}."
    missing = [name for name in _MEGASCALE if name not in values]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        text += f" They look stale: {', '.join(missing)} {verb} missing."
    yield Finding(
        check="variables MEGASCALE_*",
        status="failed" if missing else "warning",
        text=text,
        way_out=f"In a job of one slice: unset {' '.join(_MEGASCALE)}. After a "
        "preemption, set them to the new coordinator.",
    )

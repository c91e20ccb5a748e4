"""Checks versions, and the environment variables that change what JAX sees of a TPU."""

import dataclasses
import fnmatch
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Mapping
from typing import Final, Literal

Status = Literal["ok", "warning", "FAILED"]

_LIBRARIES: Final = (
    *("tpu-embedding", "jax", "jaxlib", "libtpu", "flax", "optax"),
    *("orbax-checkpoint", "numpy"),
)

_SET_BY_JAX: Final = (
    *("TPU_SKIP_MDS_QUERY", "LIBTPU_INIT_ARGS", "TPU_ML_PLATFORM"),
    *("TPU_ML_PLATFORM_VERSION", "GRPC_VERBOSITY", "TPU_LIBRARY_PATH"),
)
"""Variables that importing libtpu or JAX (`jax/_src/cloud_tpu_init.py`) changes."""

_EFFECTS: Final[Mapping[str, tuple[Status, str]]] = {
    "JAX_PLATFORMS": ("FAILED", "hides the TPU from JAX"),
    "JAX_PLATFORM_NAME": ("FAILED", "hides the TPU from JAX"),
    "TPU_SKIP_MDS_QUERY": (
        "FAILED",
        "keeps libtpu from asking the metadata server for the slice, so chips or other "
        "hosts are not found",
    ),
    "ALLOW_MULTIPLE_LIBTPU_LOAD": (
        "warning",
        "lets two processes open the same chips, which then fail or hang",
    ),
    "TPU_VISIBLE_DEVICES": ("warning", "hides all other chips"),
    "TPU_VISIBLE_CHIPS": ("warning", "hides all other chips"),
    "TPU_PROCESS_BOUNDS": ("warning", "sets the grid of processes that libtpu awaits"),
    "TPU_LIBRARY_PATH": ("warning", "loads another libtpu than the installed one"),
    "LIBTPU_INIT_ARGS": ("warning", "changes options of libtpu and of its compiler"),
    "XLA_FLAGS": ("warning", "changes options of the compiler"),
    "MEGASCALE_COORDINATOR_ADDRESS": ("warning", "makes libtpu wait for other slices"),
    "MEGASCALE_NUM_SLICES": ("warning", "makes libtpu wait for other slices"),
}
"""Effect of each variable that changes what JAX sees of a TPU. A warning may be set on
purpose."""

_OFF_VALUES: Final = ("", "0", "false", "False")


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
      check: what was checked.
      status: its result. Only `"FAILED"` changes the exit status.
      text: what was found.
      way_out: what to do about it, or "".
    """

    check: str
    status: Status
    text: str
    way_out: str = ""


def user_environment() -> dict[str, str]:
    """Returns the environment without the changes that JAX made at its import."""
    try:
        text = pathlib.Path("/proc/self/environ").read_text("utf-8", "replace")
    except OSError:
        return dict(os.environ)
    at_start = (entry.partition("=") for entry in text.split("\0"))
    unchanged = {k: v for k, v in os.environ.items() if k not in _SET_BY_JAX}
    return unchanged | {name: v for name, _, v in at_start if name in _SET_BY_JAX}


def check_versions() -> list[Finding]:
    """Lists the versions, and checks that libtpu is the one that jax asks for."""
    found = {name: _version(name) for name in _LIBRARIES}
    listed = (f"{name} {version or 'absent'}" for name, version in found.items())
    text = ", ".join((f"python {platform.python_version()}", *listed))
    findings = [Finding("versions", "ok", text)]
    for requirement in importlib.metadata.requires("jax") or ():
        name, _, wanted = requirement.partition(";")[0].replace(" ", "").partition("==")
        libtpu = found["libtpu"]
        if name == "libtpu" and libtpu and not fnmatch.fnmatchcase(libtpu, wanted):
            text = f"jax {found['jax']} needs libtpu {wanted}, but found {libtpu}."
            findings.append(
                Finding("libtpu", "FAILED", text, "pip install -U 'jax[tpu]'")
            )
    return findings


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_variables(environment: Mapping[str, str], chips: list[str]) -> list[Finding]:
    """Checks the variables that switch off or change the detection of TPUs.

    Args:
      environment: the user's variables, from `user_environment`.
      chips: files of this host's TPU chips; without any, variables are only listed.
    """
    findings = []
    for name, (status, effect) in _EFFECTS.items():
        value = environment.get(name, "")
        if value in _OFF_VALUES or "tpu" in value.split(","):
            continue
        text = f"{name}={value} is set, which {effect}."
        if chips:
            way_out = f"Unless you set it on purpose: unset {name}"
            findings.append(Finding("variable", status, text, way_out))
        else:
            findings.append(
                Finding("variable", "ok", f"{text} This host has no chips.")
            )
    return findings

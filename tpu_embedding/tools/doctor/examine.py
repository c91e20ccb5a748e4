"""Runs all checks, from versions and environment variables to devices and rows."""

import contextlib
import dataclasses
import fnmatch
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Final, Literal

from tpu_embedding.argument_checks import invalid
from tpu_embedding.hardware import (
    EXAMPLE_TOPOLOGIES,
    GIBIBYTE,
    hardware_by_name,
    hardware_of_kind,
)
from tpu_embedding.host_without_tpus import tpu_device_files
from tpu_embedding.sparse_core.operations import unavailable_reason
from tpu_embedding.tools.doctor.cases import CASES

ANSWER: Final = "doctor's answer: "
"""Prefix of the line with the answer in a child's output."""

Status = Literal["ok", "warning", "FAILED"]

_LIBRARIES: Final = (
    "tpu-embedding jax jaxlib libtpu flax optax orbax-checkpoint numpy".split()
)

_SET_BY_JAX: Final = (
    "TPU_SKIP_MDS_QUERY LIBTPU_INIT_ARGS TPU_ML_PLATFORM TPU_ML_PLATFORM_VERSION "
    "GRPC_VERBOSITY TPU_LIBRARY_PATH"
).split()
"""Variables that libtpu and JAX change on import (`jax/_src/cloud_tpu_init.py`)."""

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
        "lets two processes open the same chips and then fail or hang",
    ),
    "TPU_VISIBLE_DEVICES": ("warning", "hides all other chips"),
    "TPU_VISIBLE_CHIPS": ("warning", "hides all other chips"),
    "TPU_PROCESS_BOUNDS": ("warning", "sets the process grid that libtpu waits for"),
    "TPU_LIBRARY_PATH": ("warning", "loads a libtpu other than the installed one"),
    "LIBTPU_INIT_ARGS": ("warning", "changes options of libtpu and its compiler"),
    "XLA_FLAGS": ("warning", "changes options of the compiler"),
    "MEGASCALE_COORDINATOR_ADDRESS": ("warning", "makes libtpu wait for other slices"),
    "MEGASCALE_NUM_SLICES": ("warning", "makes libtpu wait for other slices"),
}
"""Effects of variables that change how JAX sees a TPU. Variables with status "warning"
may be set on purpose."""

_SET_BY_GKE: Final = ("TPU_SKIP_MDS_QUERY", "TPU_PROCESS_BOUNDS")
"""Variables that GKE sets in each pod with TPUs. It also sets others for the slice."""

_OFF_VALUES: Final = ("", "0", "false", "False")


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check. Only the status "FAILED" changes the exit status."""

    check: str
    status: Status
    text: str
    fix: str = ""
    # JSON values by name.
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _finding(check: str, is_right: bool, text: str, fix: str) -> Finding:

    return (
        Finding(check, "ok", text) if is_right else Finding(check, "FAILED", text, fix)
    )


def user_environment() -> dict[str, str]:
    """Makes a copy of the environment without JAX's changes."""
    # The kernel keeps the environment that the process started with.
    try:
        text = pathlib.Path("/proc/self/environ").read_text("utf-8", "replace")
    except OSError:
        return dict(os.environ)
    # Restores only variables that JAX changes. Other variables keep their values.
    at_start = (entry.partition("=") for entry in text.split("\0"))
    unchanged = {k: v for k, v in os.environ.items() if k not in _SET_BY_JAX}
    return unchanged | {name: v for name, _, v in at_start if name in _SET_BY_JAX}


def check_versions() -> Iterator[Finding]:
    """Lists versions, and checks that jax supports the installed libtpu."""
    installed: dict[str, str | None] = dict.fromkeys(_LIBRARIES)
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    listed = (f"{name} {version or 'absent'}" for name, version in installed.items())
    text = ", ".join((f"python {platform.python_version()}", *listed))
    yield Finding("versions", "ok", text, figures=installed)
    # The extra `tpu` of jax pins libtpu's version, but a different version may be
    # installed.
    for requirement in importlib.metadata.requires("jax") or ():
        name, _, wanted = requirement.partition(";")[0].replace(" ", "").partition("==")
        libtpu = installed["libtpu"]
        if name == "libtpu" and libtpu and not fnmatch.fnmatchcase(libtpu, wanted):
            text = f"jax {installed['jax']} needs libtpu {wanted}, found {libtpu}."
            yield Finding("libtpu", "FAILED", text, "pip install -U 'jax[tpu]'")


def check_variables(
    environment: Mapping[str, str], chips: list[str]
) -> Iterator[Finding]:
    """Checks variables that change how JAX sees TPUs. With no `chips`, all are ok."""
    for name, (status, effect) in _EFFECTS.items():
        value = environment.get(name, "")
        if value in _OFF_VALUES or "tpu" in value.split(","):
            continue
        if name in _SET_BY_GKE and "KUBERNETES_SERVICE_HOST" in environment:
            continue
        text = f"{name}={value} is set, which {effect}."
        fix = f"Unless you set it on purpose: unset {name}"
        if not chips:
            status, text, fix = "ok", f"{text} This host has no TPU chips.", ""
        yield Finding("variable", status, text, fix)


_MIN_MEMORY_SHARE: Final = 0.9
"""Minimum share of a device's memory that the runtime should leave for programs."""


def ask_child(
    question: list[str], environment: Mapping[str, str], seconds: float
) -> dict[str, Any] | str:
    """Asks a child process. If the child failed, the result is a text that says why."""
    # Only one process at a time can use a TPU, and a program may hang or halt the
    # TPU. So all work on the devices happens in child processes with a time limit.
    command = [sys.executable, "-m", "tpu_embedding.tools.doctor.child", *question]
    try:
        child = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return f"hangs: no result in {seconds:g} s; killed"
    status = child.returncode
    # Libraries may also print lines, even after the answer.
    answers = [x for x in child.stdout.splitlines() if x.startswith(ANSWER)]
    if status == 0 and answers:
        return json.loads(answers[-1].removeprefix(ANSWER))
    text = f"ended with exit status {status}" if status else "ended without an answer"
    if status < 0:
        text = f"crashed with {signal.Signals(-status).name}"
    lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
    return f"{text}: {lines[-1][:300]}" if lines else text


def parse_expectation(text: str) -> tuple[str | None, int]:
    """Parses `--expect` into a generation, if it names one, and a device count.

    Example:
      >>> parse_expectation("v5e:2x4"), parse_expectation("16")
      (('v5e', 8), (None, 16))
    """
    name, _, size = text.rpartition(":")
    if re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5})*", size, re.ASCII) is None:
        example = " or ".join(EXAMPLE_TOPOLOGIES)
        rule = f"be a number of devices, or a generation and its chips, like {example}"
        raise invalid("--expect", rule, text)
    per_chip = hardware_by_name(name).devices_per_chip if name else 1
    return name or None, math.prod(map(int, size.split("x"))) * per_chip


def check_devices(
    devices: dict[str, Any] | str, expected: str | None, chips: list[str]
) -> Iterator[Finding]:
    """Checks the devices that JAX found."""
    if isinstance(devices, str):
        fix = (
            "Another process may use the TPU. On a slice of several hosts, start the "
            "doctor on all of them at the same time, because each waits for the rest."
        )
        text = f"JAX did not start: {devices}"
        yield Finding("devices", "FAILED", text, fix)
        return
    platform, kinds = devices["platform"], devices["kinds"]
    listed = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    yield Finding("devices", "ok", f"JAX runs on {listed}.", figures=devices)
    if platform != "tpu" and chips:
        text = f"JAX runs on {platform}, although this host has {', '.join(chips)}."
        fix = (
            "Run pip install '.[tpu]' in a clone of the repository, and unset the "
            "variables above."
        )
        yield Finding("fall-back", "FAILED", text, fix)
    try:
        hardware = hardware_of_kind(platform, kinds[0])
    except ValueError:
        hardware = None
    if expected is not None:
        name, count = parse_expectation(expected)
        is_kind = name is None or (hardware is not None and hardware.name == name)
        text = f"expected {expected}: {count} devices, found {listed}"
        fix = "Start the doctor on all hosts, and check the accelerator type."
        yield _finding("expected", is_kind and len(kinds) == count, text, fix)
    capacity = None if hardware is None else hardware.device_memory_bytes
    if capacity is None:
        return
    for limit in set(devices["memory"]):
        if limit is None:
            text = "the devices do not report their memory"
            yield Finding("memory", "warning", text)
            continue
        text = f"{limit / GIBIBYTE:.1f} of {capacity / GIBIBYTE:.0f} GiB per device"
        is_enough = limit >= _MIN_MEMORY_SHARE * capacity
        yield _finding("memory", is_enough, text, "unset LIBTPU_INIT_ARGS XLA_FLAGS")


def check_holders(
    chips: list[str], processes: pathlib.Path = pathlib.Path("/proc")
) -> Iterator[Finding]:
    """Finds other processes that use the chips."""
    for folder in sorted(processes.glob("[0-9]*")):
        try:
            opened = {os.readlink(link) for link in (folder / "fd").iterdir()}
        except OSError:
            continue  # The process ended, or belongs to another user.
        if folder.name != str(os.getpid()) and not opened.isdisjoint(chips):
            text = f"Process {folder.name} uses a TPU, as only one process can"
            yield Finding("TPU in use", "FAILED", text, f"kill {folder.name}")


_EMULATED_DEVICES: Final = 4
"""Number of devices that children emulate if JAX has only one CPU device.

Exchanging rows needs several devices.
"""


def examine(
    expected: str | None,
    seconds: float,
    timings: bool = False,
    profiles: pathlib.Path | None = None,
) -> Iterator[Finding]:
    """Yields the findings of all checks; `seconds` limits each child process."""
    environment = user_environment()
    chips = tpu_device_files()
    yield from check_versions()
    yield from check_variables(environment, chips)
    yield from check_holders(chips)
    devices = ask_child(["devices"], environment, seconds)
    yield from check_devices(devices, expected, chips)
    if not isinstance(devices, dict):
        return
    platform, kinds = devices["platform"], devices["kinds"]
    if platform == "cpu" and len(kinds) == 1:
        environment = environment | {"JAX_NUM_CPU_DEVICES": str(_EMULATED_DEVICES)}
    for backend in ("xla", "sparse_core") if timings else ():
        profile = "" if profiles is None else str(profiles / f"profile_{backend}")
        question = ["time", backend, profile]
        yield _ask_for_finding(
            f"step of many tables, {backend}", question, environment, seconds
        )
    yield _ask_for_finding("sort", ["sort"], environment, seconds)
    xla_times = yield from _check_cases("rows", "xla", environment, seconds)
    check = "SparseCores"
    if platform != "tpu":
        text = (
            f"{platform} has none. The next checks run their twin, the same operations "
            "in plain JAX, at a smaller size. They say nothing about a TPU."
        )
        yield Finding(check, "ok", text)
        yield from _check_cases("twin", "sparse_core", environment, seconds)
        return
    try:
        problem = unavailable_reason(hardware_of_kind(platform, kinds[0]), len(kinds))
    except ValueError as error:
        problem = str(error)
    if problem is not None:
        yield Finding(check, "ok", f"not compared: {problem}")
        return
    core_times = yield from _check_cases(check, "sparse_core", environment, seconds)
    if ratios := [xla_times[x] / core_times[x] for x in core_times if x in xla_times]:
        text = (
            f"sparse_core is {min(ratios):.2f} to {max(ratios):.2f} times as fast as "
            "XLA's gathers and scatters"
        )
        yield Finding("backend", "ok", text)


def _check_cases(
    check: str, backend: str, environment: Mapping[str, str], seconds: float
) -> Generator[Finding, None, dict[str, float]]:
    """Runs the cases. The result has the milliseconds per step of successful cases."""
    times = {}
    for name in (name for name, case in CASES.items() if backend in case.backends):
        question = ["rows", name, backend]
        finding = _ask_for_finding(f"{check}, {name}", question, environment, seconds)
        yield finding
        if finding.status == "ok":
            times[name] = finding.figures["step"]
    return times


def _ask_for_finding(
    check: str, question: list[str], environment: Mapping[str, str], seconds: float
) -> Finding:
    answer = ask_child(question, environment, seconds)
    if isinstance(answer, str):
        answer = {"problem": answer}
    if problem := answer["problem"]:
        fix = "Please report this with the whole output."
        return Finding(check, "FAILED", problem, fix, answer)
    return Finding(check, "ok", answer["text"], figures=answer)

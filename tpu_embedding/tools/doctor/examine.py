"""Runs all checks of the doctor, and prints their findings as they come."""

import dataclasses
import datetime
import time
from collections.abc import Callable, Mapping
from typing import Final

from tpu_embedding.kernel_verdicts import (
    KernelName,
    Verdict,
    current_key,
    load_verdicts,
    save_verdicts,
)
from tpu_embedding.tools.doctor import report as reports
from tpu_embedding.tools.doctor.devices import (
    Expectation,
    FoundDevices,
    check_devices,
    check_holders,
    check_host,
    expectation_of_environment,
    find_devices,
)
from tpu_embedding.tools.doctor.environment import (
    check_variables,
    check_versions,
    tpu_device_files,
    user_environment,
)
from tpu_embedding.tools.doctor.findings import Finding
from tpu_embedding.tools.doctor.kernel_checks import (
    CheckSettings,
    PartRun,
    check_rows,
    findings_on_rows,
    kernels_on,
    make_verdicts,
)
from tpu_embedding.tools.doctor.ports import DEFAULT_PORT, check_hosts, check_loopback
from tpu_embedding.tools.doctor.protocol import Tier

_SECONDS: Final[Mapping[Tier, float]] = {"quick": 40.0, "full": 100.0}
"""Deadline of the cases of rows on a chip: less than a minute, and than two minutes,
together with the other checks."""

_CPU_SECONDS: Final = 48.0
"""Deadline on a CPU, where the cases are small."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examination:
    """The settings of one run of the doctor.

    Attributes:
      tier: `"quick"` has one kind of row, `"full"` each.
      expected: devices that should be there; None: those that the environment names.
      hosts: of the job, the coordinator first; empty: this host alone.
      host_index: place of this host among them; None finds out.
      port: of the coordinator.
      num_devices: emulated CPU devices; None: the devices of the machine.
      seconds: total time of the cases of rows; None: the tier's.
    """

    tier: Tier = "full"
    expected: Expectation | None = None
    hosts: tuple[str, ...] = ()
    host_index: int | None = None
    port: int = DEFAULT_PORT
    num_devices: int | None = None
    seconds: float | None = None


def examine(
    examination: Examination,
    print_line: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> reports.Report:
    """Runs all checks, and prints findings and tables.

    Args:
      examination: the settings.
      print_line: prints some lines of text.
      environment: of the user; None: that of this process.
    """
    begin = time.perf_counter()
    variables = dict(user_environment() if environment is None else environment)
    findings: list[Finding] = []

    def add(*new: Finding) -> None:
        findings.extend(new)
        for finding in new:
            print_line(reports.format_finding(finding))

    files = tpu_device_files() if examination.num_devices is None else []
    add(*check_versions(), *check_variables(variables, device_files=files))
    add(*check_holders(files), *check_host(), *_check_ports(examination))
    if examination.num_devices is not None:
        variables["JAX_PLATFORMS"] = "cpu"
        variables["JAX_NUM_CPU_DEVICES"] = str(examination.num_devices)
    found, problem = find_devices(variables)
    expected = examination.expected or expectation_of_environment(variables)
    add(*check_devices(found, problem, expected, device_files=files))
    runs: list[PartRun] = []
    verdicts: list[Verdict] = []
    if found is not None:
        runs = _run_rows(examination, found, variables, print_line)
        add(*findings_on_rows(runs))
        verdicts, saved = _save(found, runs)
        add(*saved)
        _print_tables(found, runs, verdicts, print_line)
    return reports.Report(
        tier=examination.tier,
        created=datetime.datetime.now(datetime.UTC),
        seconds=time.perf_counter() - begin,
        findings=tuple(findings),
        found=found,
        runs=tuple(runs),
        verdicts=tuple(verdicts),
        hosts=examination.hosts,
    )


def _check_ports(examination: Examination) -> list[Finding]:
    if not examination.hosts:
        return check_loopback(examination.port)
    return check_hosts(
        examination.hosts, examination.port, index=examination.host_index
    )


def _run_rows(
    examination: Examination,
    found: FoundDevices,
    variables: Mapping[str, str],
    print_line: Callable[[str], None],
) -> list[PartRun]:
    tier, seconds = examination.tier, examination.seconds
    if seconds is None:
        seconds = _SECONDS[tier]
        if found.platform == "cpu":
            seconds = min(seconds, _CPU_SECONDS)
    settings = CheckSettings(tier=tier, seconds=seconds)

    def announce(backend: str, part: str) -> None:
        print_line(f"{'':10}  {part} of {backend}, in a process of its own ...")

    return check_rows(found, settings, variables, on_part=announce)


def _save(
    found: FoundDevices, runs: list[PartRun]
) -> tuple[list[Verdict], list[Finding]]:
    """Stores the verdicts on the kernels."""
    kernels = kernels_on(found)
    verdicts = make_verdicts(runs, datetime.datetime.now(datetime.UTC).date())
    if kernels is not None and not verdicts:
        verdicts = _withdrawn(found.kinds[0], kernels)
    if kernels is None or not verdicts:
        text = 'no kernels to judge on this device; "auto" runs XLA'
        status = "ok" if kernels is None else "unmeasured"
        return [], [Finding(check="verdicts", status=status, text=text)]
    try:
        path = save_verdicts(current_key(found.kinds[0], kernels), verdicts)
    except OSError as error:
        finding = Finding(
            check="verdicts",
            status="warning",
            text=f"the verdicts cannot be stored: {error}",
            way_out="Set TPU_EMBEDDING_VERDICTS to a directory that can be written.",
        )
        return verdicts, [finding]
    text = f"{len(verdicts)} verdicts for {found.kinds[0]} are stored in {path}"
    # An earlier problem may have outlived this check: show what counts.
    stored = load_verdicts(found.kinds[0], kernels)
    known = [stored.find(v.capability) or v for v in verdicts]
    return known, [Finding(check="verdicts", status="ok", text=text)]


def _withdrawn(device_kind: str, kernels: KernelName) -> list[Verdict]:
    """Returns the stored verdicts, none of which holds: their check does not start."""
    return [
        dataclasses.replace(
            verdict, is_equal=False, problem="the last check did not start"
        )
        for verdict in load_verdicts(device_kind, kernels).verdicts
        if verdict.is_equal
    ]


def _print_tables(
    found: FoundDevices,
    runs: list[PartRun],
    verdicts: list[Verdict],
    print_line: Callable[[str], None],
) -> None:
    tables = (
        reports.format_times(runs, found.hardware),
        reports.format_verdicts(verdicts),
    )
    for table in tables:
        if table is not None:
            print_line(f"\n{table}")

"""Runs all checks of the doctor, and prints their findings as they come."""

import datetime
from collections.abc import Callable

from tpu_embedding.host_without_tpus import tpu_device_files
from tpu_embedding.kernel_verdicts import Verdict
from tpu_embedding.tools.doctor.devices import (
    Expectation,
    FoundDevices,
    check_devices,
    check_holders,
    expectation_of_environment,
    find_devices,
)
from tpu_embedding.tools.doctor.environment import (
    check_variables,
    check_versions,
    user_environment,
)
from tpu_embedding.tools.doctor.findings import Finding
from tpu_embedding.tools.doctor.kernel_checks import (
    CaseRun,
    Tier,
    findings_on_cases,
    format_times,
    make_verdicts,
    run_cases,
)
from tpu_embedding.tools.doctor.verdict_store import store_verdicts


def examine(
    print_line: Callable[[str], None],
    *,
    tier: Tier = "full",
    expected: Expectation | None = None,
    num_devices: int | None = None,
) -> list[Finding]:
    """Runs all checks, stores the verdicts, and returns the findings.

    Args:
      print_line: prints a finding, or the table of times.
      tier: quick or full.
      expected: devices that should be there; None: those that the environment names.
      num_devices: emulated CPU devices; None: the devices of the machine.
    """
    findings: list[Finding] = []

    def add(*new: Finding) -> None:
        findings.extend(new)
        for finding in new:
            print_line(str(finding))

    variables = user_environment()
    files = tpu_device_files() if num_devices is None else []
    add(*check_versions(), *check_variables(variables, device_files=files))
    add(*check_holders(files))
    if num_devices is not None:
        variables["JAX_PLATFORMS"] = "cpu"
        variables["JAX_NUM_CPU_DEVICES"] = str(num_devices)
    expected = expected or expectation_of_environment(variables)
    found = find_devices(variables)
    add(*check_devices(found, expected, device_files=files))
    if isinstance(found, str):
        return findings
    print_line(f"{'':10}  lookups and updates, in a process of their own ...")
    run = run_cases(found, tier, variables)
    verdicts = make_verdicts(run, datetime.datetime.now(datetime.UTC).date())
    add(*findings_on_cases(run), _store(found, run, tier, verdicts))
    if times := format_times(run, verdicts):
        print_line(f"\n{times}")
    return findings


def _store(
    found: FoundDevices, run: CaseRun, tier: Tier, verdicts: list[Verdict]
) -> Finding:
    """Stores the verdicts; returns a finding that says where."""
    if run.kernels is None:
        text = 'no kernels to judge on this device; "auto" runs XLA'
        return Finding(check="verdicts", status="ok", text=text)
    kind, is_complete = found.kinds[0], tier == "full"
    try:
        path = store_verdicts(kind, run.kernels, verdicts, is_complete=is_complete)
    except OSError as error:
        text = f"the verdicts cannot be stored: {error}"
        way_out = "Set TPU_EMBEDDING_VERDICTS to a directory that can be written."
        return Finding(check="verdicts", status="warning", text=text, way_out=way_out)
    text = f"{len(verdicts)} verdicts for {kind} are stored in {path}"
    if not is_complete:
        text = f"only problems are stored, in {path}; the full check allows kernels"
    return Finding(check="verdicts", status="ok", text=text)

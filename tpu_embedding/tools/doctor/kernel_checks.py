"""Runs the cases of rows in child processes, and turns their results into verdicts."""

import concurrent.futures
import dataclasses
import datetime
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import jax

from tpu_embedding.kernel_verdicts import (
    KernelName,
    Verdict,
    direction_of,
    rows_of,
)
from tpu_embedding.rows.kernels.kernel_access import Backend
from tpu_embedding.tools.doctor.devices import FoundDevices
from tpu_embedding.tools.doctor.findings import Finding
from tpu_embedding.tools.doctor.isolated import Deadlines, IsolatedRun, run_isolated
from tpu_embedding.tools.doctor.protocol import (
    SPEED_RATIO,
    CaseEnded,
    Event,
    Part,
    Tier,
)

CHILD: Final = (sys.executable, "-m", "tpu_embedding.tools.doctor.child")
"""The command of the child, without its options."""

SEEDS: Final = "0,1"

_SHARES: Final = (0.4, 0.6, 1.0)
"""Shares of the time that is left, which XLA's results, the kernels' results and the
timings may take on a chip. Without a timing, no kernel is used."""


_CACHE_ALL: Final = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""Makes JAX keep each program, however small."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartRun:
    """The run of one part for one backend.

    Attributes:
      backend: that the cases ran on.
      part: correctness or speed.
      run: the results.
    """

    backend: Backend
    part: Part
    run: IsolatedRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """The effort of the checks of kernels.

    Attributes:
      tier: quick or full.
      seconds: deadline of all cases together.
      case_seconds: deadline of one case, with its compilation.
      child: command of the child, without its options.
    """

    tier: Tier
    seconds: float
    case_seconds: float = 60.0
    child: Sequence[str] = CHILD


def kernels_on(found: FoundDevices) -> KernelName | None:
    """Returns the backend that runs kernels on devices; None: none does."""
    if jax.__version_info__ < (0, 12):
        return None
    if found.platform == "cpu":
        return "interpreter"
    hardware = found.hardware
    if found.platform == "tpu" and hardware and hardware.num_sparse_cores > 0:
        return "sparse_core"
    return None


def check_rows(
    found: FoundDevices,
    settings: CheckSettings,
    environment: Mapping[str, str],
    on_event: Callable[[Event], None] = lambda event: None,
    on_part: Callable[[Backend, Part], None] = lambda backend, part: None,
) -> list[PartRun]:
    """Runs all cases of rows: XLA's results, the kernels' results, and times.

    On a CPU the parts run at the same time, each on a core. On a chip they share a
    cache of compiled programs, and compile many at once (`compile_ahead.py`).

    Args:
      found: the devices.
      settings: tier and deadlines.
      environment: of the child.
      on_event: called for each event of a child.
      on_part: called before each part.
    """
    kernels = kernels_on(found)
    parts: list[tuple[Backend, Part]] = [("xla", "correctness")]
    if kernels is not None:
        parts.append((kernels, "correctness"))
    parts.append((kernels or "xla", "speed"))
    end = time.monotonic() + settings.seconds
    cancelled = threading.Event()

    def run(
        backend: Backend, part: Part, share: float, variables: Mapping[str, str]
    ) -> PartRun:
        on_part(backend, part)
        command = [*settings.child, "--backend", backend, "--part", part]
        command += ["--tier", settings.tier, "--seeds", SEEDS]
        left = max(1.0, end - time.monotonic())
        results = run_isolated(
            command,
            Deadlines(case=settings.case_seconds, total=share * left),
            environment={**environment, **variables},
            on_event=on_event,
            cancelled=cancelled,
        )
        return PartRun(backend=backend, part=part, run=results)

    if found.platform != "cpu":
        # A chip belongs to one process at a time, and times need it alone.
        shares = _SHARES[-len(parts) :]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            variables = {**_CACHE_ALL, "JAX_COMPILATION_CACHE_DIR": directory}
            return [
                run(backend, part, share, variables)
                for (backend, part), share in zip(parts, shares, strict=True)
            ]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            return list(pool.map(lambda part: run(part[0], part[1], 1.0, {}), parts))
        except BaseException:
            cancelled.set()
            raise


def make_verdicts(runs: Sequence[PartRun], date: datetime.date) -> list[Verdict]:
    """Returns a verdict on each capability of the kernels that a check should cover.

    A failure of a whole step, or of an exchange, counts for all capabilities that take
    part in it, unless one of them failed on its own and so explains the failure. A case
    that did not run counts for all capabilities that it could have refused.

    Args:
      runs: from `check_rows`.
      date: day of the check.
    """
    kernel_runs = [part for part in runs if part.backend != "xla"]
    cases = [(part.part, case) for part in kernel_runs for case in part.run.results]
    planned = [
        capability
        for part in kernel_runs
        if part.part == "correctness"
        for capability in part.run.planned.values()
    ]
    capabilities = [c for c in dict.fromkeys(planned) if direction_of(c) is not None]
    problems = _first_problems([case for _, case in cases])
    not_run = [c for part in kernel_runs for c in part.run.cases_not_run().items()]
    all_planned = [c for part in kernel_runs for c in part.run.planned.values()]
    ratios: dict[str, float] = {}
    for part, case in cases:
        ratio = case.figures.get(SPEED_RATIO) if part == "speed" and case.ok else None
        if ratio is not None:
            ratios[case.capability] = min(ratio, ratios.get(case.capability, ratio))
    verdicts = []
    for name in capabilities:
        problem = problems.get(name) or _problem_of_step(name, capabilities, problems)
        num_cases = sum(c == name or _takes_part(name, c) for c in all_planned)
        missing = _incomplete(name, not_run)
        if problem is None and missing is not None:
            # Any complete check may replace this verdict, which knows of no fault.
            problem, num_cases = missing, 1
        verdict = Verdict(
            capability=name,
            is_equal=problem is None,
            problem=problem,
            speed_ratio=ratios.get(name),
            num_cases=num_cases,
            date=date.isoformat(),
        )
        verdicts.append(verdict)
    return verdicts


def _first_problems(cases: Sequence[CaseEnded]) -> dict[str, str]:
    """Returns the first problem of each capability that failed."""
    problems: dict[str, str] = {}
    for case in cases:
        if not case.ok:
            text = f"{case.case}: {case.problem or 'failed'}"
            problems.setdefault(case.capability, text)
    return problems


def _problem_of_step(
    name: str, capabilities: Sequence[str], problems: Mapping[str, str]
) -> str | None:
    """Returns the problem of a step or exchange that a capability takes part in."""
    for failed, problem in problems.items():
        if not _takes_part(name, failed):
            continue
        shared = [c for c in capabilities if rows_of(failed) in (None, rows_of(c))]
        if not any(capability in problems for capability in shared):
            return problem
    return None


def _takes_part(name: str, whole: str) -> bool:
    """Returns True if a capability takes part in the cases of a step or exchange."""
    return direction_of(whole) is None and rows_of(whole) in (None, rows_of(name))


def _incomplete(name: str, not_run: Sequence[tuple[str, str]]) -> str | None:
    """Returns the problem of a capability with cases that did not run."""
    cases = [case for case, c in not_run if c == name or _takes_part(name, c)]
    if not cases:
        return None
    return f"the check is not complete, without {cases[0]} ({len(cases)} did not run)"


def findings_on_rows(runs: Sequence[PartRun]) -> list[Finding]:
    """Returns a finding for each part, and one for each case that failed."""
    findings = []
    for part in runs:
        check = f"{part.backend} {part.part}"
        results = part.run.results
        failed = [case for case in results if not case.ok]
        done = "equal to the dense reference" if part.part == "correctness" else "timed"
        text = f"{len(results) - len(failed)} of {len(results)} cases {done}"
        status = "failed" if failed else "ok" if results else "unmeasured"
        findings.append(Finding(check=check, status=status, text=text))
        findings += [_failed_case(check, case, part.backend) for case in failed]
        if part.run.problem is not None:
            findings.append(_unfinished(check, part.run))
    return findings


def _failed_case(check: str, case: CaseEnded, backend: Backend) -> Finding:
    way_out = "Attach the report (--json FILE) to a bug report."
    if backend != "xla":
        way_out = f'Do not ask for these kernels by name; "auto" avoids them. {way_out}'
    return Finding(
        check=check,
        status="failed",
        text=f"{case.case}: {case.problem or 'failed'}",
        way_out=way_out,
    )


def _unfinished(check: str, run: IsolatedRun) -> Finding:
    if run.ended_by == "deadline":
        return Finding(
            check=check,
            status="unmeasured",
            text=f"{run.problem}",
            way_out="XLA runs rows whose check is not complete. Give the cases more "
            "time with --seconds.",
        )
    return Finding(
        check=check,
        status="failed",
        text=f"The child process {run.problem}.",
        way_out="Run the doctor again with --quick. If the chip stays silent, restart "
        "the machine.",
    )

"""Runs the cases in a child process, and turns their results into verdicts."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import jax

from tpu_embedding.kernel_verdicts import Capability, KernelName, Verdict
from tpu_embedding.plan.memory import format_table
from tpu_embedding.tools.doctor.child_process import ChildLost, ChildProcess
from tpu_embedding.tools.doctor.devices import CHILD, FoundDevices
from tpu_embedding.tools.doctor.findings import Finding
from tpu_embedding.tools.doctor.row_cases import CaseResult, RowCase, row_cases

Tier = Literal["quick", "full"]

CASE_SECONDS: Final = 120.0
"""Time limit of one case, with its compilations. The first case of a child includes the
start of JAX and of the TPU."""

_MAX_LOST_CHILDREN: Final = 6
"""Children that may hang or crash before the remaining cases are given up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseRun:
    """The cases of a run of the doctor, and their results.

    Attributes:
      kernels: the backend of the kernels; None: the devices run XLA alone.
      cases: all cases that should run.
      results: results of the cases that ran, hung or crashed, in order.
    """

    kernels: KernelName | None
    cases: Sequence[RowCase]
    results: Sequence[CaseResult]


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


def run_cases(
    found: FoundDevices,
    tier: Tier,
    environment: Mapping[str, str],
    *,
    case_seconds: float = CASE_SECONDS,
    child: Sequence[str] = CHILD,
) -> CaseRun:
    """Runs the cases, and goes on in a new child after one that hangs or crashes.

    Args:
      found: the devices.
      tier: quick or full.
      environment: variables of the child.
      case_seconds: time limit of one case.
      child: command of the child.
    """
    kernels = kernels_on(found)
    coverage = "all" if kernels == "sparse_core" else "each once"
    cases = row_cases("quick" if tier == "quick" else coverage, len(found.memory))
    results: list[CaseResult] = []
    for _ in range(_MAX_LOST_CHILDREN):
        with ChildProcess(child, environment) as process:
            for case in cases[len(results) :]:
                question = {"case": dataclasses.asdict(case), "kernels": kernels}
                try:
                    answer = process.ask(question, case_seconds)
                except ChildLost as lost:
                    runs_kernels = kernels is not None and bool(case.directions)
                    problem = "problem" if runs_kernels else "xla_problem"
                    lost_case = CaseResult(case=case.name)
                    results.append(
                        dataclasses.replace(lost_case, **{problem: str(lost)})
                    )
                    break
                results.append(CaseResult(**answer))
        if len(results) == len(cases):
            break
    return CaseRun(kernels=kernels, cases=cases, results=results)


def make_verdicts(run: CaseRun, date: datetime.date) -> list[Verdict]:
    """Returns a verdict on each capability that the cases cover.

    A kernel is refused if one case that could refuse it failed, or did not run.

    Args:
      run: the cases and their results.
      date: day of the check.
    """
    if run.kernels is None:
        return []
    capabilities = [case.capability for case in run.cases]
    return [
        _verdict(capability, run, date)
        for capability in dict.fromkeys(capabilities)
        if capability is not None
    ]


def _verdict(capability: Capability, run: CaseRun, date: datetime.date) -> Verdict:
    results = {result.case: result for result in run.results}
    problem, ratios = None, []
    for case in run.cases:
        if problem is not None or not case.may_refuse(capability):
            continue
        result = results.get(case.name)
        if result is None:
            problem = f"the check is not complete: {case.name} did not run"
        elif result.problem is not None:
            problem = f"{case.name}: {result.problem}"
        elif case.capability is not None and result.speed_ratio is not None:
            ratios.append(result.speed_ratio)
    return Verdict(
        **capability._asdict(),
        problem=problem,
        speed_ratio=min(ratios, default=None),
        date=date.isoformat(),
    )


def findings_on_cases(run: CaseRun) -> list[Finding]:
    """Returns one finding for the cases together, and one for each that failed."""
    report = "Attach the output of the doctor to a bug report."
    avoid = f'Do not ask for these kernels by name; "auto" avoids them. {report}'
    failed = [
        Finding(
            check=f"rows by {backend}",
            status="failed",
            text=f"{result.case}: {problem}",
            way_out=way_out,
        )
        for result in run.results
        for backend, problem, way_out in (
            ("xla", result.xla_problem, report),
            (run.kernels, result.problem, avoid),
        )
        if problem is not None
    ]
    num_run, num_cases = len(run.results), len(run.cases)
    num_equal = sum(not (r.problem or r.xla_problem) for r in run.results)
    if num_run < num_cases:
        text = f"stopped after {_MAX_LOST_CHILDREN} cases that hung or crashed; "
        text += f"{num_cases - num_run} cases did not run"
        way_out = "Run the doctor again with --quick. If the chip stays silent, "
        way_out += "restart the machine."
        failed.append(
            Finding(check="rows", status="failed", text=text, way_out=way_out)
        )
    text = f"{num_equal} of {num_cases} cases equal to the dense reference"
    status = "failed" if failed else "ok"
    return [Finding(check="rows", status=status, text=text), *failed]


def format_times(run: CaseRun, verdicts: Sequence[Verdict]) -> str:
    """Returns the table of times, with the backend that each verdict chooses.

    A case with a verdict has a row even if it has no times. Without rows, the text is
    empty.
    """
    results = {result.case: result for result in run.results}
    by_capability = {verdict.capability: verdict for verdict in verdicts}
    header = ("time of one call", run.kernels or "kernels", "xla", "xla / kernel")
    rows: list[tuple[str, ...]] = []
    for case in run.cases:
        result = results.get(case.name, CaseResult(case=case.name))
        verdict = case.capability and by_capability.get(case.capability)
        if result.xla_seconds_per_call is None and verdict is None:
            continue
        chosen = ""
        if verdict is not None:
            chosen = "kernel" if verdict.allows_kernel else "XLA"
        own = _milliseconds(result.seconds_per_call)
        xla = _milliseconds(result.xla_seconds_per_call)
        ratio = "unmeasured"
        if result.speed_ratio is not None:
            ratio = f"{result.speed_ratio:.3g}x"
        rows.append((case.name, own, xla, ratio, chosen))
    return format_table([(*header, '"auto" runs'), *rows]) if rows else ""


def _milliseconds(seconds: float | None) -> str:
    return "unmeasured" if seconds is None else f"{1e3 * seconds:.3f} ms"

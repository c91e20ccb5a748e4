"""Executes the steps of a launch, or prints them."""

import concurrent.futures
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Final

from tpu_embedding.tools.launch.problems import NOT_FOUND, explain
from tpu_embedding.tools.launch.steps import Command, Do, OnHosts, Probe, Require, Step

_MAX_PARALLEL: Final = 16
"""Hosts that are reached at the same time; each costs a process of gcloud."""

_MISSING_PROGRAM: Final = {
    "gcloud": "install the Google Cloud CLI, cloud.google.com/sdk/docs/install",
    "kubectl": "run gcloud components install kubectl gke-gcloud-auth-plugin",
}


class LaunchError(RuntimeError):
    """Raised if a step of a launch fails, or finds something else than it expects."""


def print_steps(steps: Iterable[Step], show: Callable[[str], None] = print) -> None:
    """Prints steps as a script for bash, and runs nothing.

    A step that runs only if a resource is missing, or exists, stands behind a test of
    this resource.

    Args:
      steps: the steps.
      show: receives each step's text.
    """
    for step in steps:
        show(f"# {step.purpose}")
        match step:
            case Do(runs_if="always"):
                show(step.command.as_shell())
            case Do(probe=Probe() as probe):
                test = "if !" if step.runs_if == "missing" else "if"
                check = probe.command.as_shell()
                command = step.command.as_shell()
                show(f"{test} {check} >/dev/null; then\n{command}\nfi")
            case Require():
                for expected in step.probe.expected:
                    show(f"# {expected.path} must be {expected.value}")
                show(step.probe.command.as_shell())
            case OnHosts():
                show(step.as_shell())


def run_steps(steps: Iterable[Step], show: Callable[[str], None] = print) -> None:
    """Executes steps in order; the first failure ends it.

    Args:
      steps: the steps.
      show: receives a line per step.

    Raises:
      LaunchError: if a command fails, or if a resource differs from what is expected.
    """
    for step in steps:
        match step:
            case Do():
                _do(step, show)
            case Require():
                show(step.purpose)
                _require(step)
            case OnHosts():
                show(step.purpose)
                _on_hosts(step, show)


def _do(step: Do, show: Callable[[str], None]) -> None:
    if step.probe is not None:
        found = _find(step.probe, step.purpose)
        if found is None and step.runs_if == "exists":
            show(f"{step.purpose}: there is no {step.probe.resource}")
            return
        if found is not None and step.runs_if == "missing":
            show(f"{step.purpose}: {step.probe.resource} exists")
            _refuse_other(step.probe, found, step.probe.way_out)
            return
    show(step.purpose)
    _run(step.command, step.purpose)


def _require(step: Require) -> None:
    found = _find(step.probe, step.purpose)
    if found is None:
        raise LaunchError(f"there is no {step.probe.resource}: {step.way_out}.")
    _refuse_other(step.probe, found, step.way_out)


def _refuse_other(probe: Probe, found: dict, way_out: str) -> None:
    """Raises an error if a resource is not as expected."""
    problems = [expected.problem(found) for expected in probe.expected]
    if any(problems):
        differs = "; ".join(problem for problem in problems if problem)
        raise LaunchError(f"{probe.resource}: {differs}. Way out: {way_out}.")


def _find(probe: Probe, purpose: str) -> dict | None:
    """Returns the JSON of a resource, or None if it does not exist."""
    result = _execute(probe.command, capture=True)
    if result.returncode:
        if NOT_FOUND.search(result.stderr):
            return None
        raise _failure(probe.command, purpose, result)
    try:
        found = json.loads(result.stdout)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise LaunchError(
            f"cannot {purpose}: {probe.command.as_shell()} printed no JSON object."
        )
    return found


def _on_hosts(step: OnHosts, show: Callable[[str], None]) -> None:
    if isinstance(step.hosts, Command):
        result = _run(step.hosts, step.purpose, capture=True)
        hosts = tuple(result.stdout.split())
    else:
        hosts = step.hosts
    if len(hosts) != step.num_hosts:
        raise LaunchError(
            f"cannot {step.purpose}: there must be {step.num_hosts} hosts, got "
            f"{len(hosts)}. Way out: tpu-embedding launch status shows them; wait "
            "until all are there, or delete the launch and create it again."
        )
    commands = step.commands(hosts)
    if len(commands) == 1:
        _run(commands[0], step.purpose)
        return
    with concurrent.futures.ThreadPoolExecutor(_MAX_PARALLEL) as pool:
        running = [
            pool.submit(_run, command, f"{step.purpose} ({host})")
            for command, host in zip(commands, sorted(hosts), strict=True)
        ]
    problems = [str(error) for each in running if (error := each.exception())]
    for problem in problems[1:]:
        show(problem)
    if problems:
        raise LaunchError(problems[0])


def _run(
    command: Command, purpose: str, *, capture: bool = False
) -> subprocess.CompletedProcess[str]:
    result = _execute(command, capture=capture)
    if result.returncode:
        raise _failure(command, purpose, result)
    return result


def _failure(
    command: Command, purpose: str, result: subprocess.CompletedProcess[str]
) -> LaunchError:
    reason = explain(result.stderr)
    return LaunchError(
        f"cannot {purpose}: {reason} [{command.argv[0]}: exit status "
        f"{result.returncode}]"
    )


def _execute(command: Command, *, capture: bool) -> subprocess.CompletedProcess[str]:
    """Runs a command; unless captured, what it prints is shown as it comes."""
    argv = list(command.argv)
    if shutil.which(argv[0]) is None:
        if argv[0] != "tpu-embedding":
            raise LaunchError(f"{argv[0]} is missing: {_MISSING_PROGRAM[argv[0]]}.")
        argv[:1] = [sys.executable, "-m", "tpu_embedding.tools.cli"]
    if capture:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    with subprocess.Popen(
        argv,
        stdin=subprocess.PIPE if command.stdin else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        if process.stdin is not None:
            # The program may end before it has read all; its status tells.
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(command.stdin)
        errors = []
        for line in process.stderr:
            sys.stderr.write(line)
            errors.append(line)
    return subprocess.CompletedProcess(argv, process.returncode, "", "".join(errors))

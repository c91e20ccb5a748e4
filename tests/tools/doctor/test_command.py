"""The real command with its real child, on the CPU of this machine."""

import datetime
import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from tests.conftest import needs_kernels
from tpu_embedding.tools.doctor.isolated import Deadlines, run_isolated
from tpu_embedding.tools.doctor.kernel_checks import CHILD, PartRun, make_verdicts

jsonschema = pytest.importorskip("jsonschema")

ROOT = pathlib.Path(__file__).parents[3]
SCHEMA = json.loads((pathlib.Path(__file__).parent / "report_schema.json").read_text())


def run_doctor(directory, *arguments):
    """Runs the command; returns its exit status, output and JSON."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [str(ROOT), *filter(None, sys.path)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "TPU_EMBEDDING_VERDICTS": str(directory / "verdicts"),
    }
    report = directory / "report.json"
    command = [sys.executable, "-m", "tpu_embedding.tools.cli", "doctor", *arguments]
    finished = subprocess.run(
        [*command, "--port", str(port), "--json", str(report)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    document = json.loads(report.read_text())
    jsonschema.validate(document, SCHEMA)
    return finished.returncode, finished.stdout, document


@needs_kernels
@pytest.mark.full
def test_quick_check_of_this_machine(tmp_path):
    status, output, document = run_doctor(tmp_path, "--quick", "--expect", "2")
    # The machine has one CPU device, so the wrong number of devices is found.
    failed = [f["check"] for f in document["findings"] if f["status"] == "failed"]
    assert (status, failed) == (1, ["expected devices"]), output
    # A loaded machine may run out of time; the cases that ran are right.
    assert document["cases"], output
    assert all(case["ok"] for case in document["cases"])
    assert {case["backend"] for case in document["cases"]} <= {"xla", "interpreter"}
    for verdict in document["verdicts"]:
        assert verdict["is_equal"] and verdict["problem"] is None
    stored = list((tmp_path / "verdicts").iterdir())
    assert len(stored) == 1 and stored[0].name.startswith("cpu-interpreter-")
    assert str(pathlib.Path.home()) not in json.dumps(document)


@needs_kernels
@pytest.mark.full
def test_a_faulty_kernel_gets_a_verdict_against_it():
    command = [*CHILD, "--backend", "interpreter", "--part", "correctness"]
    command += ["--tier", "quick", "--fault", "zero_rows:read"]
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths}
    run = run_isolated(command, Deadlines(total=240), environment=environment)
    assert run.problem is None
    part = PartRun(backend="interpreter", part="correctness", run=run)
    verdicts = make_verdicts([part], datetime.date(2026, 1, 31))
    unequal = [v.capability for v in verdicts if not v.is_equal]
    assert unequal == ["read, dim 32"] and len(verdicts) == 6

"""The whole command: findings, tables, JSON, verdicts and the exit status."""

import json
import os
import pathlib
import socket
import sys

import pytest

from tests.conftest import needs_kernels
from tests.verdict_files import record_of, verdict, write_records
from tpu_embedding.kernel_verdicts import capability_of, load_verdicts
from tpu_embedding.tools.cli import main
from tpu_embedding.tools.doctor import examine, kernel_checks
from tpu_embedding.tools.doctor.devices import FoundDevices

jsonschema = pytest.importorskip("jsonschema")

ROOT = pathlib.Path(__file__).parents[3]
FAKE = pathlib.Path(__file__).parent / "fake_child.py"
SCHEMA = json.loads((pathlib.Path(__file__).parent / "report_schema.json").read_text())
CPU = FoundDevices(platform="cpu", kinds=("cpu",) * 2, memory=(None,) * 2)
READ = capability_of("read", 32)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Returns a function that sets the devices and the child of the doctor."""
    monkeypatch.setenv("TPU_EMBEDDING_VERDICTS", str(tmp_path / "verdicts"))

    def change(
        *deeds, found: FoundDevices | None = CPU, problem=None, files=(), seconds=60.0
    ):
        monkeypatch.setattr(examine, "find_devices", lambda _: (found, problem))
        monkeypatch.setattr(examine, "tpu_device_files", lambda: list(files))
        monkeypatch.setattr(
            examine,
            "run_cases",
            lambda found, tier, variables: kernel_checks.run_cases(
                found,
                tier,
                variables,
                case_seconds=seconds,
                child=(sys.executable, str(FAKE), *deeds),
            ),
        )

    change()
    return change


@pytest.fixture
def run(machine, tmp_path, capsys):
    """Returns a function that runs the command: exit status, output, JSON."""

    def run_command(*arguments):
        path = tmp_path / "report.json"
        status = main(["doctor", "--json", str(path), *arguments])
        document = json.loads(path.read_text())
        jsonschema.validate(document, SCHEMA)
        return status, capsys.readouterr().out, document

    return run_command


@needs_kernels
def test_all_is_well(run, machine):
    machine("pool, dim 64:ratio=0.5")
    status, output, document = run("--expect", "2")
    assert status == 0 and "all is well" in output
    assert document["result"] == "ok" and document["kernels"] == "interpreter"
    assert {case["case"] for case in document["cases"]} >= {"read, dim 32"}
    stored = load_verdicts("cpu", "interpreter")
    assert stored.allows(READ) and not stored.allows(capability_of("pool", 64))
    (times,) = (x for x in output.splitlines() if x.startswith("read, dim 32"))
    assert times.split()[-5:] == ["2.000", "ms", "3.000", "ms", "1.5x"]


def test_the_screen_shows_a_way_out_of_each_failure(run, machine):
    machine("step, dim 32:wrong by xla", files=["/dev/accel0"])
    status, output, document = run("--expect", "8")
    assert status == 1 and document["result"] == "failed"
    failed = [line for line in output.splitlines() if line.startswith("FAILED")]
    ways_out = [f["way_out"] for f in document["findings"] if f["status"] == "failed"]
    assert len(failed) == len(ways_out) >= 3
    texts = "\n".join(failed)
    assert "Expected 8 devices" in texts  # wrong number of devices
    assert "although this host has TPU chips" in texts
    assert "rows by xla: step, dim 32: row 7 is zero" in texts


def test_clobbered_variables_fail_on_a_host_with_chips(run, machine, monkeypatch):
    monkeypatch.setattr(
        examine,
        "user_environment",
        lambda: os.environ | {"TPU_SKIP_MDS_QUERY": "1"},
    )
    status, output, _ = run()
    assert status == 0 and "This host has no TPU chips" in output
    machine(files=["/dev/accel0"])
    status, output, _ = run()
    assert status == 1 and "FAILED      variable TPU_SKIP_MDS_QUERY" in output


def test_jax_that_does_not_start(run, machine):
    machine(found=None, problem="hangs: no result in 90 s; killed")
    status, output, document = run()
    assert status == 1 and "JAX did not start: hangs" in output
    assert document["devices"] is None and document["cases"] == []


NO_ANSWER = {
    "hangs": "read, dim 32:hang",
    "crashes": "read, dim 32:segfault",
    "does not start": "start:exit",
}


@needs_kernels
@pytest.mark.parametrize("fault", NO_ANSWER)
@pytest.mark.parametrize("options", [(), ("--quick",)], ids=["full", "quick"])
def test_an_earlier_verdict_does_not_outlive_a_case_without_an_answer(
    run, machine, fault, options
):
    write_records(record_of("cpu", "interpreter", verdict("read", 32)))
    assert load_verdicts("cpu", "interpreter").allows(READ)
    # A loaded machine starts Python in a few seconds.
    machine(NO_ANSWER[fault], seconds=5.0 if fault == "hangs" else 60.0)
    status, _, document = run(*options)
    assert status == 1 and document["result"] == "failed"
    assert not load_verdicts("cpu", "interpreter").allows(READ)


@needs_kernels
def test_a_quick_check_allows_no_kernel(run):
    status, output, document = run("--quick")
    assert status == 0 and document["tier"] == "quick"
    assert "only problems are stored" in output
    assert load_verdicts("cpu", "interpreter").verdicts == ()


def test_the_json_names_no_user_and_no_home(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "ada.lovelace")
    monkeypatch.setattr(socket, "gethostname", lambda: "analytical-engine")
    flags = "--dump=/data/ada.lovelace/x --at=analytical-engine"
    monkeypatch.setattr(
        examine, "user_environment", lambda: os.environ | {"XLA_FLAGS": flags}
    )
    _, output, document = run()
    assert "ada.lovelace" in output
    text = json.dumps(document)
    for name in ("ada.lovelace", "analytical-engine", str(tmp_path)):
        assert name not in text
    assert "--dump=/data/USER/x --at=HOST" in text


def test_json_on_the_standard_output(machine, capsys):
    assert main(["doctor", "--json", "-"]) == 0
    printed = capsys.readouterr()
    jsonschema.validate(json.loads(printed.out), SCHEMA)
    assert "all is well" in printed.err


@needs_kernels
def test_verdicts_that_cannot_be_stored(run, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TPU_EMBEDDING_VERDICTS", str(tmp_path / "file" / "verdicts"))
    status, output, _ = run()
    assert status == 0 and "WARNING     verdicts: the verdicts cannot be" in output


WRONG = {
    "--expect v9:8": "hardware must be one of",
    "--expect eight": "--expect must be a number",
    "--json /nonexistent/report.json": "is not a directory",
    "--devices 0": "at least 1",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_usage(arguments, capsys):
    try:
        status = main(["doctor", *arguments.split()])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert WRONG[arguments] in capsys.readouterr().err


@needs_kernels
@pytest.mark.full
def test_quick_check_of_this_machine(machine, monkeypatch, run):
    """The real child, on the CPU."""
    for module, name in (("devices", "find_devices"), ("kernel_checks", "run_cases")):
        real = getattr(sys.modules[f"tpu_embedding.tools.doctor.{module}"], name)
        monkeypatch.setattr(examine, name, real)
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    monkeypatch.setattr(
        examine, "user_environment", lambda: os.environ | {"PYTHONPATH": paths}
    )
    status, output, document = run("--quick", "--devices", "1", "--expect", "2")
    failed = [f["check"] for f in document["findings"] if f["status"] == "failed"]
    assert (status, failed) == (1, ["expected devices"]), output
    assert len(document["cases"]) == 7
    for case in document["cases"]:
        assert case["problem"] is case["xla_problem"] is None
        assert case["speed_ratio"] > 0
    assert len(document["verdicts"]) == 6

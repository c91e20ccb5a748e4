"""The whole command: findings, tables, JSON, verdicts and the exit status."""

import os
import pathlib
import sys

import pytest

from tests.conftest import needs_kernels
from tests.verdict_files import record_of, verdict, write_records
from tpu_embedding.kernel_verdicts import capability_of, load_verdicts
from tpu_embedding.tools.cli import main
from tpu_embedding.tools.doctor import examine, kernel_checks
from tpu_embedding.tools.doctor.devices import FoundDevices

ROOT = pathlib.Path(__file__).parents[3]
FAKE = pathlib.Path(__file__).parent / "fake_child.py"
CPU = FoundDevices(platform="cpu", kinds=("cpu",) * 2, memory=(None,) * 2)
READ = capability_of("read", 32)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Returns a function that sets the devices and the child of the doctor."""
    monkeypatch.setenv("TPU_EMBEDDING_VERDICTS", str(tmp_path / "verdicts"))

    def change(*deeds, found: FoundDevices | str = CPU, files=(), seconds=60.0):
        monkeypatch.setattr(examine, "find_devices", lambda _: found)
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
def run(machine, capsys):
    """Returns a function that runs the command: exit status, and output."""

    def run_command(*arguments):
        status = main(["doctor", *arguments])
        return status, capsys.readouterr().out

    return run_command


@needs_kernels
def test_all_is_well(run, machine):
    machine("pool, dim 64:ratio=0.5")
    status, output = run("--expect", "2")
    assert status == 0 and "all is well" in output
    stored = load_verdicts("cpu", "interpreter")
    assert stored.allows(READ) and not stored.allows(capability_of("pool", 64))
    times = {
        name: line.split()[-6:]
        for name in ("read, dim 32", "pool, dim 64")
        for line in output.splitlines()
        if line.startswith(name)
    }
    assert times["read, dim 32"] == ["2.000", "ms", "3.000", "ms", "1.5x", "kernel"]
    assert times["pool, dim 64"] == ["2.000", "ms", "1.000", "ms", "0.5x", "XLA"]


def test_the_screen_shows_a_way_out_of_each_failure(run, machine):
    machine("step, dim 32:wrong by xla", files=["/dev/accel0"])
    status, output = run("--expect", "8")
    assert status == 1
    lines = output.splitlines()
    failed = [i for i, line in enumerate(lines) if line.startswith("FAILED")]
    texts = "\n".join(lines[i] for i in failed)
    for i in failed:
        assert "cases equal" in lines[i] or lines[i + 1].startswith(f"{'':10}  -> ")
    assert "Expected 8 devices" in texts  # wrong number of devices
    assert "although this host has TPU chips" in texts
    assert "rows by xla: step, dim 32: row 7 is zero" in texts


def test_clobbered_variables_fail_on_a_host_with_chips(run, machine, monkeypatch):
    monkeypatch.setattr(
        examine,
        "user_environment",
        lambda: os.environ | {"TPU_SKIP_MDS_QUERY": "1"},
    )
    status, output = run()
    assert status == 0 and "This host has no TPU chips" in output
    machine(files=["/dev/accel0"])
    status, output = run()
    assert status == 1 and "FAILED      variable TPU_SKIP_MDS_QUERY" in output


def test_jax_that_does_not_start(run, machine):
    machine(found="hangs: no result in 90 s; killed")
    status, output = run()
    assert status == 1 and "JAX did not start: hangs" in output
    assert "lookups and updates" not in output


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
    status, _ = run(*options)
    assert status == 1
    assert not load_verdicts("cpu", "interpreter").allows(READ)


@needs_kernels
def test_a_quick_check_allows_no_kernel(run):
    status, output = run("--quick")
    assert status == 0
    assert "only problems are stored" in output
    assert load_verdicts("cpu", "interpreter").verdicts == ()


@needs_kernels
def test_verdicts_that_cannot_be_stored(run, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TPU_EMBEDDING_VERDICTS", str(tmp_path / "file" / "verdicts"))
    status, output = run()
    assert status == 0 and "WARNING     verdicts: the verdicts cannot be" in output


WRONG = {
    "--expect v9:8": "hardware must be one of",
    "--expect eight": "--expect must be a number",
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
    status, output = run("--quick", "--devices", "1", "--expect", "2")
    failed = [line for line in output.splitlines() if line.startswith("FAILED")]
    assert status == 1 and len(failed) == 1, output
    assert "expected devices" in failed[0]
    assert "7 of 7 cases equal to the dense reference" in output
    assert "unmeasured" not in output

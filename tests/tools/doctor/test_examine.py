"""The whole command with a fake child: findings, tables, JSON, exit status."""

import json
import pathlib
import socket
import sys

import pytest

from tests.conftest import needs_kernels
from tpu_embedding.kernel_verdicts import (
    Verdict,
    current_key,
    load_verdicts,
    save_verdicts,
)
from tpu_embedding.tools.cli import main
from tpu_embedding.tools.doctor import examine
from tpu_embedding.tools.doctor.devices import FoundDevices
from tpu_embedding.tools.doctor.kernel_checks import CheckSettings

jsonschema = pytest.importorskip("jsonschema")

FAKE = pathlib.Path(__file__).parent / "fake_child.py"
SCHEMA = json.loads((pathlib.Path(__file__).parent / "report_schema.json").read_text())
CPU = FoundDevices(platform="cpu", kinds=("cpu",) * 2, memory=(None,) * 2)
GOOD = (
    *("xla:ok", "correctness/read, dim 8:ok", "correctness/write, dim 8:ok"),
    *("speed/read, dim 8:ratio=1.5", "speed/write, dim 8:ratio=0.5"),
)


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Returns a function that sets the devices and the child of the doctor."""
    monkeypatch.setenv("TPU_EMBEDDING_VERDICTS", str(tmp_path / "verdicts"))

    def change(cases=GOOD, found: FoundDevices | None = CPU, problem=None, files=()):
        child = (sys.executable, str(FAKE), *cases)
        monkeypatch.setattr(examine, "find_devices", lambda _: (found, problem))
        monkeypatch.setattr(examine, "tpu_device_files", lambda: list(files))
        monkeypatch.setattr(
            examine,
            "CheckSettings",
            lambda tier, seconds: CheckSettings(
                tier=tier, seconds=60, case_seconds=1.0, child=child
            ),
        )

    change()
    return change


@pytest.fixture
def run(machine, tmp_path, capsys, free_port):
    """Returns a function that runs the command: exit status, output, JSON."""

    def run_command(*arguments):
        path = tmp_path / "report.json"
        status = main(["doctor", "--json", str(path), "--port", free_port, *arguments])
        document = json.loads(path.read_text())
        jsonschema.validate(document, SCHEMA)
        return status, capsys.readouterr().out, document

    return run_command


@needs_kernels
def test_all_is_well(run):
    status, output, document = run("--expect", "2")
    assert status == 0 and "all is well" in output
    assert document["result"] == "ok" and document["counts"].get("failed", 0) == 0
    assert {case["case"] for case in document["cases"]} >= {"read, dim 8"}
    verdicts = {v["capability"]: v["speed_ratio"] for v in document["verdicts"]}
    assert verdicts == {"read, dim 8": 1.5, "write, dim 8": 0.5}
    stored = load_verdicts("cpu", "interpreter")
    assert stored.allows("read, dim 8") and not stored.allows("write, dim 8")
    # Achieved bandwidth: 1 MB in 2 ms; the model moves 4 times the minimum.
    (line,) = (
        x
        for x in output.splitlines()
        if "1.5x  " in x and "GB" not in x and "yes" not in x
    )
    assert line.split()[-4:] == ["1.5x", "0.5", "unmeasured", "4.0x"]


def test_the_screen_shows_a_way_out_of_each_failure(run, machine):
    machine(cases=("xla:wrong",), files=["/dev/accel0"])
    status, output, document = run("--expect", "8")
    assert status == 1 and document["result"] == "failed"
    lines = output.splitlines()
    failed = [i for i, line in enumerate(lines) if line.startswith("FAILED")]
    assert len(failed) == document["counts"]["failed"] >= 3
    ways_out = [f for f in document["findings"] if f["status"] == "failed"]
    assert sum(f["way_out"] is not None for f in ways_out) >= 3
    texts = "\n".join(lines[i] for i in failed)
    assert "Expected 8 devices" in texts  # wrong number of devices
    assert "although this host has TPU chips" in texts
    assert "row 7 is zero" in texts


def test_clobbered_variables_fail_on_a_host_with_chips(run, machine, monkeypatch):
    monkeypatch.setattr(
        examine, "user_environment", lambda: {"TPU_SKIP_MDS_QUERY": "1"}
    )
    status, output, _ = run()
    assert status == 0 and "This host has no TPU chips" in output
    machine(files=["/dev/accel0"])
    status, output, _ = run()
    assert status == 1 and "FAILED      variable TPU_SKIP_MDS_QUERY" in output


def test_jax_that_does_not_start(run, machine):
    machine(found=None, problem="hangs: no answer in 90 s")
    status, output, document = run()
    assert status == 1 and "JAX did not start: hangs" in output
    assert document["devices"] is None and document["cases"] == []


@needs_kernels
def test_a_hang_and_a_crash_are_reported_not_suffered(run, machine):
    machine(
        cases=(
            *("xla:ok", "correctness/read, dim 8:hang"),
            *("correctness/pool, dim 8:segfault", "correctness/write, dim 8:ok"),
        )
    )
    status, output, document = run("--quick")
    assert status == 1 and document["tier"] == "quick"
    problems = {v["capability"]: v["problem"] for v in document["verdicts"]}
    assert "hangs: no result in 1 s; killed" in problems["read, dim 8"]
    assert "crashed by SIGSEGV" in problems["pool, dim 8"]
    assert problems["write, dim 8"] is None
    assert "read, dim 8: hangs" in output


EARLIER = Verdict(
    capability="read, dim 8",
    is_equal=True,
    problem=None,
    speed_ratio=1.5,
    num_cases=2,
    date="2026-01-31",
)
NO_ANSWER = {
    "hangs": ("xla:ok", "correctness/read, dim 8:hang", "speed/read, dim 8:ratio=2"),
    "does not start": ("correctness/start:no chip", "xla:ok"),
}


@needs_kernels
@pytest.mark.parametrize("fault", NO_ANSWER)
def test_an_earlier_verdict_does_not_outlive_a_check_without_an_answer(
    run, machine, fault
):
    machine()  # sets the directory of verdicts
    save_verdicts(current_key("cpu", "interpreter"), [EARLIER])
    assert load_verdicts("cpu", "interpreter").allows("read, dim 8")
    machine(cases=NO_ANSWER[fault])
    status, _, document = run()
    assert status == 1 and document["result"] == "failed"
    assert not load_verdicts("cpu", "interpreter").allows("read, dim 8")


def test_an_unreachable_host(run, monkeypatch):
    monkeypatch.setattr("tpu_embedding.tools.doctor.ports._CONNECT_SECONDS", 0.1)
    monkeypatch.setattr("tpu_embedding.tools.doctor.ports.HOST_SECONDS", 0.3)
    status, output, document = run("--hosts", "127.0.0.1,a-host", "--host-index", "1")
    assert status == 1
    assert "Port" in output and "of 127.0.0.1 is not reachable" in output
    assert "HOST-0 is not reachable" in json.dumps(document)


def test_the_json_names_no_user_and_no_home(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "ada.lovelace")
    monkeypatch.setattr(socket, "gethostname", lambda: "analytical-engine")
    monkeypatch.setattr(
        examine,
        "user_environment",
        lambda: {"XLA_FLAGS": "--dump=/data/ada.lovelace/x --at=analytical-engine"},
    )
    _, output, document = run()
    assert "ada.lovelace" in output
    text = json.dumps(document)
    for name in ("ada.lovelace", "analytical-engine", str(tmp_path)):
        assert name not in text
    assert "--dump=/data/USER/x --at=HOST" in text


def test_json_on_the_standard_output(machine, capsys, free_port):
    assert main(["doctor", "--json", "-", "--port", free_port]) == 0
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
    "--hosts a,,b": "different names or addresses",
    "--hosts a,a": "different names or addresses",
    "--hosts a,b --host-index 2": "--host-index must be a place in --hosts",
    "--port 0": "from 1 to 65535",
    "--seconds 0": "from 1 to 86400",
    "--port 70000": "from 1 to 65535",
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

"""The doctor: on this machine, and on TPU hosts that fakes play."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.rejections import rejects
from tpu_embedding.hardware import GIBIBYTE
from tpu_embedding.tools import cli
from tpu_embedding.tools.doctor import cases, examine, timings
from tpu_embedding.tools.doctor.examine import (
    ask_child,
    check_devices,
    check_holders,
    check_variables,
    check_versions,
    parse_expectation,
)

CHIPS = ["/dev/accel0", "/dev/accel1"]
ROOT = pathlib.Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def found_devices(count=8, kind="TPU v5 lite", platform="tpu", gibibytes=15.7):
    limit = None if gibibytes is None else int(gibibytes * GIBIBYTE)
    return {"platform": platform, "kinds": [kind] * count, "memory": [limit] * 4}


def statuses(findings):
    return {finding.check: finding.status for finding in findings}


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("JAX_PLATFORMS=cpu", ["FAILED"]),
        ("JAX_PLATFORMS=tpu,cpu", []),
        ("TPU_SKIP_MDS_QUERY=1", ["FAILED"]),
        ("TPU_SKIP_MDS_QUERY=false", []),
        ("TPU_VISIBLE_DEVICES=1", ["warning"]),
        ("MEGASCALE_NUM_SLICES=2", ["warning"]),
        ("UNKNOWN=1", []),
    ],
)
def test_variables(assignment, expected):
    variables = dict([assignment.split("=")])
    on_tpu = check_variables(variables, CHIPS)
    assert [finding.status for finding in on_tpu] == expected
    assert all(assignment in finding.text for finding in on_tpu)
    assert {finding.status for finding in check_variables(variables, [])} <= {"ok"}


def test_variables_of_a_pod_of_gke():
    variables = {"TPU_SKIP_MDS_QUERY": "true", "TPU_PROCESS_BOUNDS": "1,1,1"}
    assert [x.status for x in check_variables(variables, CHIPS)] == [
        "FAILED",
        "warning",
    ]
    variables["KUBERNETES_SERVICE_HOST"] = "10.0.0.1"
    assert not list(check_variables(variables, CHIPS))


def test_libtpu_is_the_one_that_jax_asks_for(monkeypatch):
    assert statuses(check_versions()).get("libtpu") is None
    monkeypatch.setattr(
        "importlib.metadata.requires", lambda name: ["libtpu==9.9.*; extra == 'tpu'"]
    )
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1")
    assert statuses(check_versions())["libtpu"] == "FAILED"


@pytest.mark.parametrize(
    ("expected", "count", "kind", "status"),
    [
        ("8", 8, "TPU v5 lite", "ok"),
        ("16", 8, "TPU v5 lite", "FAILED"),
        ("v5e:2x4", 8, "TPU v5 lite", "ok"),
        ("v6e:8", 8, "TPU v5 lite", "FAILED"),
        ("tpu7x:4", 8, "TPU7x", "ok"),
        ("v5p:1", 1, "TPU of the future", "FAILED"),
    ],
)
def test_expected_devices(expected, count, kind, status):
    found = found_devices(count, kind)
    assert statuses(check_devices(found, expected, CHIPS))["expected"] == status


@pytest.mark.parametrize("text", ["", "v5e", "0", "-8", "v5e:", "v5e:8x", "v9:8", "²"])
def test_wrong_expectations(text, capsys):
    with rejects():
        parse_expectation(text)
    assert cli.main(["doctor", f"--expect={text}"]) == 2


def test_a_silent_fall_back_to_the_cpu():
    cpu = found_devices(1, "cpu", "cpu", None)
    assert statuses(check_devices(cpu, None, CHIPS))["fall-back"] == "FAILED"
    assert "fall-back" not in statuses(check_devices(cpu, None, []))
    assert "fall-back" not in statuses(check_devices(found_devices(), None, CHIPS))


@pytest.mark.parametrize(
    ("kind", "gibibytes", "status"),
    [
        ("TPU v5 lite", 15.7, "ok"),
        ("TPU v5 lite", 8, "FAILED"),
        ("TPU v5 lite", None, "warning"),
        ("TPU7x", 95, "ok"),  # Half of the chip's 192 GiB for each of two devices.
        ("TPU of the future", 1, None),
    ],
)
def test_device_memory(kind, gibibytes, status):
    found = found_devices(8, kind, gibibytes=gibibytes)
    assert statuses(check_devices(found, None, CHIPS)).get("memory") == status


def test_a_process_that_holds_the_tpu(tmp_path):
    for number, file in ((7, "/dev/null"), (42, CHIPS[1]), (os.getpid(), CHIPS[0])):
        (tmp_path / str(number) / "fd").mkdir(parents=True)
        (tmp_path / str(number) / "fd" / "3").symlink_to(file)
    (tmp_path / "99").mkdir()  # A process that has ended meanwhile.
    (finding,) = check_holders(CHIPS, tmp_path)
    assert finding.fix == "kill 42"
    assert not list(check_holders([], tmp_path))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import time; time.sleep(60)", "hangs: no result in 1 s"),
        ("import os; os.abort()", "crashed with SIGABRT"),
        ("raise SystemExit('no chips')", "ended with exit status 1: no chips"),
        ("pass", "ended without an answer"),
        (
            r"import os; os.write(2, b'\xff\n'); raise SystemExit(1)",
            "ended with exit status 1: \N{REPLACEMENT CHARACTER}",
        ),
    ],
)
def test_children_that_give_no_answer(code, words, monkeypatch):
    run = subprocess.run
    monkeypatch.setattr(
        examine.subprocess,
        "run",
        lambda command, **options: run([sys.executable, "-c", code], **options),
    )
    answer = ask_child(["devices"], ENVIRONMENT, 1)
    assert isinstance(answer, str) and answer.startswith(words)
    (finding,) = check_devices(answer, None, CHIPS)
    assert finding.status == "FAILED" and "JAX did not start" in finding.text


def test_answers_among_other_lines(monkeypatch):
    lines = ["starting", f'{examine.ANSWER}{{"kinds": []}}', "done"]
    result = subprocess.CompletedProcess([], 0, "\n".join(lines), "")
    monkeypatch.setattr(examine.subprocess, "run", lambda *_, **__: result)
    assert ask_child(["devices"], ENVIRONMENT, 1) == {"kinds": []}


def test_pairs_of_cores_have_equally_many_ids():
    """A limit below their number takes several minibatches; an equal one takes one."""
    case, num_cores, ids_per_core = cases.Case(dim=8), 16, 1024
    ids, _, _ = cases._draw_batch(case, num_cores, ids_per_core, num_rows=16_000)
    for of_core in ids.reshape(num_cores, ids_per_core):
        assert set(np.bincount(of_core % num_cores)) == {ids_per_core // num_cores}
    assert {0, 15_999} <= set(ids.ravel()) <= set(range(16_000))


def test_the_first_wrong_row_is_named():
    expected = np.ones((1000, 2), np.float32)
    actual, touched = expected.copy(), np.array([3, 20])
    actual[3] += 1e-6
    assert cases._difference("table", actual, expected, touched) is None
    actual[7, 1] += 1e-6
    text = cases._difference("table", actual, expected, touched)
    assert "table: 1 of" in text and "row 7," in text and "1.00000095" in text
    actual[3, 0] = np.nan
    text = cases._difference("table", actual, expected, touched)
    assert "table: 2 of" in text and "row 3:" in text and "nan" in text


STEP_OF_MANY_TABLES = {"problem": None, "text": "2.0 ms", "milliseconds": [2.0]}


def play(monkeypatch, found, problems, on_case=dict):
    """Plays children that find devices, and whose cases have the given problems."""

    def ask(question, environment, seconds):
        if question == ["devices"]:
            return found
        if question == ["sort"]:
            return {"problem": problems.get("sort"), "text": "sorted"}
        if question[0] == "time":
            return problems.get(("time", question[1]), STEP_OF_MANY_TABLES)
        _, *case = question
        on_case(environment)
        problem, step = problems.get(tuple(case)), 2.0
        if isinstance(problem, str):
            return problem
        step *= 1 if case[1] == "sparse_core" else 3
        return {"problem": problem and problem[0], "text": "equal", "step": step}

    monkeypatch.setattr(examine, "ask_child", ask)


def test_cases_of_a_host_with_sparse_cores(monkeypatch):
    problems = {
        ("dim 8, Adam", "sparse_core"): "hangs: no result in 300 s; killed",
        ("dim 32, Adagrad", "xla"): ["table: 1 of 9 rows are wrong"],
        "sort": "3 ids are wrong",
    }
    play(monkeypatch, found_devices(8, "TPU v6 lite", gibibytes=31.5), problems)
    monkeypatch.setattr(jax, "__version_info__", max(jax.__version_info__, (0, 12, 0)))
    findings = {x.check: x for x in examine.examine("v6e:2x4", 300)}
    failed = {check for check, x in findings.items() if x.status == "FAILED"}
    assert {"SparseCores, dim 8, Adam", "rows, dim 32, Adagrad", "sort"} <= failed
    assert "hangs" in findings["SparseCores, dim 8, Adam"].text
    assert findings["SparseCores, dim 128, Adagrad, no exchange"].status == "ok"
    assert "3.00 to 3.00" in findings["backend"].text


def test_cases_run_the_twin_elsewhere(monkeypatch):
    variables = []
    play(monkeypatch, found_devices(1, "cpu", "cpu", None), {}, variables.append)
    findings = list(examine.examine(None, 300))
    assert {x["JAX_NUM_CPU_DEVICES"] for x in variables} == {"4"}
    assert sum(x.check.startswith("twin, ") for x in findings) == len(cases.CASES)


def test_one_file_has_all_findings_and_figures(monkeypatch, tmp_path):
    problems = {("time", "sparse_core"): "hangs", "sort": "3 ids are wrong"}
    play(monkeypatch, found_devices(1, "cpu", "cpu", None), problems)
    monkeypatch.setattr("platform.node", lambda: "host-3")
    arguments = ["doctor", "--timings", "--output-dir", str(tmp_path / "new")]
    assert cli.main(arguments) == 1
    text = (tmp_path / "new" / "doctor-host-3.json").read_text()
    findings = {finding["check"]: finding for finding in json.loads(text)}
    assert findings["devices"]["figures"]["kinds"] == ["cpu"]
    assert findings["versions"]["figures"]["jax"] == jax.__version__
    assert findings["step of many tables, xla"]["figures"] == STEP_OF_MANY_TABLES
    for check, problem in [
        ("step of many tables, sparse_core", "hangs"),
        ("sort", "3 ids are wrong"),
    ]:
        assert (findings[check]["status"], findings[check]["text"]) == (
            "FAILED",
            problem,
        )


def test_the_sort_and_the_timed_step(monkeypatch):
    assert timings.check_sort()["problem"] is None
    unstable = lambda words: jax.lax.sort((words, -words.astype(int)), num_keys=1)  # noqa: E731
    monkeypatch.setattr(timings, "sort_words", unstable)
    assert "131,072 ids" in timings.check_sort()["problem"]
    monkeypatch.setattr(
        timings, "SMALL_SHAPES", dict(tables=2, rows=99, dim=8, batch=8)
    )
    figures = timings.time_step("xla", "")
    assert (figures["updates"], figures["tables"], figures["rounds"]) == ("xla", 2, 1)
    assert min(figures["milliseconds"]) > 0 and "devices" in figures["text"]


@pytest.mark.full
def test_wrong_rows_are_found(monkeypatch):
    name = "dim 24, Adam, minibatches"
    rule = cases.te.optimizers.adam(
        0.25, *cases._BETAS, cases._EPSILON, bias_correction=True
    )
    monkeypatch.setattr(cases.te.optimizers, "adam", lambda *_, **__: rule)
    problem = cases.run_case(name, "sparse_core")["problem"]
    assert problem.startswith("activations: ") and " instead of " in problem


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["dim 24, Adam, minibatches"], id="some"),
        pytest.param(list(cases.CASES), id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_this_machine(names, monkeypatch, capsys):
    chosen = {name: cases.CASES[name] for name in names}
    monkeypatch.setattr(examine, "CASES", chosen)
    monkeypatch.setattr(examine, "user_environment", lambda: ENVIRONMENT)
    assert cli.main(["doctor", "--expect", "7"]) == 1
    out = capsys.readouterr().out
    failed = [line for line in out.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 1 and "expected 7" in failed[0]
    num_steps = sum(len(case.backends) for case in chosen.values())
    assert out.count(": equal to NumPy; ") == num_steps

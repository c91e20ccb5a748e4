"""Tables of figures are what `benchmarks/results.json` gives."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from tests.tools.compile_report.report_cases import REPORT

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import render_tables  # noqa: E402  # pyright: ignore[reportMissingImports]
import results_file  # noqa: E402  # pyright: ignore[reportMissingImports]

TRAFFIC_CASE = dict(
    topology="v5p:2x2x1",
    dim=128,
    valence=1,
    optimizer="adagrad",
    dtype="float32",
    kernels="xla",
)


def test_no_table_is_stale():
    command = [sys.executable, "benchmarks/render_tables.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_table_is_shown():
    text = "".join(path.read_text() for path in render_tables._pages())
    for name in render_tables.TABLES:
        assert f"<!-- table: {name} -->" in text


def test_a_new_figure_replaces_the_earlier_one(tmp_path):
    results = results_file.load_results()
    before = len(results["compiled_traffic"]["results"])
    document = {
        "benchmark": "compiled_traffic",
        "versions": {"jax": "1.2.3"},
        "results": [TRAFFIC_CASE | {"hbm_bytes": 1e6, "hbm_ratio": 77.0}],
    }
    assert results_file.merge(results, document) == "compiled_traffic"
    assert len(results["compiled_traffic"]["results"]) == before
    assert "| 77x |" in render_tables.TABLES["traffic"](results)

    results_file.save_results(results, tmp_path / "results.json")
    saved = results_file.load_results(tmp_path / "results.json")
    assert saved == json.loads(json.dumps(results))


def test_a_figure_of_a_new_case_is_added():
    results = results_file.load_results()
    before = len(results["compiled_traffic"]["results"])
    new = TRAFFIC_CASE | {"dim": 1024, "hbm_bytes": 1e6, "hbm_ratio": 4.0}
    document = {"benchmark": "compiled_traffic", "versions": {"jax": "1.2.3"}}
    results_file.merge(results, document | {"results": [new]})
    assert len(results["compiled_traffic"]["results"]) == before + 1


def test_figures_of_no_benchmark_are_refused():
    with pytest.raises(ValueError, match="must be one of"):
        results_file.merge(results_file.load_results(), {"results": []})


def test_a_compile_report_is_a_row():
    init = dataclasses.replace(
        REPORT.programs[0],
        name="initial tables",
        memory=dataclasses.replace(
            REPORT.memory, temporaries=5_250_000, required=7 * 10**9, fits=False
        ),
    )
    results = results_file.load_results()
    report = dataclasses.replace(REPORT, others=(init,))
    document = {"reports": [report.to_json()]}
    assert results_file.merge(results, document) == "compile_fit"
    row = results["compile_fit"]["results"][-1]
    assert row["config"] == REPORT.name
    assert not row["fits"]
    table = render_tables.TABLES["compile_fit"](results)
    assert "0.00525 GB | initial tables, 7 GB | no |" in table


def test_a_compile_report_without_all_programs_is_refused():
    document = {"reports": [REPORT.to_json()]}
    with pytest.raises(ValueError, match="'my step'.*compile it without --programs"):
        results_file.merge(results_file.load_results(), document)
